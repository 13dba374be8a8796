"""`loraplex escalations`: the exceptions by which one adapter becomes a full fine-tune."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from cyclopts import App

from loraplex.cli.escalation_table import print_figures, print_list, print_one, show_copies
from loraplex.cli.example import examples
from loraplex.cli.output import AsJson, done, print_facts, print_json, print_table, say, when
from loraplex.cli.session import open_management
from loraplex.client.adapter_name import DEFAULT_NAME, parse_ref
from loraplex.client.errors import ClientError
from loraplex.client.escalations import Escalations

app = App(
    name="escalations",
    help="Let one adapter become a full fine-tune: with evidence, an owner, a budget and a review date.",
    help_format="plaintext",
    help_epilogue=examples(
        "loraplex escalations open team-x --evidence evidence.json --data test.jsonl",
        "loraplex escalations approve esc_... --owner grace --justification 'Contract 17' --budget 2500 "
        "--review-at 2027-06-30",
        "loraplex escalations register esc_... --pool team-x-full",
        "loraplex escalations activate esc_...",
        "loraplex escalations revert esc_...",
    ),
)
_DAY_LEN = len("2027-06-30")
_ANSWER_S = 30.0


@app.command(
    name="open",
    help_epilogue=examples("loraplex escalations open team-x/support --evidence evidence.json --data test.jsonl"),
)
def open_(
    name: str,
    /,
    *,
    evidence: Path,
    data: Path | None = None,
    reason: str | None = None,
    expires_at: str | None = None,
    idempotency_key: str | None = None,
    as_json: AsJson = False,
) -> None:
    """Ask for a full fine-tune of an adapter.

    Args:
        name: TENANT or TENANT/ADAPTER; with @NUMBER that version falls short, else the live one.
        evidence: A JSON file: evaluation, data_digest, num_samples, metric, base, lora, target, ranks_tried.
        data: The evaluation's data, whose sha256 becomes data_digest; refused if the evidence names another.
        reason: Why a LoRA is not enough, for whoever decides.
        expires_at: When the question is moot, RFC 3339 or a day. Default in 30 days.
        idempotency_key: Repeat with the same key, and it is opened once.
        as_json: Print JSON for programs.
    """
    ref = parse_ref(name)
    body = {
        "adapter": ref.adapter or DEFAULT_NAME,
        "version": None if ref.which is None else ref.require_number(),
        "evidence": read_evidence(evidence, data),
        "reason": reason,
        "expires_at": to_time(expires_at),
    }
    with open_escalations() as client:
        found = client.open(ref.tenant, _present(body), idempotency_key)
    _tell(found, as_json=as_json)
    if not as_json:
        print_figures(found)


@app.command(name="list", help_epilogue=examples("loraplex escalations list --state active"))
def list_(*, state: str | None = None, tenant: str | None = None, as_json: AsJson = False) -> None:
    """List escalations, newest first.

    Args:
        state: requested, approved, rejected, registered, active, overdue, closed or expired.
        tenant: Only this one's.
        as_json: Print JSON for programs.
    """
    with open_escalations() as client:
        found = client.list(state=state, tenant=tenant)
    if as_json:
        print_json(found)
        return
    print_list([_as_dict(one) for one in found])


@app.command(help_epilogue=examples("loraplex escalations show esc_..."))
def show(escalation: str, /, *, as_json: AsJson = False) -> None:
    """Show one with its evidence, figures and history.

    Args:
        escalation: Its id, as `escalations list` shows it.
        as_json: Print JSON for programs.
    """
    with open_escalations() as client:
        found = client.get(escalation)
    if as_json:
        print_json(found)
        return
    print_one(found)
    print_figures(found)
    print_table(
        "History",
        ("at", "verb", "state", "by", "details"),
        (
            (when(step["at"]), step["verb"], step["to_state"], step["actor"], json.dumps(step["details"]) or None)
            for step in found["history"]
        ),
        empty="Nothing was done yet.",
    )


@app.command(
    help_epilogue=examples(
        "loraplex escalations approve esc_... --owner grace --justification 'Contract 17' --budget 2500 --currency EUR "
        "--review-at 2027-06-30"
    )
)
def approve(
    escalation: str,
    /,
    *,
    owner: str,
    justification: str,
    budget: float,
    review_at: str,
    currency: str | None = None,
    on_overdue: Literal["keep", "revert"] | None = None,
    as_json: AsJson = False,
) -> None:
    """Say yes; by an administrator who did not ask for it.

    Args:
        escalation: Its id.
        owner: Who answers for the exception.
        justification: Why it is worth its money.
        budget: What it may cost a month.
        review_at: The day on which it is looked at again, within a year.
        currency: Of the budget, as EUR. Default USD.
        on_overdue: keep it or revert it when nobody has looked by then. Default keep.
        as_json: Print JSON for programs.
    """
    body = {
        "owner": owner,
        "justification": justification,
        "budget_per_month": budget,
        "review_at": to_time(review_at),
        "currency": currency,
        "on_overdue": on_overdue,
    }
    _move(escalation, "approve", body, as_json=as_json)


@app.command(help_epilogue=examples("loraplex escalations reject esc_... --reason 'Rank 64 was not tried'"))
def reject(escalation: str, /, *, reason: str, as_json: AsJson = False) -> None:
    """Say no, and why; by an administrator.

    Args:
        escalation: Its id.
        reason: What the team is told.
        as_json: Print JSON for programs.
    """
    _move(escalation, "reject", {"reason": reason}, as_json=as_json)


@app.command(help_epilogue=examples("loraplex escalations register esc_... --pool team-x-full --cost 2100"))
def register(
    escalation: str,
    /,
    *,
    pool: str,
    digest: str | None = None,
    cost: float | None = None,
    as_json: AsJson = False,
) -> None:
    """Bind the full fine-tune that a pool serves; by an administrator. What is live does not change yet.

    Args:
        escalation: Its id.
        pool: As LORAPLEX_POOLS names it.
        digest: Of its files, as `loraplex base pull --json` prints it. Default what the pool's engines report.
        cost: What it costs a month. Default the whole budget.
        as_json: Print JSON for programs.
    """
    with open_escalations() as client:
        try:
            digest = digest or client.find_digest(pool)
        except ClientError:
            # a pool may well be missing where it is too early for one
            client.check_possible(escalation, "register")
            raise
        found = client.move(escalation, "register", {"pool": pool, "digest": digest, "cost_per_month": cost})
    _tell(found, as_json=as_json)


@app.command(
    help_epilogue=examples("loraplex escalations activate esc_...", "loraplex escalations activate esc_... --wait 300")
)
def activate(escalation: str, /, *, wait: float | None = None, as_json: AsJson = False) -> None:
    """Let the adapter's name mean the full fine-tune, once its pool serves it; by an administrator.

    Args:
        escalation: Its id.
        wait: Seconds that the pool may take until it is ready. Default 30.
        as_json: Print JSON for programs.
    """
    timeout_s = (30.0 if wait is None else wait) + _ANSWER_S
    _move(escalation, "activate", {"wait_s": wait}, as_json=as_json, timeout_s=timeout_s)


@app.command(help_epilogue=examples("loraplex escalations revert esc_... --reason 'Too slow'"))
def revert(escalation: str, /, *, reason: str | None = None, as_json: AsJson = False) -> None:
    """Let the adapter's name mean again what it meant before; the escalation stays, and may be activated again.

    Args:
        escalation: Its id.
        reason: Why, for its history.
        as_json: Print JSON for programs.
    """
    _move(escalation, "revert", {"reason": reason}, as_json=as_json)


@app.command(
    help_epilogue=examples(
        "loraplex escalations extend esc_... --review-at 2027-12-31 --reason 'Still ahead by 9 points'"
    )
)
def extend(escalation: str, /, *, review_at: str, reason: str | None = None, as_json: AsJson = False) -> None:
    """Move the review date.

    Args:
        escalation: Its id.
        review_at: The new day, after the present one.
        reason: What the review has shown.
        as_json: Print JSON for programs.
    """
    _move(escalation, "extend", {"review_at": to_time(review_at), "reason": reason}, as_json=as_json)


@app.command(help_epilogue=examples("loraplex escalations close esc_... --reason 'The new base is enough'"))
def close(escalation: str, /, *, reason: str | None = None, as_json: AsJson = False) -> None:
    """End it: one that is active is reverted first, and its full fine-tune is retired. This cannot be undone.

    Args:
        escalation: Its id.
        reason: Why, for its history.
        as_json: Print JSON for programs.
    """
    _move(escalation, "close", {"reason": reason}, as_json=as_json)


@app.command(help_epilogue=examples("loraplex escalations report"))
def report(*, as_json: AsJson = False) -> None:
    """Report all escalations, what they cost, and what forty of them would.

    Args:
        as_json: Print JSON for programs.
    """
    with open_escalations() as client:
        found = client.report()
    if as_json:
        print_json(found)
        return
    print_list(found["data"])
    costs = [f"{one['cost_per_month']:,.2f} {one['currency']} for {one['num_full']}" for one in found["costs"]]
    forty = [f"{one['forty_would_cost_per_month']:,.2f} {one['currency']}" for one in found["costs"]]
    print_facts(
        {
            "open": found["num_open"],
            "active": found["num_active"],
            "overdue": found["num_overdue"],
            "cost a month": costs,
            "forty at that price": forty,
            "forty full fine-tunes": show_copies(found["forty_full_fine_tunes"], "of an 8B base "),
            "forty adapters": show_copies(found["forty_adapters"], "of rank 16 for it "),
        }
    )


@contextmanager
def open_escalations() -> Iterator[Escalations]:
    """Yield the client of escalations that the environment gives."""
    with open_management() as client:
        yield Escalations(client.connection)


def read_evidence(path: Path, data: Path | None) -> dict[str, Any]:
    """Return the evidence in a file (`-`: standard input), with the digest of the data where that is given.

    Raises:
        ClientError: It cannot be read, is no JSON object, or speaks of other data.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        digest = None if data is None else hash_data(data)
    except OSError as error:
        raise ClientError(
            f"{error.filename}: {error.strerror}", code="invalid_request_error", param="evidence"
        ) from error
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ClientError(f"{path} is not a JSON object.", code="invalid_json", param="evidence") from error
    if not isinstance(found, dict):
        raise ClientError(f"{path} is not a JSON object.", code="invalid_json", param="evidence")
    if digest is None:
        if "data_digest" not in found:
            raise ClientError(
                f"{path} has no data_digest: give --data FILE, the data that was evaluated, and its sha256 is put in.",
                code="invalid_request_error",
                param="data",
            )
        return found
    if found.get("data_digest") not in (None, digest):
        raise ClientError(
            f"{path} has data_digest {found['data_digest']}, and {data} is {digest}: the figures are of other data. "
            "Give the data that was evaluated, or take data_digest out of the evidence if it is wrong.",
            code="invalid_request_error",
            param="data",
        )
    return found | {"data_digest": digest}


def hash_data(path: Path) -> str:
    """Return the digest of a file.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def to_time(text: str | None) -> str | None:
    """Return a day as its first instant in UTC, anything else as it is."""
    return f"{text}T00:00:00Z" if text is not None and len(text) == _DAY_LEN else text


def _move(escalation: str, verb: str, body: dict[str, Any], *, as_json: bool, timeout_s: float | None = None) -> None:
    with open_escalations() as client:
        found = client.move(escalation, verb, body, timeout_s)
    _tell(found, as_json=as_json)


def _tell(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    done(f"Escalation {found['id']} of {found['tenant']}/{found['adapter']} is {found['state']}.")
    if found["verbs"]:
        say(f"What can be done now: {', '.join(found['verbs'])}.")


def _as_dict(one: Any) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


def _present(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}
