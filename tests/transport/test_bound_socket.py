"""The listening socket that a supervisor hands to the server that it starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from poolgrid.server.transport.bound_socket import LISTENER_VARIABLE, inherited_listener, listen


@pytest.fixture
def descriptor() -> Iterator[int]:
    """A listening socket's descriptor, the copy of a child."""
    with listen("127.0.0.1", 0, "port") as kept:
        yield os.dup(kept.fileno())


def test_a_process_takes_the_socket_of_its_supervisor_and_hands_it_to_no_child(descriptor: int) -> None:
    environment = {LISTENER_VARIABLE: str(descriptor), "OTHER": "1"}
    listener = inherited_listener(environment)
    assert listener is not None
    with listener, socket.create_connection(listener.getsockname()):
        assert environment == {"OTHER": "1"}
        assert not os.get_inheritable(listener.fileno())
        connection, _ = listener.accept()
        connection.close()


def test_variables_of_systemd_for_another_process_are_not_ours() -> None:
    environment = {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid() + 1), "LISTEN_FDNAMES": "http"}
    assert inherited_listener(environment) is None
    assert environment == {}
    assert inherited_listener({}) is None


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({LISTENER_VARIABLE: "x"}, "POOLGRID_LISTENER is 'x', which is no socket"),
        ({LISTENER_VARIABLE: "99999"}, "which is no socket"),
        ({LISTENER_VARIABLE: "9" * 40}, "which is no socket"),
        ({"LISTEN_FDS": "2", "LISTEN_PID": str(os.getpid())}, "LISTEN_FDS is '2', allowed is 1"),
        ({"LISTEN_FDS": "none", "LISTEN_PID": str(os.getpid())}, "LISTEN_FDS is 'none', allowed is 1"),
    ],
)
def test_what_is_no_listening_socket_is_named(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match="taking the listening socket") as raised:
        inherited_listener(environment)
    assert says in str(raised.value)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_socket_that_does_not_listen_for_connections_is_refused(kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_INET, kind) as other:
        other.bind(("127.0.0.1", 0))
        with pytest.raises(ValueError, match="allowed is a listening TCP socket"):
            inherited_listener({LISTENER_VARIABLE: str(os.dup(other.fileno()))})
