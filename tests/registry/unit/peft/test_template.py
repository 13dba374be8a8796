"""The chat template that an adapter brings: rendered once within limits, in a process that can be killed."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from loraplex_registry.peft import confined, template_rule
from loraplex_registry.peft.confined import run_confined
from loraplex_registry.peft.findings import Findings
from loraplex_registry.peft.limit import MAX_CPU_S, limit_task
from loraplex_registry.peft.template_process import run
from loraplex_registry.peft.template_rule import judge_template

TEMPLATES = sorted((Path(__file__).parents[3] / "chat_templates").glob("*.jinja"))
ALL = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(params=["fork", "interpreter"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to a process; a fork of the tests' process stands for one of the checks' own."""
    monkeypatch.setattr(confined, "_has_one_thread", lambda: request.param == "fork")
    return str(request.param)


def fault_of(tmp_path: Path, source: str | bytes, *, is_rendered: bool = True) -> str:
    path = tmp_path / "chat_template.jinja"
    path.write_bytes(source.encode() if isinstance(source, str) else source)
    findings = Findings()
    judge_template({path.name: path}, findings, is_rendered=is_rendered)
    found = [check for check in findings.checks() if check.verdict != "pass"]
    assert all((check.name, check.verdict, check.subject) == ("template", "fail", path.name) for check in found)
    return "".join(check.message for check in found)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_that_people_use_pass(tmp_path: Path, path: Path) -> None:
    assert fault_of(tmp_path, path.read_bytes()) == ""


@pytest.mark.parametrize(
    "source",
    [
        ALL,
        "{{ strftime_now('%Y') }} {{ messages | tojson(indent=2) }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% break %}{% endfor %}x",
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ bos_token + 'x' }}",
        "{% for part in messages[0].content %}{{ part.text + eos_token }}{% endfor %}",
        "{% generation %}{{ messages[-1]['content'] }}{% endgeneration %}",
        "{% if tools %}{{ 1 / 0 }}{% endif %}{{ namespace(x=dict(a=1)).x.a }}",
        "{{ unknown }}é",
    ],
)
def test_what_the_engine_renders_passes(tmp_path: Path, source: str) -> None:
    assert fault_of(tmp_path, source) == ""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for m in", "is not a template"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "is not a template"),
        ("{{ raise_exception('a system prompt\nis needed') }}", "a system prompt is needed"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content.nothing.more }}", "no attribute"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ 'a' * 2 ** 32 }}", "512 MiB"),
        ("{{ 'ab' * 5000000 }}", "more than 8388608 characters"),
        ("{% if false %}x{% endif %}", "writes nothing"),
        ("", "writes nothing"),
        ("{{ '\\ud800' }}", "cannot render"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_what_no_chat_could_be_rendered_with_is_refused(tmp_path: Path, source: str | bytes, says: str) -> None:
    assert says in fault_of(tmp_path, source)


# in Python's loop, and in C
LONG = {
    "loop": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "fill": "{% for i in range(100000) %}{% set x = 'a' * 300000000 %}{% endfor %}",
    "join": "{% for i in range(100000) %}{% set x = range(99999) | join(',') %}{% endfor %}",
    "power": "{% set n = 3 ** 30000000 %}{{ n % 7 }}",
}


@pytest.mark.parametrize("source", LONG.values(), ids=LONG.keys())
def test_a_template_that_never_ends_is_ended(tmp_path: Path, way: str, source: str) -> None:
    begin_s = time.monotonic()
    assert "250 ms of processor time" in fault_of(tmp_path, source)
    assert time.monotonic() - begin_s < 30
    assert fault_of(tmp_path, ALL) == ""


def test_who_renders_within_limits_anyway_need_not_render_here(tmp_path: Path) -> None:
    assert fault_of(tmp_path, "{{ 1 / 0 }}", is_rendered=False) == ""
    assert "UTF-8" in fault_of(tmp_path, b"\xff", is_rendered=False)


def test_a_process_that_is_killed_or_says_nonsense_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for outcome in (
        confined.Outcome(b"", -9),
        confined.Outcome(b"{", 0),
        confined.Outcome(b"[" * 100_000, 0),
        confined.Outcome(b"{}", 0, is_late=True),
    ):
        monkeypatch.setattr(template_rule, "run_confined", lambda *_, outcome=outcome: outcome)
        assert fault_of(tmp_path, ALL)


def keep_kernel_busy(reader: BinaryIO, writer: BinaryIO, system_s: float = 0.5) -> None:
    """Take hardly any user time: what a machine short of memory charges to whoever touches it."""
    limit_task(MAX_CPU_S)
    with open("/dev/zero", "rb", buffering=0) as zeros:  # noqa: PTH123 - nothing else is to take time
        buffer = bytearray(1 << 24)
        while os.times().system < system_s:
            zeros.readinto(buffer)
    writer.write(b"done")


def test_what_the_kernel_takes_ends_no_task_at_once() -> None:
    assert confined._fork(keep_kernel_busy, b"", 30.0) == (b"done", 0, False)


def test_what_the_kernel_takes_is_bounded_too() -> None:
    busy = functools.partial(keep_kernel_busy, system_s=60.0)
    assert confined._fork(busy, b"", 30.0)[1:] in ((-signal.SIGKILL, False), (-signal.SIGALRM, False))


def test_confined_work_that_waits_or_floods_is_killed(way: str) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    begin_s = time.monotonic()
    outcome = run_confined(lambda reader, writer: time.sleep(60), sleeper, b"x", 0.2)
    assert outcome.is_late
    assert time.monotonic() - begin_s < 30


def test_a_large_job_and_a_large_answer_pass_through(way: str) -> None:
    job = bytes(range(256)) * 8192
    echo = [sys.executable, "-c", "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])"]
    outcome = run_confined(lambda reader, writer: writer.write(reader.read()[::-1]) and None, echo, job, 20.0)
    assert outcome == (job[::-1], 0, False)


def test_work_that_does_not_read_its_job_ends_well(way: str) -> None:
    deaf = [sys.executable, "-c", "print('x', end='')"]
    outcome = run_confined(lambda reader, writer: writer.write(b"x") and None, deaf, bytes(1 << 20), 20.0)
    assert outcome.answer == b"x"


def test_only_a_process_with_one_thread_forks() -> None:
    code = (
        "import threading, time; from loraplex_registry.peft.confined import _has_one_thread as one; "
        "before = one(); threading.Thread(target=time.sleep, args=(5,), daemon=True).start(); print(before, one())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(sys.platform == "linux"), "False"]
    assert threading.active_count() >= 1
    assert run.__module__ == "loraplex_registry.peft.template_process"
