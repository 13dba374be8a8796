"""Sends one part of an upload from disk, again and again until it has arrived or there is no hope.

A part goes where the registry says: through the gateway, with our key, or to the object store by an address that is
signed for this part alone, without our key and without following it elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from loraplex.client.connection import Connection, lost, read_error
from loraplex.client.errors import ClientError
from loraplex.client.location import is_loopback
from loraplex.client.part_plan import hash_part
from loraplex.client.retrying import is_brief, is_past, iterate_pauses, read_retry_after_s
from loraplex.client.upload_routes import API_PREFIX
from loraplex_registry.wire.upload import PartView

_CHUNK_SIZE = 256 << 10
_TIMEOUT = httpx.Timeout(60.0, connect=5.0, write=30.0)
_MAX_REFUSALS = 2
"""How often a part is sent again, to a fresh address, after it was refused for a cause that may be none."""


class StoppedError(Exception):
    """The upload was stopped, by the user or by the failure of another part."""


class PartSender:
    """Sends parts; safe to use from several threads at once.

    `renew` returns a part with a fresh address; `on_sent` is told of bytes as they leave, and of fewer than none for
    those that have to leave again.
    """

    def __init__(
        self,
        connection: Connection,
        paths: dict[str, Path],
        part_size: int,
        renew: Callable[[PartView], PartView],
        on_sent: Callable[[int], None],
        store_transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._connection = connection
        self._paths = paths
        self._part_size = part_size
        self._renew = renew
        self._on_sent = on_sent
        self._stop = threading.Event()
        self._near, self._far = (
            httpx.Client(timeout=_TIMEOUT, follow_redirects=False, trust_env=trust_env, transport=store_transport)
            for trust_env in (False, True)
        )

    def stop(self) -> None:
        """Make every `send` that runs end soon, with `StoppedError`."""
        self._stop.set()

    def close(self) -> None:
        """Close the connections to the object store."""
        self._near.close()
        self._far.close()

    def send(self, part: PartView) -> None:
        """Send a part until it has arrived.

        Raises:
            ClientError: It was refused, or nobody took it after several tries.
            StoppedError: `stop` was called.
        """
        error: ClientError | None = None
        num_refused = 0
        for pause_s in (*iterate_pauses(), None):
            if is_past(part.expires_at):
                part = self._renew(part)
            if part.received:
                self._on_sent(part.size)
                return
            try:
                response = self._try(part)
            except httpx.TransportError as failure:
                error, wait_s = lost(self._name_host(part), failure), 0.0
            else:
                if response.is_success:
                    return
                error, wait_s = self._judge(part, response), read_retry_after_s(response.headers)
                if not is_brief(response.status_code):
                    num_refused += 1
                    if num_refused > _MAX_REFUSALS:
                        break
                    part = self._renew(part)
            if pause_s is not None and self._stop.wait(max(pause_s, wait_s)):
                raise StoppedError
        assert error is not None, "a try failed"
        raise error

    def _try(self, part: PartView) -> httpx.Response:
        """Send it once; what left is taken back from the count if it did not arrive."""
        num_sent = 0

        def read() -> Iterator[bytes]:
            nonlocal num_sent
            for chunk in self._read(part):
                yield chunk
                num_sent += len(chunk)
                self._on_sent(len(chunk))

        has_arrived = False
        try:
            response = self._request(part, read())
            has_arrived = response.is_success
            return response
        finally:
            if not has_arrived:
                self._on_sent(-num_sent)

    def _request(self, part: PartView, content: Iterator[bytes]) -> httpx.Response:
        headers = {**(part.headers or {}), "content-length": str(part.size)}
        method, url = part.method or "PUT", part.url or ""
        if path := self._find_path(part):
            return self._connection.http.request(method, path, headers=headers, content=content)
        if not url.startswith(("http://", "https://")):
            raise ClientError(f"The server wants a part to be sent to {url[:80]!r}.", code="unexpected_answer")
        client = self._near if is_loopback(httpx.URL(url).host) else self._far
        return client.request(method, url, headers=headers, content=content)

    def _find_path(self, part: PartView) -> str | None:
        """Return the path of a part that goes through the gateway, the only one that gets our key; else None.

        The gateway names itself as it was called; behind a proxy it does not know whether that was by TLS.
        """
        url, gateway = httpx.URL(part.url or ""), httpx.URL(self._connection.url)
        is_gateways = not url.host or (url.host, url.port) == (gateway.host, gateway.port)
        path = url.raw_path.decode("ascii")
        return path if is_gateways and path.startswith(API_PREFIX) else None

    def _read(self, part: PartView) -> Iterator[bytes]:
        num_left = part.size
        with self._paths[part.file].open("rb", buffering=0) as file:
            file.seek(part.number * self._part_size)
            while num_left:
                if self._stop.is_set():
                    raise StoppedError
                chunk = file.read(min(_CHUNK_SIZE, num_left))
                if not chunk:
                    raise _changed(part)
                num_left -= len(chunk)
                yield chunk

    def _judge(self, part: PartView, response: httpx.Response) -> ClientError:
        """Return what a refusal is, to be tried again.

        Raises:
            ClientError: Another try would not help.
        """
        status = response.status_code
        if response.is_redirect:
            raise ClientError("The object store sent us elsewhere, where parts are not sent to.", status=status)
        error = self._name_failure(part, response)
        if is_brief(status) or self._is_expired(part, response):
            return error
        if hash_part(self._paths[part.file], part.number * self._part_size, part.size) != part.sha256:
            raise _changed(part)
        if status == httpx.codes.BAD_REQUEST:
            # the bytes are right here, so they may have been spoilt on their way
            return error
        raise error

    def _is_expired(self, part: PartView, response: httpx.Response) -> bool:
        is_refused = response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
        return is_refused and self._find_path(part) is None

    def _name_host(self, part: PartView) -> str:
        """Return where a part goes, without the path and the signature."""
        if self._find_path(part):
            return self._connection.url
        url = httpx.URL(part.url or "")
        return f"{url.scheme}://{url.netloc.decode('ascii')}"

    def _name_failure(self, part: PartView, response: httpx.Response) -> ClientError:
        body = response.read()
        if self._find_path(part):
            return read_error(response.status_code, body)
        text = body[:300].decode(errors="replace")
        return ClientError(
            f"The object store answered {response.status_code} to part {part.number} of {part.file}: {text}",
            status=response.status_code,
            code="store_refused",
        )


def _changed(part: PartView) -> ClientError:
    return ClientError(
        f"{part.file} changed while it was sent. Push again when nothing writes to it.",
        code="file_changed",
        param=part.file,
    )
