"""Which replica a request goes to: a pure function of what replicas said, and of what this gateway has sent since.

First come the replicas that hold the adapter, and of those as many as it has homes; then the load; then, among replicas
that are about as busy, the one that has most likely seen how the request begins. A replica is passed over that has more
than its fair share and a part of its batch: whoever holds an adapter that is asked for too much does not keep it alone.

What other gateways have sent is as old as the last look. Where there is such load, the less busy of two drawn replicas
is taken, not the least busy of all, on which all gateways would fall at once ("The power of two choices in randomized
load balancing", Mitzenmacher). A key always prefers the same replica, of whatever others there are ("rendezvous
hashing", Thaler and Ravishankar), so that gateways agree without asking each other; the bound is that of "Consistent
hashing with bounded loads" (Mirrokni, Thorup, Zadimoghaddam), with room for small numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from loraplex.fleet.view import FleetView, Replica

FAIR_SHARE = 1.25
"""How much more than the mean a replica may have, beside its slack."""
SLACK = 0.25
"""Part of a batch that a replica may have beyond its share before others load its adapters."""
COPY_SHARE = 0.5
"""Part of one replica's fair share that an adapter may take before it gets one more home."""
_DEFAULT_MAX_RUNNING = 16
_MIN_SLACK = 2.0
# how willing a replica is to serve a digest, the least number the most
_HOME, _HOLDER, _IN_MEMORY, _HAS_ROOM, _ABSENT, _FAILED = range(6)
_RANK_TO_REASON = {
    _HOME: "resident",
    _HOLDER: "resident",
    _IN_MEMORY: "in_memory",
    _HAS_ROOM: "free_slot",
    _ABSENT: "eviction",
    _FAILED: "failed",
}
REASONS = ("base", "resident", "in_memory", "free_slot", "eviction", "failed", "quarantined", "spread")


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What a request needs.

    `digest` is None for the base itself, which is resident everywhere. A replica with a lower limit than `rank` cannot
    load the adapter, and one whose base has other `weights` must not serve it (None: any may). Requests with the same
    `prefix` begin alike; empty: nothing is known. `num_homes` is on how many replicas the adapter should be, `draw` any
    number, other for each request.
    """

    base: str
    digest: str | None
    rank: int = 0
    weights: str | None = None
    prefix: str = ""
    num_homes: int = 1
    draw: int = 0


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What this gateway knows beyond the view.

    `in_flight` are its requests at each URL now, `arriving` the digests that it sent there so lately that replicas
    cannot have told of them, `ejected` the URLs that it does not trust at the moment.
    """

    in_flight: Mapping[str, int] = {}
    arriving: Mapping[str, Collection[str]] = {}
    ejected: Collection[str] = ()


class Placement(msgspec.Struct, frozen=True):
    """The replica that was chosen, and why: one of REASONS; `spread` is a load for the sake of the bound."""

    replica: Replica
    reason: str


class _Option(msgspec.Struct, frozen=True):
    replica: Replica
    rank: int
    load: float
    bound: float
    num_free: int

    @property
    def slack(self) -> float:
        return find_slack(self.replica)

    @property
    def excess(self) -> float:
        """Load beyond the bound, as a part of the slack."""
        return (self.load - self.bound) / self.slack


def place(wish: Wish, view: FleetView, outlook: Outlook, exclude: Collection[str] = ()) -> Placement | None:
    """Return where a request goes, None if no replica serves what it needs.

    An adapter that one replica has quarantined goes where it is resident and well, and nowhere else: there the replica
    itself refuses it. One that failed to load goes where it is not known yet, however busy that is. If this gateway
    trusts none of the replicas, all are tried.

    Args:
        wish: What the request needs.
        view: What is known of the replicas.
        outlook: What this gateway knows beyond it.
        exclude: URLs that have failed this request already.
    """
    able = find_able(wish.base, wish.rank, view, outlook.ejected, exclude, weights=wish.weights)
    if not able:
        return None
    if wish.digest is not None and any(wish.digest in replica.quarantined for replica in able):
        return _place_quarantined(wish.digest, able, outlook)
    options = _build_options(wish, able, outlook)
    best = min(option.rank for option in options)
    willing = [option for option in options if option.rank == best and option.load < option.bound]
    is_spread = not willing
    if not willing:
        willing = _find_relief(options)
    rank = min(option.rank for option in willing)
    chosen = _choose([option for option in willing if option.rank == rank], wish, is_stale=_is_stale(able))
    if wish.digest is None:
        return Placement(chosen.replica, "base")
    return Placement(chosen.replica, "spread" if is_spread and rank > _HOLDER else _RANK_TO_REASON[rank])


def find_able(
    base: str,
    rank: int,
    view: FleetView,
    ejected: Collection[str] = (),
    exclude: Collection[str] = (),
    *,
    weights: str | None = None,
) -> list[Replica]:
    """Return the replicas that may serve an adapter of that rank and weights: those that are trusted, else all."""
    able = [
        replica
        for replica in view.replicas
        if replica.base == base
        and replica.model is None
        and replica.problem is None
        and replica.url not in exclude
        and replica.takes(rank, weights)
    ]
    return [replica for replica in able if replica.url not in ejected] or able


def estimate_load(replica: Replica, in_flight: Mapping[str, int]) -> float:
    """Return how many requests a replica has: this gateway's as of now, those of others as of the last look."""
    return replica.num_foreign + in_flight.get(replica.url, 0)


def find_slack(replica: Replica) -> float:
    """Return how many requests beyond its fair share a replica takes before its adapters go elsewhere as well."""
    return max(_MIN_SLACK, SLACK * (replica.max_running or _DEFAULT_MAX_RUNNING))


def count_homes(share: float, num_replicas: int) -> int:
    """Return on how many replicas an adapter should be that gets `share` of all requests.

    ceil(share * num_replicas / COPY_SHARE), at least 1, at most all of them. The sum over all adapters that have more
    than one home is below 2 * num_replicas / COPY_SHARE, however many adapters there are.
    """
    return max(1, min(num_replicas, math.ceil(share * num_replicas / COPY_SHARE)))


def order_homes(key: str, replicas: Sequence[Replica]) -> list[Replica]:
    """Return replicas in the order in which `key` prefers them; one that goes or comes leaves the others' order."""
    return sorted(replicas, key=lambda replica: _score(key, replica.url), reverse=True)


def _build_options(wish: Wish, able: Sequence[Replica], outlook: Outlook) -> list[_Option]:
    loads = [estimate_load(replica, outlook.in_flight) for replica in able]
    fair = FAIR_SHARE * (sum(loads) + 1) / len(able)
    homes = _find_homes(wish, able, outlook)
    return [
        _Option(
            replica,
            _rank(replica, wish.digest, homes, outlook),
            load,
            fair + find_slack(replica),
            count_free_slots(replica, outlook),
        )
        for replica, load in zip(able, loads, strict=True)
    ]


def _find_homes(wish: Wish, able: Sequence[Replica], outlook: Outlook) -> frozenset[str]:
    """The replicas that an adapter's requests gather on, so that copies beyond them fall out of use."""
    if wish.digest is None:
        return frozenset()
    holders = order_homes(wish.digest, [replica for replica in able if _holds(replica, wish.digest, outlook)])
    # who says so before who may be expected to
    holders.sort(key=lambda replica: wish.digest not in replica.resident)
    return frozenset(replica.url for replica in holders[: wish.num_homes])


def _holds(replica: Replica, digest: str, outlook: Outlook) -> bool:
    """Whether an adapter is in a slot, or will be before one that is sent for now could be."""
    if digest in replica.failed:
        return False
    arriving = outlook.arriving.get(replica.url, ())
    return digest in replica.resident or digest in replica.loading or digest in arriving


def _rank(replica: Replica, digest: str | None, homes: Collection[str], outlook: Outlook) -> int:
    if digest is None or replica.url in homes:
        return _HOME
    if digest in replica.failed:
        return _FAILED
    if _holds(replica, digest, outlook):
        return _HOLDER
    if digest in replica.in_memory:
        return _IN_MEMORY
    return _HAS_ROOM if count_free_slots(replica, outlook) > 0 else _ABSENT


def count_free_slots(replica: Replica, outlook: Outlook) -> int:
    """Return how many adapters a replica can take without giving up another."""
    arriving = {*outlook.arriving.get(replica.url, ()), *replica.loading} - replica.resident
    return replica.num_slots - len(replica.resident) - len(arriving)


def _find_relief(options: Sequence[_Option]) -> list[_Option]:
    """The best of those within their bound where the best of all are beyond it; if all are, the least beyond it.

    Where an adapter failed to load it is not loaded for the sake of the load.
    """
    known = [option for option in options if option.rank < _FAILED] or list(options)
    relief = [option for option in known if option.load < option.bound]
    if relief:
        return relief
    least = min(option.excess for option in known)
    return [option for option in known if option.excess == least]


def _choose(options: Sequence[_Option], wish: Wish, *, is_stale: bool) -> _Option:
    """One of those that are alike but for their load; of free slots, one of where there are most."""
    key = wish.prefix if options[0].rank <= _HOLDER else wish.digest
    if options[0].rank == _HAS_ROOM:
        most = max(option.num_free for option in options)
        options = [option for option in options if option.num_free == most]
    least = min(option.load for option in options)
    if key:
        preferred = max(options, key=lambda option: _score(key, option.replica.url))
        if preferred.load <= least + preferred.slack / 2:
            return preferred
    drawn = _draw_two(options, wish.draw) if is_stale else options
    return min(drawn, key=lambda option: (option.load / option.slack, option.replica.url))


def _draw_two(options: Sequence[_Option], draw: int) -> Sequence[_Option]:
    if len(options) < 3:
        return options
    first, rest = draw % len(options), draw // len(options)
    second = (first + 1 + rest % (len(options) - 1)) % len(options)
    return options[first], options[second]


def _is_stale(able: Sequence[Replica]) -> bool:
    """Whether others send requests too, so that loads may have changed since the last look."""
    return any(replica.num_foreign > 0 for replica in able)


def _place_quarantined(digest: str, able: Sequence[Replica], outlook: Outlook) -> Placement:
    def cost(replica: Replica) -> tuple[int, float, str]:
        is_well = digest in replica.resident and digest not in replica.quarantined
        rank = 0 if is_well else 1 if digest in replica.quarantined else 2
        return rank, estimate_load(replica, outlook.in_flight), replica.url

    chosen = min(able, key=cost)
    return Placement(chosen, "quarantined" if digest in chosen.quarantined else "resident")


def _score(key: str, url: str) -> bytes:
    return hashlib.blake2b(f"{key} {url}".encode(), digest_size=8).digest()
