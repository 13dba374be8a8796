"""`loraplex advise`: what to change, and why, from what the platform has measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loraplex.cli.output import AsJson, print_json, print_table, say, stdout
from loraplex.cli.session import open_management

if TYPE_CHECKING:
    from loraplex.client.types import Finding


def advise(*, tenant: str | None = None, as_json: AsJson = False) -> None:
    """Say what to change, with the figures behind it, the effect to expect and the flag to give.

    A tenant's key hears of its own calls and adapters, a platform key of everything.

    Args:
        tenant: Only what concerns this one.
        as_json: Print JSON for programs.
    """
    with open_management() as client:
        found = client.list_advice(tenant)
    if as_json:
        print_json(found)
        return
    advice = [one for one in found if one.state == "advice"]
    _print_advice(advice)
    for state, title in (("fine", "Nothing to do"), ("not_enough", "Not enough traffic to say")):
        rows = [(one.rule, one.subject, one.message) for one in found if one.state == state]
        if rows:
            print_table(f"\n{title}", ("about", "of", "because"), rows, empty="")


def _print_advice(advice: Sequence[Finding]) -> None:
    if not advice:
        say("There is nothing to advise.")
    for one in advice:
        stdout().print(f"{one.rule}: {one.subject}", style="bold", markup=False, soft_wrap=True)
        for text in (one.message, one.effect):
            stdout().print(f"  {text}", markup=False, soft_wrap=True)
        if one.flag:
            stdout().print(f"  -> {one.flag}", markup=False, soft_wrap=True)
        stdout().print()
