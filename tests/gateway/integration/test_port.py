"""The port that `loraplex up` keeps for its engine: nobody else gets it, the engine does, as often as it starts."""

from __future__ import annotations

import socket
import sys

import pytest

from loraplex.supervisor.port import hold_engine_port
from loraplex_engine.server.process import _listen

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="two sockets share a port that one only binds")


@pytest.mark.parametrize("usual", [True, False])
def test_a_kept_port_is_the_engines_alone(usual: bool) -> None:
    with hold_engine_port(usual=usual) as port, hold_engine_port(usual=usual) as other:
        assert port != other
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        for _ in range(2):
            with _listen(f"127.0.0.1:{port}") as listener, socket.create_connection(("127.0.0.1", port)):
                listener.accept()[0].close()


def test_a_port_that_somebody_listens_on_is_passed_over() -> None:
    with hold_engine_port(usual=True) as port, _listen(f"127.0.0.1:{port}"), hold_engine_port(usual=True) as other:
        assert other != port


def test_nothing_answers_at_a_kept_port_before_the_engine_does() -> None:
    with hold_engine_port(usual=False) as port, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
