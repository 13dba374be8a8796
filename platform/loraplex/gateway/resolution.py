"""The strict grammar of `model=` and what it gives: exactly one version or base, or an error; never a substitute.

    BASE | TENANT | TENANT/ADAPTER | TENANT/ADAPTER@ALIAS | TENANT/ADAPTER@NUMBER | TENANT/ADAPTER@sha256:HEX{12,64}

Pure over the name index. Names are compared exactly: nothing is trimmed, folded or completed.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from loraplex.errors import AdapterLoadingError, AdapterQuarantinedError, AdapterRetiredError, ModelNotFoundError
from loraplex.gateway.names import LIVE, NameIndex
from loraplex_registry.wire.adapter import AdapterName, VersionName
from loraplex_registry.wire.naming import ALIAS_PATTERN, NAME_PATTERN

MAX_MODEL_LEN = 256
_MODEL = re.compile(
    rf"(?P<tenant>{NAME_PATTERN})(?:/(?P<adapter>{NAME_PATTERN})"
    rf"(?:@(?:(?P<alias>{ALIAS_PATTERN})|(?P<number>[1-9][0-9]{{0,8}})|(?P<digest>sha256:[0-9a-f]{{12,64}})))?)?"
)
_NUM_BUCKETS = 10_000
_BUCKETS_PER_PERCENT = _NUM_BUCKETS // 100


class Caller(msgspec.Struct, frozen=True):
    """Who asks: its tenant and the bases it may call (None: all); `tenant` None sees every tenant."""

    tenant: str | None
    bases: tuple[str, ...] | None


class Resolved(msgspec.Struct, frozen=True):
    """What a name stands for, pinned for the life of a request; adapter and version are None for a base."""

    base: str
    adapter: AdapterName | None = None
    version: VersionName | None = None

    @property
    def full_name(self) -> str:
        """`TENANT/ADAPTER@NUMBER`, or the base's name."""
        if self.adapter is None or self.version is None:
            return self.base
        return f"{self.adapter.tenant}/{self.adapter.name}@{self.version.number}"

    @property
    def digest(self) -> str | None:
        """The version's digest, None for a base."""
        return None if self.version is None else self.version.digest

    @property
    def rank(self) -> int:
        """The version's rank, 0 for a base."""
        return 0 if self.version is None else self.version.rank

    @property
    def weights(self) -> str | None:
        """The base's weights that alone may serve the version, None if any may."""
        return None if self.version is None else self.version.weights_digest

    @property
    def pool(self) -> str | None:
        """The pool whose replicas serve the version as a whole model, None for bases and their adapters."""
        return None if self.version is None else self.version.pool


def resolve(model: str, caller: Caller, names: NameIndex, canary_key: str) -> Resolved:
    """Return what `model` names.

    Args:
        model: The name as the client sent it.
        caller: What it may see and call.
        names: Where names are looked up.
        canary_key: Decides between the targets of an alias; the same key always gets the same.

    Raises:
        ModelNotFoundError: Unknown, ambiguous or not the caller's.
        AdapterQuarantinedError: The named version is quarantined.
        AdapterRetiredError: The named version is retired.
        AdapterLoadingError: The named version is still being validated.
    """
    base = names.find_base(model)
    if base is not None:
        if caller.bases is not None and model not in caller.bases:
            raise _not_found(model)
        return Resolved(base.name)
    match = _MODEL.fullmatch(model)
    if match is None or caller.tenant not in (None, match["tenant"]):
        raise _not_found(model)
    adapter = _find_adapter(match, names)
    if adapter is None:
        raise _no_adapter(model, names)
    version = _find_version(match, adapter, canary_key)
    if version is None:
        raise _no_version(match, adapter)
    return Resolved(adapter.base, adapter, _check_state(model, version))


def find_listed(adapter: AdapterName) -> VersionName | None:
    """Return the version that lists show: of the live alias's targets that answer, the one with the most weight.

    None if no call of the adapter's bare name succeeds; of equal weights the lowest number.
    """
    targets = sorted(adapter.aliases.get(LIVE, ()), key=lambda target: (-target.weight, target.version))
    versions = (_by_number(adapter, target.version) for target in targets if target.weight)
    return next((version for version in versions if version is not None and version.state == "ready"), None)


def find_part(resolved: Resolved) -> str | None:
    """Return which part a version has in a canary: of live targets the `main` one, or a `canary`; None without one."""
    adapter, version = resolved.adapter, resolved.version
    if adapter is None or version is None:
        return None
    numbers = {target.version for target in adapter.aliases.get(LIVE, ()) if target.weight}
    if len(numbers) < 2 or version.number not in numbers:
        return None
    return "main" if version == find_listed(adapter) else "canary"


def canary_bucket(alias_id: str, key: str) -> int:
    """A number in [0, 10000) that depends on the alias and the key alone."""
    digest = hashlib.sha256(alias_id.encode() + key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % _NUM_BUCKETS


def _find_adapter(match: re.Match[str], names: NameIndex) -> AdapterName | None:
    if match["adapter"] is None:
        return names.find_default(match["tenant"])
    return names.find_adapter(match["tenant"], match["adapter"])


def _find_version(match: re.Match[str], adapter: AdapterName, canary_key: str) -> VersionName | None:
    if match["number"] is not None:
        return _by_number(adapter, int(match["number"]))
    if match["digest"] is not None:
        return _by_digest(adapter, match["digest"])
    alias = match["alias"] or LIVE
    targets = adapter.aliases.get(alias, ())
    if targets:
        return _by_number(adapter, _choose_target(adapter, alias, canary_key))
    return _find_first(adapter) if alias == LIVE else None


def _find_first(adapter: AdapterName) -> VersionName | None:
    """Without a live alias only a version that is on its way, or was the only one and was stopped, explains itself."""
    waiting = [version for version in adapter.versions if version.state == "validating"]
    if waiting:
        return waiting[-1]
    is_stopped = len(adapter.versions) == 1 and adapter.versions[0].state == "quarantined"
    return adapter.versions[0] if is_stopped else None


def _choose_target(adapter: AdapterName, alias: str, canary_key: str) -> int:
    bucket = canary_bucket(adapter.alias_ids[alias], canary_key)
    edge = 0
    for target in sorted(adapter.aliases[alias], key=lambda target: target.version):
        edge += target.weight * _BUCKETS_PER_PERCENT
        if bucket < edge:
            return target.version
    raise AssertionError("weights sum to 100")


def _by_number(adapter: AdapterName, number: int) -> VersionName | None:
    return next((version for version in adapter.versions if version.number == number), None)


def _by_digest(adapter: AdapterName, prefix: str) -> VersionName | None:
    """A prefix that fits two contents names neither."""
    found = [version for version in adapter.versions if version.digest.startswith(prefix)]
    if len({version.digest for version in found}) != 1:
        return None
    # Purged content may have come again under a new number: the newest stands for it.
    return max(found, key=lambda version: version.number)


def _check_state(model: str, version: VersionName) -> VersionName:
    if version.state == "ready":
        return version
    if version.state == "quarantined":
        raise AdapterQuarantinedError(_explain_quarantine(model, version), param="model")
    if version.state == "validating":
        raise AdapterLoadingError(f"{model}: version {version.number} is still being validated", param="model")
    if version.kind == "full":
        todo = "it was a full fine-tune, and its escalation is closed: call another, or open a new escalation"
    elif version.state == "retired":
        todo = "restore it or call another"
    else:
        todo = "upload it again or call another"
    raise AdapterRetiredError(f"{model}: version {version.number} is {version.state}; {todo}", param="model")


def _explain_quarantine(model: str, version: VersionName) -> str:
    found = version.quarantine
    cause = "" if found is None else f" since {found.since} ({found.reason}: {found.message.rstrip('.')})"
    return f"{model}: version {version.number} is quarantined{cause}; upload a new version, or let an admin release it"


def _no_adapter(model: str, names: NameIndex) -> ModelNotFoundError:
    """The error for a name of the caller's own; of a bare tenant's it says what there is to do."""
    if "/" in model or not names.has_tenant(model):
        return _not_found(model)
    own = names.adapters([model])
    if not own:
        todo = f"has no adapter yet; upload one, as `loraplex adapters push FOLDER --as {model}` does"
    else:
        todo = f"has no default adapter; name one, as in {model}/{own[0].name}, or make it the default"
    return ModelNotFoundError(f"The tenant {model} {todo}", param="model")


def _no_version(match: re.Match[str], adapter: AdapterName) -> ModelNotFoundError:
    """The error for an adapter of the caller's own: what it lacks, and without a live version how one becomes live."""
    name = f"{adapter.tenant}/{adapter.name}"
    ready = [version.number for version in adapter.versions if version.state == "ready"]
    if match["digest"] is not None and any(one.digest.startswith(match["digest"]) for one in adapter.versions):
        text = f"The adapter {name} has several contents whose digest begins with {match['digest']}; send more of it"
        return ModelNotFoundError(text, param="model")
    wanted = _name_version(match)
    if wanted is not None:
        newest = f"; the newest that is ready is {name}@{max(ready)}" if ready else ""
        return ModelNotFoundError(f"The adapter {name} has no {wanted}{newest}", param="model")
    if ready:
        todo = f"promote one, as `loraplex adapters promote {name}@{max(ready)}` does"
    else:
        todo = f"upload one, as `loraplex adapters push FOLDER --as {name}` does"
    return ModelNotFoundError(f"The adapter {name} has no live version; {todo}", param="model")


def _name_version(match: re.Match[str]) -> str | None:
    """Return in words what is asked of an adapter, None for its live version."""
    if match["number"] is not None:
        return f"version {match['number']}"
    if match["digest"] is not None:
        return f"version whose digest begins with {match['digest']}"
    return None if match["alias"] in (None, LIVE) else f"alias {match['alias']}"


def _not_found(model: str) -> ModelNotFoundError:
    shown = ascii(model[:MAX_MODEL_LEN])[1:-1]
    return ModelNotFoundError(
        f"The model '{shown}' does not exist, or this key may not call it; GET /v1/models lists those it may",
        param="model",
    )
