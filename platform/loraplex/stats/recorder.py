"""What this gateway sees of requests and engines, in pieces of ten seconds that it writes as they end.

`StatsRecorder` is the only writer of `stats_piece`: a row per gateway and ten seconds, and one per minute, by which an
hour is quickly read. It works in the gateway's loop, where a value is only noted (0.4 us); sorting into buckets is
left to the end of a piece, compressing to a thread. While the database is away a few minutes are kept, not more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from datetime import UTC, datetime, timedelta
from time import perf_counter
from typing import Protocol

import msgspec
import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.statement import Statement
from loraplex.db.tables import stats_piece
from loraplex.errors import LoraplexError
from loraplex.stats.growing import GrowingPiece
from loraplex.stats.piece import (
    COUNTS,
    ENGINE_COUNTS,
    MINUTE_S,
    PIECE_S,
    SPREADS,
    EngineSample,
    Key,
    encode_piece,
    find_minute,
)
from loraplex.stats.report import FreshPiece

KEEP_S = 7200
_MAX_UNWRITTEN = 30
_SWEEP_EVERY = 60
_MARGIN_S = 0.01
_INDEX = {name: index for index, name in enumerate(SPREADS)}
_GAP = _INDEX["inter_token_s"]
_log = logging.getLogger(__name__)

_WRITE = Statement(
    lambda dialect: dialect.insert(stats_piece).on_conflict_do_nothing(index_elements=["gateway", "span_s", "began_at"])
)


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended; seconds are the engine's, zero where it had no word."""

    outcome: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    queue_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0


class Named(Protocol):
    """A replica."""

    @property
    def name(self) -> str:
        """What clients see of it."""


class StatsRecorder:
    """Takes what is seen, from the loop that runs `run`; `gateway` is the id of this process."""

    def __init__(self, database: Database, gateway: str) -> None:
        self._database = database
        self._gateway = gateway
        self.piece = GrowingPiece(_now_floor())
        """The one that is not over."""
        self._minute = GrowingPiece(find_minute(self.piece.began_at))
        self._unwritten: deque[FreshPiece] = deque(maxlen=_MAX_UNWRITTEN)
        self._last_samples: dict[str, EngineSample] = {}

    def watch(self, base: str, tenant: tuple[str | None, str], adapter: str | None, began_at: float) -> Watch:
        """Begin to watch a request.

        Args:
            base: What it is of; `adapter` is None if it calls that itself.
            tenant: Id and name of the tenant that it counts for.
            adapter: The adapter's name.
            began_at: When it came, by `time.perf_counter` as all instants here.
        """
        return Watch(self, Key(base, *tenant, adapter, ""), began_at)

    def sample(self, replica: str, base: str, sample: EngineSample) -> None:
        """Note what an engine says of itself now."""
        found = self.piece.find_engine(replica, base)
        found.seconds.append(min(PIECE_S - 1, max(0, int(time.time()) - self.piece.began_at)))
        found.samples.append(sample)
        before = self._last_samples.get(replica)
        self._last_samples[replica] = sample
        if before is not None:
            for index, name in enumerate(ENGINE_COUNTS):
                found.growth[index] += _grow(getattr(before, name), getattr(sample, name))

    def fresh(self) -> list[FreshPiece]:
        """Return what is not written yet, the piece that is not over too."""
        short = [one for one in self._unwritten if one.span_s == PIECE_S]
        return [*short, FreshPiece(self._gateway, PIECE_S, self.piece.began_at, self.piece.freeze())]

    async def run(self) -> None:
        """Write pieces as they end, and delete old ones now and then, until cancelled."""
        num_written = 0
        while True:
            # a timer that rings early would make a piece of a millisecond
            await asyncio.sleep(PIECE_S - time.time() % PIECE_S + _MARGIN_S)
            try:
                await self.flush()
                if num_written % _SWEEP_EVERY == 0:
                    await self._sweep()
                num_written += 1
            except LoraplexError as error:
                _log.warning("statistics cannot be written: %s", error.message)
            except Exception:  # noqa: BLE001 - it must outlive any piece
                _log.exception("statistics cannot be written")

    async def stop(self) -> None:
        """Write what there is; fine without a database."""
        try:
            await self.flush(is_last=True)
        except LoraplexError as error:
            _log.warning("statistics of the last seconds cannot be written: %s", error.message)

    async def flush(self, *, is_last: bool = False) -> None:
        """End the piece, and its minute if that is over too or nothing more will come; write all that is not written.

        Raises:
            UnavailableError: The database does not answer; they are kept.
        """
        ended, self.piece = self.piece, GrowingPiece(max(_now_floor(), self.piece.began_at + 1))
        self._end_minute_before(ended.began_at)
        if not ended.is_empty:
            frozen = ended.freeze()
            self._unwritten.append(FreshPiece(self._gateway, PIECE_S, ended.began_at, frozen))
            self._minute.add(frozen, ended.began_at - self._minute.began_at)
        self._end_minute_before(self.piece.began_at + (MINUTE_S if is_last else 0))
        while self._unwritten:
            await self._write(self._unwritten[0])
            self._unwritten.popleft()

    def _end_minute_before(self, at: int) -> None:
        """End the minute if `at` is in another."""
        if find_minute(at) == self._minute.began_at:
            return
        if not self._minute.is_empty:
            frozen = self._minute.freeze()
            self._unwritten.append(FreshPiece(self._gateway, MINUTE_S, self._minute.began_at, frozen))
        self._minute = GrowingPiece(find_minute(at))

    async def _write(self, fresh: FreshPiece) -> None:
        content = await asyncio.to_thread(encode_piece, fresh.piece)
        values = [
            {
                "gateway": self._gateway,
                "span_s": fresh.span_s,
                "began_at": datetime.fromtimestamp(fresh.began_at, UTC),
                "minute": datetime.fromtimestamp(find_minute(fresh.began_at), UTC),
                "content": content,
            }
        ]
        await self._database.transact(lambda transaction: transaction.run(_WRITE, values))

    async def _sweep(self) -> None:
        before = datetime.now(UTC) - timedelta(seconds=KEEP_S)
        async with self._database.write() as connection:
            await connection.execute(sa.delete(stats_piece).where(stats_piece.c.began_at < before))


class Watch:
    """Watches one request; `StatsRecorder.watch` makes it when the request comes."""

    __slots__ = ("_began_at", "_first_at", "_key", "_last_at", "_piece", "_recorder", "_row")

    def __init__(self, recorder: StatsRecorder, key: Key, began_at: float) -> None:
        self._recorder = recorder
        self._key = key
        self._began_at = began_at
        self._first_at = self._last_at = 0.0
        self._piece: GrowingPiece | None = None
        self._row = 0

    def note_arrival(self, replica: Named, arrived_at: float) -> None:
        """Note that tokens came from `replica`; those that came at the same instant came together.

        Only one replica's tokens are ever passed on.
        """
        before = self._last_at
        self._last_at = arrived_at
        if not before:
            self._first_at = arrived_at
        elif arrived_at > before:
            piece = self._recorder.piece
            if piece is not self._piece:
                self._piece, self._row = piece, self._find_row(piece, replica)
            piece.spreads[_GAP].add(self._row, arrived_at - before)

    def end(self, replica: Named, ended: Ended) -> None:
        """Note how the request ended, and where."""
        piece = self._recorder.piece
        row = self._find_row(piece, replica)
        _count(piece.counts[row], ended)
        if not ended.completion_tokens:
            return
        first_s = self._first_at - self._began_at if self._first_at else ended.queue_s + ended.load_s + ended.prefill_s
        values = {
            "queue_s": ended.queue_s,
            "prefill_s": ended.prefill_s,
            "time_to_first_token_s": first_s,
            "request_s": perf_counter() - self._began_at,
            "prompt_len": ended.prompt_tokens,
            "completion_len": ended.completion_tokens,
            "request_len": ended.prompt_tokens + ended.completion_tokens,
        }
        for name, value in values.items():
            piece.spreads[_INDEX[name]].add(row, value)

    def _find_row(self, piece: GrowingPiece, replica: Named) -> int:
        return piece.find_row(msgspec.structs.replace(self._key, replica=replica.name))


def _count(counts: list[int], ended: Ended) -> None:
    found = {
        "requests": 1,
        f"requests_{ended.outcome}": 1,
        "prompt_tokens": ended.prompt_tokens,
        "cached_tokens": ended.cached_tokens,
        "completion_tokens": ended.completion_tokens,
        "preemptions": ended.preemptions,
    }
    for index, name in enumerate(COUNTS):
        counts[index] += found.get(name, 0)


def _grow(before: int, after: int) -> int:
    """By how much a count grew; a process that began anew began at zero."""
    return after - before if after >= before else after


def _now_floor() -> int:
    return int(time.time()) // PIECE_S * PIECE_S
