"""Ports of this machine: whether one is free, finding one that is, and keeping one for the engine."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from loraplex.supervisor.errors import PortTakenError

_ENGINE_PORTS = range(8100, 8200)


def check_port_free(host: str, port: int) -> None:
    """Return if a server can listen on `port`.

    Raises:
        PortTakenError: It cannot.
    """
    try:
        _bind(host, port)
    except OSError as error:
        raise PortTakenError(
            f"Cannot listen on {host}:{port} ({error.strerror}). Stop what uses it, or choose another port with "
            "--port (0 takes a free one)."
        ) from error


def find_free_port(host: str) -> int:
    """Return a port that the system says is free."""
    return _bind(host, 0)


@contextmanager
def hold_engine_port(*, usual: bool) -> Iterator[int]:
    """Keep a port of the loopback for the engine, which binds it seconds later and again whenever it starts anew.

    The port is bound here and not listened on. Where two sockets may share that (Linux), whoever wants any free port
    gets another one; elsewhere it is let go of before the engine comes.

    Args:
        usual: The first free port from 8100 on; else, and where these are taken, any free one.
    """
    with _hold_one(_ENGINE_PORTS if usual else ()) as holder:
        port: int = holder.getsockname()[1]
        if sys.platform == "linux":
            # after bind, so that two holders exclude each other, and before the engine's, which sets it too
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            holder.close()
        yield port


def _hold_one(ports: Iterable[int]) -> socket.socket:
    """Return a socket that is bound to the first free one of `ports`, else to any."""
    for port in (*ports, 0):
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            holder.bind(("127.0.0.1", port))
        except OSError:
            holder.close()
            if not port:
                raise
        else:
            return holder
    raise AssertionError("0 is the last")


def _bind(host: str, port: int) -> int:
    """Bind and close a listening socket; return its port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(1)
        bound: int = server.getsockname()[1]
        return bound
