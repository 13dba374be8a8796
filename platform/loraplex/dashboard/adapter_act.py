"""What can be done to an adapter, and what to say before it is done: one question for each act. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from loraplex.errors import NotFoundError
from loraplex_registry.wire.adapter import AdapterView, AliasChangeView, AliasView, Target, VersionView
from loraplex_registry.wire.identity import Identity

Act = Literal[
    "promote", "weigh", "roll-back", "unset", "retire", "restore", "quarantine", "release", "make-default", "delete"
]
LIVE = "live"
_WRITE = "adapters:write"
_OF_ADMINS: tuple[Act, ...] = ("quarantine", "release")
_OF_VERSIONS: tuple[Act, ...] = ("promote", "retire", "restore", "quarantine", "release")
_STATE_TO_ACTS: dict[str, tuple[Act, ...]] = {
    "validating": ("quarantine",),
    "ready": ("promote", "retire", "quarantine"),
    "quarantined": ("release", "retire"),
    "retired": ("restore",),
}


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What an act is about, as it is now: `alias` None is one that is not set, `changes` are its last ones."""

    adapter: AdapterView
    version: VersionView | None
    alias_name: str
    alias: AliasView | None
    changes: Sequence[AliasChangeView]
    purge_after_days: int

    @property
    def name(self) -> str:
        """The adapter as clients call it."""
        return f"{self.adapter.tenant}/{self.adapter.name}"

    @property
    def called(self) -> str:
        """The alias as clients call it."""
        return self.name if self.alias_name == LIVE else f"{self.name}@{self.alias_name}"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked before an act: `effects` say what will happen, `confirm` stands on the button.

    `typed` is what has to be typed first, where nothing leads back.
    """

    title: str
    effects: list[str]
    confirm: str
    is_danger: bool = False
    typed: str | None = None


def check_act(text: str) -> Act:
    """Return an act that there is.

    Raises:
        NotFoundError: There is no such act.
    """
    found: Act | None = next((act for act in get_args(Act) if act == text), None)
    if found is None:
        raise NotFoundError("There is no such act.")
    return found


def may(identity: Identity, act: Act) -> bool:
    """Whether a key may do it at all; the registry judges again."""
    return identity.is_admin if act in _OF_ADMINS else identity.has_scope(_WRITE)


def list_version_acts(identity: Identity, version: VersionView) -> list[Act]:
    """Return what a key may do with a version as it is; a full fine-tune is its escalation's to move."""
    acts = _STATE_TO_ACTS.get(version.state, ())
    if version.kind == "full":
        acts = tuple(act for act in acts if act in _OF_ADMINS)
    return [act for act in acts if may(identity, act)]


def needs_version(act: Act) -> bool:
    """Whether an act is about one version."""
    return act in _OF_VERSIONS


def ask(act: Act, subject: Subject) -> Question:
    """Return the question before an act."""
    if act in _OF_VERSIONS:
        assert subject.version is not None, "the route has found it"
        return _ask_of_version(act, subject, subject.version)
    if act in ("weigh", "roll-back", "unset"):
        return _ask_of_alias(act, subject)
    return _ask_of_adapter(act, subject)


def find_previous(alias: AliasView | None, changes: Sequence[AliasChangeView]) -> list[Target]:
    """Where an alias led before what it leads to now, as far as its last changes tell; the registry has the say."""
    if alias is None:
        return []
    older = (change.targets for change in changes if change.revision < alias.revision)
    return next((targets for targets in older if targets and targets != alias.targets), [])


def name_targets(targets: Sequence[Target]) -> str:
    """Where an alias leads, for people: `version 3`, or `version 3 (90 %) and version 4 (10 %)`."""
    if len(targets) == 1:
        return f"version {targets[0].version}"
    parts = [f"version {target.version} ({target.weight} %)" for target in targets]
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if parts else "nothing"


def _ask_of_version(act: Act, subject: Subject, version: VersionView) -> Question:
    number, name = version.version, subject.name
    at = f"{name}@{number}"
    aliases = [alias for alias, targets in subject.adapter.aliases.items() if any(t.version == number for t in targets)]
    if act == "promote":
        return Question(title=f"Promote version {number}", effects=_tell_promotion(subject, number), confirm="Promote")
    if act == "retire":
        effects = [
            f"Calls of {at} are refused with 410 adapter_retired from then on; running requests end on it.",
            f"Its bytes are kept for {subject.purge_after_days} days. Until then it can be restored.",
        ]
        if aliases:
            effects.append(f"{_list(aliases)} leads to it, so this is refused: point that elsewhere first.")
        return Question(title=f"Retire version {number}", effects=effects, confirm="Retire", is_danger=True)
    if act == "restore":
        effects = [f"{at} can be called again. No alias moves."]
        return Question(title=f"Restore version {number}", effects=effects, confirm="Restore")
    if act == "quarantine":
        effects = [
            f"Calls of {at} are refused with 409 adapter_quarantined at once, until an administrator releases it."
        ]
        if aliases:
            effects.append(f"{_list(aliases)} leads to it and does not move: calls by that name are refused, too.")
        return Question(title=f"Quarantine version {number}", effects=effects, confirm="Quarantine", is_danger=True)
    effects = [f"{at} is ready again, and engines forget what they had against it."]
    if version.quarantine is not None:
        effects.insert(0, f"It is quarantined since {version.quarantine.since[:16]}Z: {version.quarantine.message}")
        if version.quarantine.reason == "parity":
            effects.append(
                "Its answers were not those of its files; the audit records that they are served all the same."
            )
    return Question(title=f"Release version {number}", effects=effects, confirm="Release", is_danger=True)


def _tell_promotion(subject: Subject, number: int) -> list[str]:
    effects = [
        f"Requests to {subject.called} that begin from then on go to version {number}; running ones end on theirs."
    ]
    if subject.alias is None:
        return [f"{LIVE} leads nowhere yet.", *effects]
    leads = f"{LIVE} leads to {name_targets(subject.alias.targets)} now."
    return [leads, *effects, "Roll back leads to where it leads now."]


def _ask_of_alias(act: Act, subject: Subject) -> Question:
    alias, name = subject.alias, subject.alias_name
    now = f"{name} leads to {name_targets(alias.targets)} now." if alias else f"{name} is not set."
    if act == "weigh":
        effects = [
            now,
            f"From then on requests to {subject.called} are divided by these weights.",
            "A caller stays with its version; a share that grows keeps the callers that it had.",
        ]
        return Question(title=f"Weights of {name}" if alias else "New alias", effects=effects, confirm="Set weights")
    if act == "roll-back":
        previous = find_previous(alias, subject.changes)
        then = (
            f"It will lead to {name_targets(previous)} as before; so do requests to {subject.called} that begin then."
            if previous
            else "It never led elsewhere, so this is refused."
        )
        return Question(title=f"Roll back {name}", effects=[now, then], confirm="Roll back", is_danger=True)
    effects = [now, f"Calls of {subject.called} are refused with 404 from then on. No version goes."]
    return Question(title=f"Delete the alias {name}", effects=effects, confirm="Delete alias", is_danger=True)


def _ask_of_adapter(act: Act, subject: Subject) -> Question:
    tenant, name = subject.adapter.tenant, subject.name
    if act == "make-default":
        effects = [f"Calls of {tenant}, without an adapter's name, mean {name} from then on."]
        return Question(title=f"Make {name} the default", effects=effects, confirm="Make default")
    effects = [
        f"All names of {name} and of its versions ({subject.adapter.num_versions}) are refused with 404 at once.",
        "Running requests end on theirs.",
        f"The bytes go {subject.purge_after_days} days later. Nothing brings the adapter back; usage and audit stay.",
    ]
    return Question(
        title=f"Delete {name}", effects=effects, confirm="Delete", is_danger=True, typed=subject.adapter.name
    )


def _list(aliases: Sequence[str]) -> str:
    return f"The alias {aliases[0]}" if len(aliases) == 1 else f"Each of the aliases {', '.join(aliases)}"
