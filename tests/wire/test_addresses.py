"""Addresses that others will connect to: what is refused in words is what ZMQ would refuse with an exception."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.wire.addresses import host_problem, http_url_problem, without_credentials, zmq_endpoint_problem

GOOD = (
    "tcp://127.0.0.1:1",
    "tcp://10.0.0.7:65535",
    "tcp://worker-0.pool_a.svc.cluster.local:40001",
    "tcp://host.:5",
    "tcp://[::1]:40001",
    "tcp://[fe80::1%eth0]:40001",
)


@pytest.mark.parametrize("endpoint", GOOD)
def test_an_endpoint_that_somebody_can_connect_to_has_no_problem(endpoint: str) -> None:
    assert zmq_endpoint_problem(endpoint) is None
    assert http_url_problem(endpoint.replace("tcp://", "http://") + "/v1") is None


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("", "does not begin with tcp://"),
        ("http://w9:1", "does not begin with tcp://"),
        ("ipc:///tmp/w", "does not begin with tcp://"),
        ("tcp://", "names no host"),
        ("tcp://:5", "names no host"),
        ("tcp://w9", "names no port"),
        ("tcp://w9:", "the port ''"),
        ("tcp://w9:0", "allowed are 1 to 65535"),
        ("tcp://w9:70000", "allowed are 1 to 65535"),
        ("tcp://w9:-1", "the port '-1'"),
        ("tcp://w9:5x", "the port '5x'"),
        ("tcp://w9:٣", "the port"),
        ("tcp://http://w9:4001", "without brackets, or more than one port"),
        ("tcp://my host:4001", "the host 'my host'"),
        ("tcp://*:4001", "the host '*'"),
        ("tcp://0.0.0.0:4001", "every address of a machine"),
        ("tcp://[::]:4001", "every address of a machine"),
        ("tcp://1.2.3:4001", "no IPv4 address"),
        ("tcp://256.1.1.1:4001", "no IPv4 address"),
        ("tcp://::1:4001", "without brackets"),
        ("tcp://[::1", "a bracket that does not hold"),
        ("tcp://[w9]:4001", "a bracket that does not hold"),
        ("tcp://[::1]4001", "something other than a port"),
        ("tcp://[:::]:4001", "no IPv6 address"),
        ("tcp://a@b:1", "a user name"),
        ("tcp://w9\n:4001", "the host 'w9\\n'"),
        (f"tcp://{'w' * 64}:1", "allowed are an IP address or a name"),
        (f"tcp://{'w.' * 200}:1", "allowed are at most 253"),
    ],
)
def test_an_endpoint_that_nobody_can_connect_to_is_named_with_what_is_wrong(endpoint: str, words: str) -> None:
    assert words in (zmq_endpoint_problem(endpoint) or "")


def test_a_path_on_this_machine_is_an_endpoint_where_both_ends_may_be_on_it() -> None:
    assert zmq_endpoint_problem("ipc:///tmp/engine.sock", local=True) is None
    assert "1 to 107" in (zmq_endpoint_problem("ipc://", local=True) or "")
    assert "1 to 107" in (zmq_endpoint_problem(f"ipc://{'x' * 108}", local=True) or "")
    assert "neither" in (zmq_endpoint_problem("inproc://x", local=True) or "")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("w9:80", "neither http:// nor https://"),
        ("file:///etc/passwd", "neither http:// nor https://"),
        ("http://w9:70000", "allowed are 1 to 65535"),
        ("http://", "names no host"),
        ("http://w9/a b", "a path"),
        ("http://w9/?q=1", "a path"),
        ("http://user:secret@w9", "a user name"),
    ],
)
def test_a_url_that_nobody_can_ask_is_named_with_what_is_wrong(url: str, words: str) -> None:
    assert words in (http_url_problem(url) or "")


@pytest.mark.parametrize("host", ["http://w9", "my host", "*", "", "0.0.0.0", "[::1]", "w9:4001", "w9/"])
def test_what_is_no_host_is_refused(host: str) -> None:
    assert host_problem(host) is not None


@pytest.fixture(scope="module")
def dealer() -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    yield socket
    context.destroy(linger=0)


LOOPBACK = st.sampled_from(["127.0.0.1", "127.1.2.3", "[::1]", "127.0.0.1:", "[::1", "127.0.0", "127.0.0.01"])
AFTER = st.text("0123456789:.-_]%*@/ \n\0é", max_size=8) | st.integers(-1, 70_000).map(lambda port: f":{port}")


@given(host=LOOPBACK, after=AFTER)
def test_no_endpoint_without_a_problem_makes_zmq_raise(dealer: zmq.Socket[bytes], host: str, after: str) -> None:
    endpoint = f"tcp://{host}{after}"
    if zmq_endpoint_problem(endpoint) is None:
        dealer.connect(endpoint)
        dealer.disconnect(endpoint)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://w9:8000/v1", "http://w9:8000/v1"),
        ("http://user:secret@w9:8000/v1", "http://***@w9:8000/v1"),
        ("http://user:se/cr@et@w9", "http://***@w9"),
        ("user:secret@w9:4222", "***@w9:4222"),
        ("fast=https://user:secret@w9", "fast=https://***@w9"),
        ("prefill=http://w9?key=secret#there", "prefill=http://w9?***"),
        ("HTTP://w9#secret", "HTTP://w9#***"),
        ("k8s+http://:8000?selector=app%3Dllm", "k8s+http://:8000?selector=app%3Dllm"),
        ("ipc:///tmp/a?b", "ipc:///tmp/a?b"),
        ("", ""),
    ],
)
def test_an_address_is_shown_without_what_may_be_secret(address: str, shown: str) -> None:
    assert without_credentials(address) == shown


@given(st.text(), st.text())
def test_nothing_in_front_of_the_last_at_sign_is_shown_but_a_scheme(user: str, password: str) -> None:
    assert without_credentials(f"http://{user}:{password}@w9") == "http://***@w9"


@pytest.mark.parametrize("url", ["http://user:secret/more@w9", "http://w9?key=secret", "http://w9:80#secret"])
def test_a_problem_of_a_url_repeats_no_part_that_may_be_secret(url: str) -> None:
    assert "secret" not in str(http_url_problem(url))
