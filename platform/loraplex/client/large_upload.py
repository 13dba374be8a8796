"""An upload in parts: hash, announce, send several parts at once, complete; a later run goes on where one was cut."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import httpx

from loraplex.client.connection import Connection
from loraplex.client.errors import ClientError, ConnectionFailedError
from loraplex.client.part_plan import PART_SIZE, FilePlan, plan_file
from loraplex.client.part_sender import PartSender, StoppedError
from loraplex.client.retrying import NUM_TRIES, is_brief, is_past, iterate_pauses
from loraplex.client.upload import Upload
from loraplex.client.upload_memory import UploadMemory, build_key
from loraplex.client.upload_routes import UploadRoutes
from loraplex_registry.wire.upload import PartView, UploadView

_NUM_SENDERS = 3
_COMPLETING_S = 900.0
"""How long another run's `complete` of the same upload is waited for; the registry takes a dead one's place sooner."""
_KEY_HELD_S, _KEY_PAUSE_S = 90.0, 3.0
_KNOWN_STATES = ("open", "completing", "completed")
_QUOTA = "quota_exceeded"
"""A 429 that no waiting of ours changes."""
_FIRST_TRIES = 3
"""Where nobody has answered yet, there may be nobody."""
T = TypeVar("T")


class Watcher(Protocol):
    """Told how an upload gets on; the methods may be called from several threads."""

    def hashing(self, total: int) -> None:
        """Files of `total` bytes are about to be read."""

    def sending(self, upload: str, total: int, received: int) -> None:
        """An upload was begun, or, where bytes are `received` already, goes on."""

    def judging(self) -> None:
        """Everything has arrived."""

    def advance(self, count: int) -> None:
        """So many more bytes were hashed or sent; fewer than none where some have to be sent again."""


@dataclass(frozen=True)
class LargeUpload:
    """What is sent, where to, and how; `options` are `promote` and `base` as the route takes them."""

    tenant: str
    adapter: str
    files: Sequence[Path]
    options: dict[str, str] = field(default_factory=dict)
    wait: int | None = None
    resumes: bool = True
    part_size: int = PART_SIZE
    store_transport: httpx.BaseTransport | None = None


def send_in_parts(connection: Connection, order: LargeUpload, memory: UploadMemory, watcher: Watcher) -> Upload:
    """Upload files in parts, going on with what an earlier run of the same content has sent.

    Raises:
        ClientError: It was refused, or a part could not be sent; what has arrived is kept for another run.
    """
    watcher.hashing(sum(path.stat().st_size for path in order.files))
    plans = [plan_file(path, watcher.advance, order.part_size) for path in order.files]
    key = build_key(connection.url, order.tenant, order.adapter, order.options, plans)
    return _Run(connection, order, plans, memory, key, watcher).upload()


class _Run:
    """One run over one upload."""

    def __init__(
        self,
        connection: Connection,
        order: LargeUpload,
        plans: list[FilePlan],
        memory: UploadMemory,
        key: str,
        watcher: Watcher,
    ) -> None:
        self._connection = connection
        self._order = order
        self._plans = plans
        self._memory = memory
        self._key = key
        self._watcher = watcher
        self._routes = UploadRoutes(connection, order.tenant, order.adapter)
        self._id = ""
        self._is_started = False
        self._renewing = threading.Lock()
        self._fresh: dict[tuple[str, int], PartView] = {}

    def upload(self) -> Upload:
        upload = self._resume() or self._start()
        self._id = upload.id
        total = sum(part.size for part in upload.parts)
        self._watcher.sending(upload.id, total, upload.received_bytes)
        if upload.state == "open":
            self._send(upload)
        self._watcher.judging()
        return self._complete()

    def _resume(self) -> UploadView | None:
        """Return what an earlier run has begun, if the platform still has it."""
        known = self._memory.find(self._key)
        if known is None:
            return None
        try:
            if not self._order.resumes:
                self._routes.give_up(known)
                return None
            found = _try_again(lambda: self._routes.get(known), _FIRST_TRIES)
        except ConnectionFailedError:
            raise
        except ClientError as error:
            if is_brief(error.status):
                raise
            return None
        return found if found.state in _KNOWN_STATES else None

    def _start(self) -> UploadView:
        # the answer may be lost on its way: asked again with the same key, the platform gives it once more
        idempotency_key = secrets.token_hex(16)
        upload = _try_again(lambda: self._start_with(idempotency_key), _FIRST_TRIES)
        self._memory.keep(self._key, upload.id)
        return upload

    def _start_with(self, idempotency_key: str) -> UploadView:
        """Begin; a platform that died over an earlier try holds the key for a minute, which is waited for."""
        until = time.monotonic() + _KEY_HELD_S
        while True:
            try:
                return self._routes.start(self._plans, self._order.options, idempotency_key)
            except ClientError as error:
                is_first, self._is_started = not self._is_started, True
                if is_first or error.status != httpx.codes.CONFLICT or time.monotonic() > until:
                    raise
            time.sleep(_KEY_PAUSE_S)

    def _send(self, upload: UploadView) -> None:
        missing = [part for part in upload.parts if not part.received]
        paths = {plan.path.name: plan.path for plan in self._plans}
        order = self._order
        sender = PartSender(
            self._connection, paths, order.part_size, self._renew, self._watcher.advance, order.store_transport
        )
        try:
            _send_all(sender, missing)
        finally:
            sender.stop()
            sender.close()

    def _renew(self, part: PartView) -> PartView:
        """Return a part with an address that is good again; parts that ask at once share one question."""
        place = (part.file, part.number)
        with self._renewing:
            known = self._fresh.get(place)
            if known is None or known.url == part.url or is_past(known.expires_at):
                fresh = _try_again(lambda: self._routes.get(self._id))
                self._fresh = {(other.file, other.number): other for other in fresh.parts}
            return self._fresh.get(place, part)

    def _complete(self) -> Upload:
        deadline = time.monotonic() + _COMPLETING_S
        has_sent_again = False
        while True:
            try:
                upload = _try_again(lambda: self._routes.complete(self._id, self._order.wait))
            except ClientError as error:
                is_missing = error.status == httpx.codes.CONFLICT and error.param == "parts"
                if is_missing and not has_sent_again:
                    has_sent_again = True
                    self._send(self._routes.get(self._id))
                    continue
                if error.code == "conflict" and not is_missing and self._is_completing(deadline):
                    continue
                if error.report is not None:
                    self._memory.forget(self._key)
                raise
            self._memory.forget(self._key)
            return upload

    def _is_completing(self, deadline: float) -> bool:
        """Say, after a while, whether another run is completing the same upload."""
        if time.monotonic() > deadline or self._routes.get(self._id).state == "open":
            return False
        time.sleep(1.0)
        return True


def _send_all(sender: PartSender, parts: Sequence[PartView]) -> None:
    """Send all parts, several at once; the first failure ends it, and so does Ctrl-C, without waiting for the rest."""
    waiting: queue.SimpleQueue[PartView | None] = queue.SimpleQueue()
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        while (part := waiting.get()) is not None:
            try:
                sender.send(part)
            except StoppedError:
                return
            except BaseException as error:  # noqa: BLE001 - raised again by the one that waits
                ended.put(error)
                return
            ended.put(None)

    for part in parts:
        waiting.put(part)
    for _ in range(_NUM_SENDERS):
        waiting.put(None)
        # daemons: a thread that hangs in a dead connection must not keep the program from ending
        threading.Thread(target=work, daemon=True).start()
    for _ in parts:
        error = ended.get()
        if error is not None:
            sender.stop()
            raise error


def _try_again(call: Callable[[], T], num_tries: int = NUM_TRIES) -> T:
    """Return what `call` returns, called again where the connection broke or the answer may be another one soon."""
    for pause_s in iterate_pauses(num_tries):
        try:
            return call()
        except ConnectionFailedError:
            pass
        except ClientError as error:
            if error.code == _QUOTA or not is_brief(error.status):
                raise
        time.sleep(pause_s)
    return call()
