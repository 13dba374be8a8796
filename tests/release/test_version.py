"""One version: the file that has it, the installed distribution, the command, the API, the metrics, the chart."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import yaml

from loraplex.cli.app import build_app
from loraplex.fleet.view import FleetView
from loraplex.gateway.metrics import GatewayMetrics
from loraplex.openapi.document import build_document
from loraplex.version import __version__
from loraplex_engine.server.metric import FrontMetrics
from loraplex_registry.api.metric import RegistryMetrics

ROOT = Path(__file__).resolve().parents[2]
SEMANTIC = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-(alpha|beta|rc)\.\d+)?")


def test_the_version_is_semantic() -> None:
    assert SEMANTIC.fullmatch(__version__)


def test_the_installed_distribution_has_the_version_of_the_source() -> None:
    assert metadata.version("loraplex") == __version__, "the version changed after the installation: make setup"


def test_the_command_and_the_api_document_say_it() -> None:
    assert build_app().version == __version__
    assert build_document(())["info"]["version"] == __version__


def test_every_part_says_it_in_its_metrics() -> None:
    line = f'loraplex_build_info{{version="{__version__}"}} 1.0'
    for text in (GatewayMetrics().render(FleetView()), RegistryMetrics().render(), FrontMetrics().render()):
        assert line in text.decode().splitlines()


def test_the_chart_installs_this_version() -> None:
    chart = yaml.safe_load((ROOT / "helm" / "loraplex" / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == __version__
    assert SEMANTIC.fullmatch(chart["version"])
