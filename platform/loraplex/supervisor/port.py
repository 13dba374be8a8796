"""Ports of this machine: whether one is free, and finding one that is."""

from __future__ import annotations

import socket

from loraplex.supervisor.errors import PortTakenError

_FIRST_ENGINE_PORT = 8100
_NUM_ENGINE_PORTS = 100


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


def find_engine_port() -> int:
    """Return the first free port from 8100 on, else any free one."""
    for port in range(_FIRST_ENGINE_PORT, _FIRST_ENGINE_PORT + _NUM_ENGINE_PORTS):
        try:
            return _bind("127.0.0.1", port)
        except OSError:
            continue
    return find_free_port("127.0.0.1")


def _bind(host: str, port: int) -> int:
    """Bind and close a listening socket; return its port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(1)
        bound: int = server.getsockname()[1]
        return bound
