"""CURVE on every socket of a context: who has an allowed key talks, everybody else is counted and harmless."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.kernel.wire.limits import (
    BLOCKS_PER_EVENT_MAX,
    FRAME_BYTES_MAX,
    IDENTIFIER_BYTES_MAX,
    RENEWALS_MAX,
    SELECT_FRAME_BYTES_MAX,
    WORKERS_EXCLUDED_MAX,
)
from poolgrid.kernel.wire.selection import Renew, Reservation, Select, WorkerRank
from poolgrid.server.cli.main import app
from poolgrid.server.transport.planes import (
    FRAME_BYTES_OF_PLANE,
    CurveKeyError,
    CurveKeys,
    KeyPair,
    PlaneContext,
    PlaneMetrics,
    leave_plain,
    name_plane,
)
from poolgrid.server.transport.security import SecuritySettings, is_loopback
from poolgrid.server.transport.zmq_socket import CallbackSocket

TIMEOUT_S = 120.0


def make_pair(directory: Path, name: str) -> Path:
    """Return the secret key file of a pair that the command made."""
    result = CliRunner().invoke(app, ["keys", "curve", str(directory), "--name", name])
    assert result.exit_code == 0, result.output
    return directory / f"{name}.key_secret"


def keys(settings: SecuritySettings) -> CurveKeys:
    loaded = CurveKeys.load(settings)
    assert loaded is not None
    return loaded


def fresh_keys(server: bytes | None = None) -> CurveKeys:
    public, secret = zmq.curve_keypair()
    return CurveKeys(KeyPair(public, secret), public if server is None else server, None)


class Plane:
    """A ROUTER that echoes, and what its process counts."""

    def __init__(self, keys: CurveKeys | None) -> None:
        self.registry = CollectorRegistry()
        self.context = PlaneContext.make(keys, PlaneMetrics(self.registry))
        socket = self.context.socket(zmq.ROUTER)
        name_plane(socket, "select")
        socket.bind("tcp://127.0.0.1:*")
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.heard: list[bytes] = []
        self._socket = CallbackSocket(socket, self._on_frames)

    def _on_frames(self, frames: list[bytes]) -> None:
        self.heard.append(frames[-1])
        self._socket.send(frames)

    def refused(self, reason: str) -> float:
        labels = {"plane": "select", "reason": reason}
        return self.registry.get_sample_value("poolgrid_plane_refused_peers_total", labels) or 0.0


class Peer:
    """A DEALER that says hello."""

    def __init__(self, keys: CurveKeys | None, endpoint: str, plain: bool = False) -> None:
        self.context = PlaneContext.make(keys, PlaneMetrics(CollectorRegistry()))
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        if plain:
            leave_plain(socket)
        self.answered = asyncio.Event()
        self._socket = CallbackSocket(socket, lambda _: self.answered.set())
        socket.connect(endpoint)
        self._socket.send([b"hello"])

    def close(self) -> None:
        self._socket.close()
        self.context.destroy(linger=0)


@asynccontextmanager
async def plane(keys: CurveKeys | None) -> AsyncIterator[Plane]:
    made = Plane(keys)
    try:
        yield made
    finally:
        made._socket.close()
        made.context.destroy(linger=0)


async def answered(peer: Peer) -> None:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await peer.answered.wait()
    finally:
        peer.close()


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not check():  # noqa: ASYNC110 - what another thread of ZMQ does comes with no event
            await asyncio.sleep(0.005)


async def test_peers_that_share_a_key_talk() -> None:
    shared = fresh_keys()
    async with plane(shared) as echo:
        await answered(Peer(shared, echo.endpoint))
        assert echo.heard == [b"hello"]


async def test_without_keys_a_context_is_plain_zmq() -> None:
    async with plane(None) as echo:
        await answered(Peer(None, echo.endpoint))
        await answered(Peer(fresh_keys(), echo.endpoint, plain=True))


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="scheduling policies are Linux's")
def test_on_one_core_the_thread_of_the_sockets_waits_for_the_end_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, policy in (({0}, os.SCHED_BATCH), ({0, 1}, -1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        context = PlaneContext.make(None, PlaneMetrics(CollectorRegistry()))
        assert context.get(zmq.THREAD_SCHED_POLICY) == policy
        context.destroy(linger=0)


@pytest.mark.parametrize("kind", ["no key", "wrong server key", "key not allowed"])
async def test_a_peer_that_is_not_allowed_is_counted_and_says_nothing(kind: str) -> None:
    shared = fresh_keys()
    keys, reason = {
        "no key": (None, "handshake_failed"),
        "wrong server key": (fresh_keys(), "handshake_failed"),
        "key not allowed": (fresh_keys(server=shared.own.public), "key_not_allowed"),
    }[kind]
    async with plane(shared) as echo:
        stranger = Peer(keys, echo.endpoint)
        try:
            await until(lambda: echo.refused(reason) >= 1)
            await answered(Peer(shared, echo.endpoint))
            assert echo.heard == [b"hello"], "only the friend was heard"
            assert not stranger.answered.is_set()
            other = {"handshake_failed", "key_not_allowed"} - {reason}
            assert echo.refused(other.pop()) == 0, "each is counted as what it is"
        finally:
            stranger.close()


async def test_allowed_keys_come_and_go_with_their_files(tmp_path: Path) -> None:
    secret = make_pair(tmp_path / "own", "server")
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    server = keys(SecuritySettings(curve_key=secret, curve_allowed_keys=allowed))
    friend_file = make_pair(tmp_path / "friend", "friend")
    settings = SecuritySettings(curve_key=friend_file, curve_server_key=tmp_path / "own" / "server.key")
    friend = keys(settings)
    async with plane(server) as echo:
        early = Peer(friend, echo.endpoint)
        await until(lambda: echo.refused("key_not_allowed") >= 1)
        (allowed / "friend.key").write_bytes((tmp_path / "friend" / "friend.key").read_bytes())
        await answered(Peer(friend, echo.endpoint))
        early.close()
        (allowed / "friend.key").unlink()
        before = echo.refused("key_not_allowed")
        late = Peer(friend, echo.endpoint)
        await until(lambda: echo.refused("key_not_allowed") > before)
        late.close()


def test_a_key_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    make_pair(tmp_path, "pair")
    (tmp_path / "junk.key_secret").write_text("junk")
    for name, words in (("none", "none"), ("junk.key_secret", "junk"), ("pair.key", "key_secret")):
        with pytest.raises(CurveKeyError, match=words):
            CurveKeys.load(SecuritySettings(curve_key=tmp_path / name))
    with pytest.raises(CurveKeyError, match="is no directory"):
        CurveKeys.load(SecuritySettings(curve_key=tmp_path / "pair.key_secret", curve_allowed_keys=tmp_path / "no"))


def test_a_pair_is_private_and_never_overwritten(tmp_path: Path) -> None:
    secret = make_pair(tmp_path, "pair")
    assert secret.stat().st_mode & 0o777 == 0o600
    again = CliRunner().invoke(app, ["keys", "curve", str(tmp_path), "--name", "pair"])
    assert again.exit_code == 1
    assert "exists already" in again.output
    assert CliRunner().invoke(app, ["keys", "curve", str(tmp_path), "--name", "../x"]).exit_code == 2


@pytest.mark.parametrize(
    ("host", "settings", "keyed", "warnings"),
    [
        ("127.0.0.1", {}, False, []),
        ("::1", {}, False, []),
        ("localhost", {}, False, []),
        ("0.0.0.0", {}, False, ["--curve-key", "--tls-certificate", "--api-keys"]),
        ("10.0.0.7", {"curve_key": "k"}, True, ["--tls-certificate"]),
        ("::", {"tls_certificate": "c", "tls_key": "k"}, True, ["--curve-key"]),
        ("*", {"curve_key": "k", "tls_certificate": "c", "tls_key": "k", "tls_client_ca": "a"}, False, []),
    ],
)
def test_what_anybody_on_the_network_can_use_is_said(
    host: str, settings: dict[str, str], keyed: bool, warnings: list[str]
) -> None:
    said = SecuritySettings.model_validate(settings).exposures(host, http=True, planes="the planes", keyed=keyed)

    assert len(said) == len(warnings)
    assert all(option in text for option, text in zip(warnings, said, strict=True))
    assert is_loopback(host) == (host in ("127.0.0.1", "::1", "localhost"))


@pytest.mark.parametrize(
    "settings", [{"tls_key": "k"}, {"tls_client_ca": "c"}, {"curve_allowed_keys": "d"}, {"curve_server_key": "k"}]
)
def test_half_a_security_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"go together|need"):
        SecuritySettings.model_validate(settings)


def test_every_socket_has_a_limit_for_frames_and_a_plane_that_is_bound_one_of_its_own() -> None:
    context = PlaneContext.make(None, PlaneMetrics(CollectorRegistry()))
    try:
        for kind in (zmq.DEALER, zmq.ROUTER, zmq.SUB, zmq.XPUB):
            assert context.socket(kind).getsockopt(zmq.MAXMSGSIZE) == FRAME_BYTES_MAX
        for name, limit in FRAME_BYTES_OF_PLANE.items():
            socket = context.socket(zmq.ROUTER)
            name_plane(socket, name)
            assert socket.getsockopt(zmq.MAXMSGSIZE) == limit <= FRAME_BYTES_MAX
        with pytest.raises(KeyError):
            name_plane(context.socket(zmq.ROUTER), "one that nobody gave a limit")
    finally:
        context.destroy(linger=0)


def test_the_largest_messages_of_the_select_plane_fit_its_frames() -> None:
    longest = "x" * IDENTIFIER_BYTES_MAX
    renewal = Renew((Reservation(longest, WorkerRank(longest, 2**32 - 1)),) * RENEWALS_MAX)
    assert len(codec.to_pool.encode(renewal)) <= SELECT_FRAME_BYTES_MAX
    excluded = (WorkerRank(longest, 1),) * WORKERS_EXCLUDED_MAX
    hashes = bytes(8 * BLOCKS_PER_EVENT_MAX)
    select = Select(1, longest, longest, Stage.WHOLE, 1, hashes, excluded, media_hashes=hashes)
    assert len(codec.to_pool.encode(select)) <= SELECT_FRAME_BYTES_MAX


async def test_a_peer_that_sends_a_frame_that_is_too_large_loses_its_connection_and_nobody_else_does() -> None:
    async with plane(None) as select:
        large = Peer(None, select.endpoint)
        await until(lambda: select.heard == [b"hello"])
        large._socket.send([bytes(SELECT_FRAME_BYTES_MAX + 1)])
        await answered(Peer(None, select.endpoint))
        assert max(map(len, select.heard)) == len(b"hello")
        large.close()
