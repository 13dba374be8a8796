"""The demonstration from beginning to end: set up, ask, print. It reads as what a visitor is shown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loraplex.cli.output import clean
from loraplex.client.connection import Connection
from loraplex.client.inference import DIGEST_DIGITS, Answer
from loraplex.client.management import Management
from loraplex.demo.batch import BatchProof, compare
from loraplex.demo.next_step import build_hints
from loraplex.demo.question import Asker, ask_all
from loraplex.demo.team import STYLES, create_team
from loraplex.supervisor.display import Display
from loraplex.supervisor.platform import RunningPlatform

QUESTION = "What is a library?"
_MAX_TOKENS = 60
_WIDTH = 112
_SHORT_DIGEST = len("sha256:") + DIGEST_DIGITS


async def run_demo(platform: RunningPlatform, display: Display, console: Console, *, stop_after: bool) -> None:
    """Show four models answering one question in one batch; then stop the platform if `stop_after`."""
    await asyncio.to_thread(show, platform, display, console, keeps_serving=not stop_after)
    if stop_after:
        platform.stop.set()


def show(platform: RunningPlatform, display: Display, console: Console, *, keeps_serving: bool) -> None:
    """Set up three teams, ask all models at once, print what they said and what proves that it was one batch."""
    base = platform.base.spec.name
    with display.stage("Teams") as stage, Connection(platform.location) as connection:
        client = Management(connection)
        teams = [create_team(client, style) for style in STYLES]
        stage.result = ", ".join(f"{team.name} {team.version.digest[:_SHORT_DIGEST]}" for team in teams)
    askers = [Asker(base, platform.admin_key), *(Asker(team.name, team.key) for team in teams)]
    with display.stage("Adapters loaded by their first use"):
        ask_all(platform.url, askers, "Hello!", 1)
    before = platform.fetch_engine_metrics()
    with display.stage("Four answers at once"):
        started_at = time.perf_counter()
        answers = ask_all(platform.url, askers, QUESTION, _MAX_TOKENS)
        seconds = time.perf_counter() - started_at
    proof = compare(before, platform.fetch_engine_metrics())
    print_answers(console, askers, answers)
    print_proof(console, proof, answers, seconds)
    if keeps_serving:
        asker, others = askers[1], [team.name for team in teams[1:]]
        hints = build_hints(platform.url, platform.admin_key, asker, others, QUESTION)
        console.print(hints, markup=False, soft_wrap=True)
        console.print(f"Serving at {platform.url} until Ctrl-C.", soft_wrap=True)


def print_answers(console: Console, askers: Sequence[Asker], answers: Sequence[Answer]) -> None:
    """Print the answers side by side, or one under the other where the terminal is narrow."""
    console.print(f"\nFour models, one base, one question: [bold]{QUESTION}[/bold]\n")
    width = console.width if console.is_terminal else _WIDTH
    if width < _WIDTH:
        for asker, answer in zip(askers, answers, strict=True):
            console.print(Text(asker.model, style="bold cyan"))
            console.print(Text(f"{clean(answer.text.strip())}\n{_facts(answer)}\n"))
        return
    table = Table(box=None, padding=(0, 2, 1, 0), width=_WIDTH, pad_edge=False)
    for asker in askers:
        table.add_column(asker.model, ratio=1, header_style="bold cyan")
    table.add_row(*(Text(clean(answer.text.strip())) for answer in answers))
    table.add_row(*(Text(_facts(answer), style="dim") for answer in answers))
    console.print(table, width=_WIDTH)


def print_proof(console: Console, proof: BatchProof, answers: Sequence[Answer], seconds: float) -> None:
    """Print what the engine's counters say about the stretch in which the answers were made."""
    num_tokens = sum(answer.completion_tokens for answer in answers)
    console.print(
        f"One batch: {num_tokens} tokens in {proof.num_steps} steps and {seconds:.1f} s, "
        f"{num_tokens / seconds:.0f} tokens/s at once. {proof.num_steps_at_max} of the steps held "
        f"{proof.max_requests} requests, of the base and of {proof.max_adapters} adapters (loraplex_step_requests, "
        f"loraplex_step_adapters), and a step took {proof.gemms_per_step:.0f} base matrix products whatever its mix "
        "(loraplex_base_gemm_calls_total).\n",
        soft_wrap=True,
    )


def _facts(answer: Answer) -> str:
    digest = answer.short_digest if ":" in answer.digest else "base, no adapter"
    cut = ", cut off" if answer.is_cut else ""
    return f"{digest}\n{answer.completion_tokens} tokens{cut}, {answer.total_s:.2f} s"
