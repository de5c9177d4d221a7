"""The ZMQ sockets of a process, closed by CURVE when it has a key: the only place that applies it.

Rules
    1. Every socket comes from a ``PlaneContext``. With a key, whatever it binds is a CURVE server and whatever it
       connects is a CURVE client: no socket can be forgotten. ``leave_plain`` makes the one exception, for engines that
       publish without CURVE.
    2. A server takes only clients whose public key is allowed (ZAP). A peer without a key, with the wrong server key,
       or with a key that is not allowed never gets a message through; it is counted, logged, and costs nothing else.
    3. Allowed keys are read from their directory again whenever it has changed, at the next handshake. A connection
       that stands is not cut.
    4. A process without a key behaves exactly as plain ZMQ.
    5. Every socket has a limit for the frames that it takes, from any peer: ``FRAME_BYTES_OF_PLANE`` where peers
       connect to it, the contract's where it connects. A peer that sends a larger one loses its connection.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import zmq
import zmq.auth
import zmq.utils.z85
from prometheus_client import CollectorRegistry, Counter
from zmq.utils.monitor import parse_monitor_message

from poolgrid.kernel.wire.limits import (
    FRAME_BYTES_MAX,
    QUESTION_FRAME_BYTES_MAX,
    SELECT_FRAME_BYTES_MAX,
    SUBSCRIPTION_FRAME_BYTES_MAX,
)
from poolgrid.server.transport.security import SecuritySettings
from poolgrid.server.transport.zmq_socket import CallbackSocket

log = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = "poolgrid"
ZAP_FRAMES = 7
"""Version, request id, domain, address, identity, mechanism, and CURVE's one credential."""

REFUSAL_LOGS_MAX = 20
"""Refused peers are logged this often, then only counted: a peer that tries without end must not fill a disk."""

FRAME_BYTES_OF_PLANE = {
    "ingest": FRAME_BYTES_MAX,
    "request": FRAME_BYTES_MAX,
    "select": SELECT_FRAME_BYTES_MAX,
    "query": QUESTION_FRAME_BYTES_MAX,
    "tensor": QUESTION_FRAME_BYTES_MAX,
    "feed": SUBSCRIPTION_FRAME_BYTES_MAX,
}
"""What may be sent to each plane that is bound, in one frame; a plane that is not listed cannot be made."""

SOCKETS_MAX = 65_536
"""Sockets of one context, ZMQ's own limit of 1,023 being below what 350 workers need: each connection to one takes
three (itself, and both ends of what watches it). A place costs 8 bytes."""

HANDSHAKES_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""What a server sees of peers that never show a key; a key that is not allowed is counted where it is judged."""


HANDSHAKES_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""What a client sees of a server that does not take it."""


class CurveKeyError(ValueError):
    """A CURVE key file cannot be used."""


class KeyPair(NamedTuple):
    """A CURVE key pair, in Z85."""

    public: bytes
    secret: bytes


class CurveKeys:
    """The keys of a process: its own pair, the servers' public key, and the peers that may connect."""

    def __init__(self, own: KeyPair, server: bytes, allowed_directory: Path | None) -> None:
        self.own = own
        self.server = server
        self._directory = allowed_directory
        self._allowed: frozenset[bytes] = frozenset()
        self._seen: tuple[object, ...] | None = None
        if allowed_directory is None:
            self._allowed = frozenset({own.public})
        else:
            self._read()

    @classmethod
    def load(cls, settings: SecuritySettings) -> CurveKeys | None:
        """Return the keys that the settings name; ``None`` without any. Raises ``CurveKeyError``."""
        if settings.curve_key is None:
            return None
        public, secret = _load(settings.curve_key)
        if secret is None:
            raise CurveKeyError(
                f"reading curve_key: {settings.curve_key} has no secret key; give the file that ends in .key_secret"
            )
        if settings.curve_key.stat().st_mode & 0o077:
            log.warning("%s can be read by others than its owner: chmod 600 it", settings.curve_key)
        server = public if settings.curve_server_key is None else _load(settings.curve_server_key)[0]
        return cls(KeyPair(public, secret), server, settings.curve_allowed_keys)

    def allows(self, public: bytes) -> bool:
        """Return whether a peer with this public key (Z85) may connect."""
        if self._directory is not None:
            try:
                self._read()
            except CurveKeyError as error:
                log.error("%s; the keys that were allowed before stay", error)
        return public in self._allowed

    def _read(self) -> None:
        assert self._directory is not None, "there is a directory to read"
        try:
            files = sorted(self._directory.glob("*.key"))
            seen = tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files)
        except OSError as error:
            raise CurveKeyError(f"reading curve_allowed_keys: {self._directory}: {error.strerror}") from error
        if seen == self._seen:
            return
        if not self._directory.is_dir():
            raise CurveKeyError(f"reading curve_allowed_keys: {self._directory} is no directory")
        # Remembered before reading: a file that cannot be used is complained about once.
        self._seen = seen
        self._allowed = frozenset(_load(path)[0] for path in files)


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise CurveKeyError(f"reading CURVE key file {path}: {error}") from error


class PlaneMetrics:
    """What a process counts of its planes; one per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refused = Counter(
            "poolgrid_plane_refused_peers_total",
            "Peers refused by CURVE, by reason. `key_not_allowed`: unknown key. `handshake_failed`: no CURVE, "
            "a wrong server key, or a port scan. Peers retry several times a second, so one misconfigured "
            "worker makes this grow. The log has its address.",
            ["plane", "reason"],
            registry=registry,
        )
        self._logged = 0

    def refused(self, plane: str, reason: str, address: str) -> None:
        self._refused.labels(plane, reason).inc()
        if self._logged < REFUSAL_LOGS_MAX:
            self._logged += 1
            last = " (further ones are only counted)" if self._logged == REFUSAL_LOGS_MAX else ""
            log.warning("refused a peer on the %s plane, from %s: %s%s", plane, address or "somewhere", reason, last)


class PlaneSocket(zmq.Socket[bytes]):
    """A socket that is closed by CURVE whenever its context has keys."""

    plane: str = "unnamed"
    """Value of the ``plane`` label."""
    plain: bool = False
    """Whether CURVE is left out, for peers that do not have it."""
    _events: CallbackSocket | None = None

    def bind(self, addr: str) -> Any:
        context = self.context
        if isinstance(context, PlaneContext) and context.keys is not None and _is_remote(addr) and not self.plain:
            context.serve_zap()
            self.curve_secretkey = context.keys.own.secret
            self.curve_publickey = context.keys.own.public
            self.curve_server = True
            self.setsockopt_string(zmq.ZAP_DOMAIN, f"{ZAP_DOMAIN}:{self.plane}")
            # Without a process that checks keys, no peer gets in.
            self.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            self._watch(context)
        return super().bind(addr)

    def connect(self, addr: str) -> Any:
        context = self.context
        if isinstance(context, PlaneContext) and context.keys is not None and _is_remote(addr) and not self.plain:
            self.curve_secretkey = context.keys.own.secret
            self.curve_publickey = context.keys.own.public
            self.curve_serverkey = context.keys.server
        return super().connect(addr)

    @property
    def watched(self) -> bool:
        return self._events is not None

    def watch_as_client(self, what: str) -> None:
        """Log when ``what`` refuses our key, or uses another security than we do."""

        def on_event(frames: list[bytes]) -> None:
            event = parse_monitor_message(frames)
            log.warning(
                "connecting to %s at %s: the security handshake failed; compare curve_key, curve_server_key and the "
                "keys that are allowed there",
                what,
                event["endpoint"].decode(errors="replace"),
            )

        self._events = CallbackSocket(self.get_monitor_socket(HANDSHAKES_REFUSED), on_event)

    def close(self, linger: int | None = None) -> None:
        events, self._events = self._events, None
        if events is not None and not self.closed:
            self.disable_monitor()
            events.close()
        super().close(linger)

    def _watch(self, context: PlaneContext) -> None:
        if self._events is not None:
            return
        monitor = self.get_monitor_socket(HANDSHAKES_FAILED)

        def on_event(frames: list[bytes]) -> None:
            event = parse_monitor_message(frames)
            context.refused(self.plane, "handshake_failed", event["endpoint"].decode(errors="replace"))

        self._events = CallbackSocket(monitor, on_event)


class PlaneContext(zmq.Context[PlaneSocket]):
    """The context of a process's planes; use it from its event loop only."""

    keys: CurveKeys | None = None
    _metrics: PlaneMetrics | None = None
    _zap: CallbackSocket | None = None

    @classmethod
    def make(cls, keys: CurveKeys | None, metrics: PlaneMetrics) -> PlaneContext:
        """Return a context whose sockets are closed by ``keys``, or open without any."""
        context = cls()
        if _has_one_core():
            # Woken by a send, ZMQ's thread would take the core from the loop in the middle of its turn, and give it
            # back for the next send. As a batch thread it runs when the loop waits, for all that was sent and arrived
            # in the turn: a fifth less CPU per request.
            context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
        context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        context.keys = keys
        context._metrics = metrics
        return context

    def socket(self, socket_type: int, socket_class: Any = None, **options: Any) -> Any:
        made = super().socket(socket_type, socket_class=socket_class or PlaneSocket, **options)
        made.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        return made

    def refused(self, plane: str, reason: str, address: str) -> None:
        if self._metrics is not None:
            self._metrics.refused(plane, reason, address)

    def serve_zap(self) -> None:
        """Begin to judge the keys of peers; a second call does nothing."""
        if self._zap is None:
            socket = super().socket(zmq.REP)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(ZAP_ENDPOINT)
            self._zap = CallbackSocket(socket, self._on_zap)

    def end_zap(self) -> None:
        """Stop judging, before the context ends; a peer that connects then is refused."""
        zap, self._zap = self._zap, None
        if zap is not None:
            zap.close()

    def destroy(self, linger: int | None = None) -> None:
        """Close every socket and end."""
        self.end_zap()
        for socket in list(self._sockets):
            # Before the sockets that watch them, which are in the same set.
            if isinstance(socket, PlaneSocket) and socket.watched:
                socket.close(linger)
        super().destroy(linger)

    def _on_zap(self, frames: list[bytes]) -> None:
        assert self._zap is not None, "questions come while it is open"
        version, number = (frames[0], frames[1]) if len(frames) > 1 else (b"1.0", b"")
        code, text = b"400", b"not allowed"
        if len(frames) == ZAP_FRAMES and frames[5] == b"CURVE":
            assert self.keys is not None, "a process without keys serves no CURVE"
            public = zmq.utils.z85.encode(frames[6])
            if self.keys.allows(public):
                code, text = b"200", b"OK"
            else:
                plane = frames[2].decode(errors="replace").partition(":")[2]
                self.refused(plane, "key_not_allowed", f"{frames[3].decode(errors='replace')}, key {public.decode()}")
        self._zap.send([version, number, code, text, b"", b""])


def _has_one_core() -> bool:
    """Return whether the process may run on one core only; where more are idle, threads do not wait for each other."""
    return hasattr(os, "SCHED_BATCH") and len(os.sched_getaffinity(0)) == 1


def name_plane(socket: zmq.Socket[bytes], plane: str) -> None:
    """Say which plane a socket is, before it binds; what it takes from peers is limited by that."""
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_OF_PLANE[plane])
    if isinstance(socket, PlaneSocket):
        socket.plane = plane


def leave_plain(socket: zmq.Socket[bytes]) -> None:
    """Connect without CURVE, to an engine that does not have it."""
    if isinstance(socket, PlaneSocket):
        socket.plain = True


def watch_as_client(socket: zmq.Socket[bytes], what: str) -> None:
    """Have refusals of a server logged; for sockets whose owner does not watch them itself."""
    if isinstance(socket, PlaneSocket):
        socket.watch_as_client(what)


def end_security(context: zmq.Context[Any]) -> None:
    """Let a context end by ``term``, which waits for every socket, also for those of the security itself."""
    if isinstance(context, PlaneContext):
        context.end_zap()


MakeContext = Callable[[], "zmq.Context[Any]"]


def _is_remote(address: str) -> bool:
    return not address.startswith("inproc:")
