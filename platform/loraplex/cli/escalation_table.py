"""Escalations as tables and facts, for people."""

from __future__ import annotations

from typing import Any

from loraplex.cli.output import print_facts, print_table, when


def print_list(rows: list[dict[str, Any]]) -> None:
    """Print escalations, one a line."""
    columns = ("id", "model", "state", "owner", "asked by", "age", "review", "a month")
    print_table("Escalations", columns, (_list_cells(row) for row in rows), empty="There are no escalations.")


def _list_cells(row: dict[str, Any]) -> tuple[Any, ...]:
    cost = row.get("cost_per_month")
    return (
        row["id"],
        f"{row['tenant']}/{row['adapter']}",
        row["state"],
        row["owner"],
        row["requested_by"],
        f"{row['age_days']} d",
        when(row["review_at"]),
        None if cost is None else f"{cost:,.2f} {row['currency']}",
    )


def print_one(found: dict[str, Any]) -> None:
    """Print where an escalation stands, and what was agreed."""
    approval, full = found["approval"] or {}, found["full"] or {}
    print_facts(
        {
            "id": found["id"],
            "model": f"{found['tenant']}/{found['adapter']}@{found['version']} on {found['base_model']}",
            "state": found["state"],
            "asked by": found["requested_by"],
            "reason": found["reason"],
            "opened": when(found["created_at"]),
            "expires": when(found["expires_at"]),
            "owner": approval.get("owner"),
            "justification": approval.get("justification"),
            "approved by": approval.get("approved_by"),
            "budget a month": _show_amount(approval.get("budget_per_month"), approval.get("currency")),
            "review": when(approval.get("review_at")),
            "when overdue": approval.get("on_overdue"),
            "full fine-tune": full.get("model"),
            "pool": full.get("pool"),
            "digest": full.get("digest"),
            "cost a month": _show_amount(full.get("cost_per_month"), full.get("currency")),
            "can be done": found["verbs"],
        }
    )


def print_figures(found: dict[str, Any]) -> None:
    """Print the evidence, and what the platform knows itself."""
    evidence, figures = found["evidence"], found["figures"]
    gap, traffic, saturation = figures["gap"], figures["traffic"], figures["saturation"]
    ranks = [f"{tried['rank']}: {tried['value']:g}" for tried in evidence["ranks_tried"]]
    print_facts(
        {
            "evaluation": f"{evidence['evaluation']}, {evidence['num_samples']:,} samples, {evidence['data_digest']}",
            evidence["metric"]: f"base {evidence['base']:g}, LoRA {evidence['lora']:g}, target {evidence['target']:g}",
            "gap closed": f"{gap['closed']:.0%}",
            "ranks tried": ranks,
            "calls in 30 days": f"{traffic['requests']:,} ({traffic['share_of_tokens']:.1%} of all tokens)",
            "rank in use": _show_saturation(saturation) if saturation else figures["problem"],
        }
    )


def _show_saturation(saturation: dict[str, Any]) -> str:
    return (
        f"{saturation['mean_effective_rank']:.1f} of {saturation['rank']} on average; {saturation['num_saturated']} of "
        f"{saturation['num_modules']} modules use nearly all of it"
    )


def show_copies(copies: dict[str, Any], of_what: str) -> str:
    """Return what so many copies take; the platform reckons with a usual size, not with that of its own base."""
    return f"{copies['weights_gib']:,.1f} GiB of weights {of_what}on {copies['gpus']} x {copies['gpu']}"


def _show_amount(amount: float | None, currency: str | None) -> str | None:
    return None if amount is None else f"{amount:,.2f} {currency}"
