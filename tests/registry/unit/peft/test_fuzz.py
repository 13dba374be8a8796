"""Mutations of good headers and configs: each is judged, none fails, hangs or grows. `make fuzz` runs them for long."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz_adapter import CONFIG, CONFIG_SEED, HEADER, HEADER_SEED, fuzz_config, fuzz_header, fuzz_json
from loraplex_registry.peft import config as config_module

SHORT, FULL = 150, 200_000
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, 2**62, 2**63, 2**64, -(2**63), 10**400, 0, -1, 1e-320, 1e308, -0.0, "8", "true", "false"])
    | st.floats(allow_nan=True)
    | st.text(max_size=8)
    | st.sampled_from(["LORA", "none", "all", "F32", "BF16", "\0", "\ud800", "(a*)*b", "../x", "q_proj", "é"])
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


@st.composite
def mutations(draw: st.DrawFn, original: dict[str, Any]) -> str:
    """JSON text of an object of which some values, at any depth, are others, doubled or gone."""
    value = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        place: Any = value
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            if isinstance(place, dict) and draw(st.integers(0, 4)) == 0:
                del place[key]
            else:
                place[key] = draw(VALUES)
            break
    text = json.dumps(value)
    if draw(st.integers(0, 9)) == 0:
        text = f"{{{json.dumps(draw(st.sampled_from(sorted(original))))}: {json.dumps(draw(LEAVES))}, {text[1:]}"
    return text


@st.composite
def damages(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes with a few flipped, cut out, put in or cut off."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, max(len(found) - 1, 0)))
        piece = draw(st.binary(max_size=4) | st.sampled_from([b"[", b"{", b'"', b"\\u0000", b"1e9", b"\xff", b"NaN"]))
        found[position : position + draw(st.integers(0, 3))] = piece
    return bytes(found[: draw(st.integers(0, len(found)))] if draw(st.integers(0, 4)) == 0 else found)


def frame(text: str, size: int) -> bytes:
    data = text.encode(errors="surrogatepass")
    return struct.pack("<Q", len(data)) + data + bytes(size)


HEADERS = damages(HEADER_SEED) | st.builds(frame, mutations(HEADER), st.sampled_from([12, 12, 12, 8, 0, 13]))
CONFIGS = damages(CONFIG_SEED) | mutations(CONFIG).map(lambda text: text.encode(errors="surrogatepass"))


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[bytes], None], st.SearchStrategy[bytes]], None]:
    count = FULL if request.config.getoption("--endure") else SHORT
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]

    def search(target: Callable[[bytes], None], inputs: st.SearchStrategy[bytes], **options: Any) -> None:
        chosen = {"max_examples": count, "deadline": None, "suppress_health_check": checks} | options
        settings(**chosen)(given(inputs)(target))()

    return search


@pytest.mark.endure
def test_any_header_is_read_or_refused(run: Callable[..., None]) -> None:
    run(fuzz_header, HEADERS)


@pytest.mark.endure
def test_any_config_is_judged(run: Callable[..., None]) -> None:
    run(fuzz_config, CONFIGS)


@pytest.mark.parametrize(
    "config",
    [b'{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "": 1}'],
)
def test_what_was_found_stays_mended(config: bytes) -> None:
    fuzz_config(config)


def test_a_header_whose_sizes_the_library_refuses_is_refused() -> None:
    header = b'{"a-0": {"dtype": "F32", "shape": [1, 3], "data_offsets": [%s, 12]}}'
    fuzz_json(header % b"-0")
    fuzz_json(header % b"0")


def test_a_broken_promise_is_found(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "_is_alpha", lambda value: 1 / value > 0)
    with pytest.raises(Exception, match=r"division|supported|instances"):
        run(fuzz_config, CONFIGS, max_examples=5000, derandomize=True, report_multiple_bugs=False)
