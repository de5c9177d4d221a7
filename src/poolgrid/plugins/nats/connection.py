"""A process's connection to NATS: made from its settings, re-established without limit, and its state is known.

Rules
    1. Connecting never gives up: a process that starts first waits for the servers. A server that cannot be used at
       all (too old, without JetStream) is an error at the start.
    2. A server that is gone without a word is noticed within ``PING_S`` times ``PINGS_MAX``; the client's own default
       is four minutes.
    3. While there is no connection nothing is sent, also not later: what was not sent is known not to be stored.
    4. Every question has ``timeout_s``. One that only reads is asked again within it when its answer falls silent.
    5. A task that is cancelled while it waits for an answer gets none: the client may lose that
       (``keep_cancellation``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry

from poolgrid.kernel.wire.addresses import without_credentials
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.instruments import Counter
from poolgrid.server.process.log_lines import Complaints
from poolgrid.server.process.nats_settings import EventPlaneSettings, NatsSettings
from poolgrid.server.process.tasks import end_process, keep_cancellation

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext

PING_S = 1
PINGS_MAX = 2

RECONNECT_S = 0.25
"""Between two attempts to connect; with several servers they are tried in turn."""

CONNECT_TIMEOUT_S = 2

OLDEST_SERVER = (2, 11)
"""The first that reads many messages with one question, and forgets single ones in time."""

ANSWER_TIMEOUT_S = 5.0
"""How long an answer of NATS may take until it counts as not given: an election of a leader takes four to nine seconds,
and what was asked before it is answered by no server."""

ASK_AGAIN_S = 0.5
"""Silence after which a reading question is asked again, within its time. The servers hand it to any replica, and
continue to hand it to one whose host is gone until they have noticed, which takes them up to 90 s by their defaults."""

ANSWER_BYTES_MAX = 8 * 1024 * 1024
"""Bytes of messages in one answer of the servers; what is left is asked for with the next question."""


class NatsUnusable(ValueError):
    """NATS, as it is, cannot carry an event plane."""


class NatsUnavailable(OSError):
    """NATS gave no answer, or refused for now."""


@dataclass(frozen=True, slots=True)
class NatsMessage:
    """A message with its headers."""

    headers: Mapping[str, str]
    data: bytes


@dataclass(frozen=True, slots=True)
class PublishAnswer:
    """What became of a message that a stream should store."""

    sequence: int = 0
    """Where it is stored; 0 = it is not."""
    error_code: int = 0
    error: str = ""


class NatsConnection:
    """One connection; belongs to the loop that opens it."""

    def __init__(self, settings: NatsSettings, name: str, clock: Clock) -> None:
        self._settings = settings
        self._name = name
        self._clock = clock
        self._client: Client | None = None
        self._jetstream: JetStreamContext | None = None
        self._on_connected: list[Callable[[], None]] = []
        self._since_ms = clock.monotonic_ms()
        """Since when there has been no connection, while there is none."""
        self._complaints = Complaints(log, clock)
        self._closing = False
        self.timeout_s = ANSWER_TIMEOUT_S
        self.foreign = ForeignMessages(clock)
        """What was found in streams of poolgrid's that poolgrid did not write."""

    @property
    def pool(self) -> str:
        assert isinstance(self._settings, EventPlaneSettings), "only a journal is a pool's"
        return self._settings.nats_pool

    async def open(self) -> None:
        """Connect, however long the servers take to come up. Raises ``NatsUnusable``, ``OSError`` for files."""
        try:
            import nats.aio.client
        except ImportError:
            raise NatsUnusable(
                "event_plane is nats and nats-py is not installed: install poolgrid with the extra nats "
                "(extra nats: pip install '.[nats]' in a checkout)"
            ) from None
        settings = self._settings
        client = self._client = nats.aio.client.Client()
        more: dict[str, Any] = {}
        context = self._tls()
        if context is not None:
            more["tls"] = context
        if settings.nats_credentials is not None:
            # A file that is not there is an error now, and not at each attempt.
            is_seed = settings.nats_credentials.read_bytes().lstrip().startswith(b"SU")
            more["nkeys_seed" if is_seed else "user_credentials"] = str(settings.nats_credentials)
        with keep_cancellation():
            await client.connect(
                servers=list(settings.nats_url),
                name=self._name,
                error_cb=self._complain,
                disconnected_cb=self._disconnected,
                reconnected_cb=self._reconnected,
                closed_cb=self._closed,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_S,  # type: ignore[arg-type]
                connect_timeout=CONNECT_TIMEOUT_S,
                ping_interval=PING_S,
                max_outstanding_pings=PINGS_MAX,
                pending_size=0,
                **more,
            )
        self._since_ms = 0.0
        version = client.connected_server_version
        if (version.major, version.minor) < OLDEST_SERVER:
            await self.close()
            raise NatsUnusable(
                f"the NATS server at {self._where()} is version {version.major}.{version.minor}, needed is "
                f"{'.'.join(map(str, OLDEST_SERVER))} or newer"
            )
        self._jetstream = client.jetstream(timeout=self.timeout_s)

    def _tls(self) -> ssl.SSLContext | None:
        settings = self._settings
        wanted = any(url.startswith("tls:") for url in settings.nats_url)
        if not wanted and settings.nats_tls_ca is None and settings.nats_tls_certificate is None:
            return None
        context = ssl.create_default_context(
            ssl.Purpose.SERVER_AUTH, cafile=None if settings.nats_tls_ca is None else str(settings.nats_tls_ca)
        )
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if settings.nats_tls_certificate is not None and settings.nats_tls_key is not None:
            context.load_cert_chain(settings.nats_tls_certificate, settings.nats_tls_key)
        return context

    @property
    def client(self) -> Client:
        """Return the client; only after ``open``."""
        assert self._client is not None, "the connection is not opened"
        return self._client

    @property
    def jetstream(self) -> JetStreamContext:
        """Return JetStream; only after ``open``."""
        assert self._jetstream is not None, "the connection is not opened"
        return self._jetstream

    @property
    def body_bytes_max(self) -> int:
        """Return the largest body of a message without its headers."""
        return max(1, self.client.max_payload - 1024)

    def on_connected(self, call: Callable[[], None]) -> None:
        """Have a callback called whenever the connection stands again."""
        self._on_connected.append(call)

    def out_of_reach_ms(self, now_ms: float) -> float:
        """Return for how long there has been no connection; 0 while there is one."""
        if self._client is not None and self._client.is_connected:
            return 0.0
        return max(1.0, now_ms - self._since_ms)

    async def close(self) -> None:
        self._closing = True
        client, self._client = self._client, None
        if client is not None and not client.is_closed:
            await client.close()

    # Asking

    def check(self) -> None:
        """Raise ``NatsUnavailable`` when there is no connection: what would be sent then would be sent later."""
        if self._client is None or not self._client.is_connected:
            raise NatsUnavailable(f"no connection to NATS at {self._where()}")

    async def asked(self, what: str, question: Awaitable[Any]) -> Any:
        """Return the answer to a question; raises ``NatsUnavailable`` for none, and for a refusal of the server's.

        A thing that does not exist is ``nats.js.errors.NotFoundError``.
        """
        import nats.errors
        import nats.js.errors

        try:
            self.check()
        except NatsUnavailable:
            close = getattr(question, "close", None)
            if close is not None:
                close()
            raise
        try:
            async with asyncio.timeout(self.timeout_s * 2):
                with keep_cancellation():
                    return await question
        except nats.js.errors.NotFoundError:
            raise
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise NatsUnavailable(f"{what}: {str(error) or type(error).__name__}") from error

    async def batch(self, stream: str, question: Mapping[str, Any]) -> list[NatsMessage]:
        """Return the messages of a stream that a question names, as many as one answer takes.

        Any replica of the stream answers, perhaps one that is a little behind.
        """
        what = f"reading stream {stream}"
        self.check()
        body = json.dumps({"max_bytes": ANSWER_BYTES_MAX, **question}).encode()

        import nats.errors

        try:
            async with asyncio.timeout(self.timeout_s):
                while True:
                    with keep_cancellation():
                        found = await self._asked_once(what, f"$JS.API.DIRECT.GET.{stream}", body)
                    if found is not None:
                        return found
        except (nats.errors.Error, TimeoutError) as error:
            raise NatsUnavailable(f"{what}: {str(error) or 'no answer'}") from error

    async def _asked_once(self, what: str, subject: str, body: bytes) -> list[NatsMessage] | None:
        """Return what one question brings, or ``None`` when its answer falls silent."""
        client = self.client
        found: list[NatsMessage] = []
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heard = asyncio.Event()

        async def take(message: Any) -> None:
            heard.set()
            headers = message.headers or {}
            status = headers.get("Status")
            # What is stored has a sequence, and may have a header of this name.
            if status is None or "Nats-Sequence" in headers:
                found.append(NatsMessage(headers, message.data))
            elif not done.done():
                if status in ("204", "404"):
                    done.set_result(None)
                else:
                    done.set_exception(
                        NatsUnavailable(f"{what}: status {status}, {headers.get('Description', 'no such stream')}")
                    )

        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox, cb=take)
        try:
            await client.publish(subject, body, reply=inbox)
            while not done.done():
                heard.clear()
                try:
                    async with asyncio.timeout(ASK_AGAIN_S):
                        await heard.wait()
                except TimeoutError:
                    return None
            await done
            return found
        finally:
            if not client.is_closed:
                await subscription.unsubscribe()

    async def publish(self, what: str, subject: str, headers: Mapping[str, str], body: bytes) -> PublishAnswer:
        """Have a message stored; raises ``NatsUnavailable`` when it is not known whether it is."""
        import nats.errors

        self.check()
        try:
            with keep_cancellation():
                message = await self.client.request(subject, body, timeout=self.timeout_s, headers=dict(headers))
        except nats.errors.NoRespondersError:
            return PublishAnswer(error="no stream takes it, or its servers have no leader")
        except (nats.errors.Error, TimeoutError) as error:
            raise NatsUnavailable(f"{what}: {str(error) or type(error).__name__}") from error
        return _publish_answer(message.data)

    # Callbacks of the client

    def _where(self) -> str:
        return ", ".join(map(without_credentials, self._settings.nats_url))

    async def _complain(self, error: Exception) -> None:
        self._complaints.note("servers", "NATS at %s: %s%s", self._where(), str(error) or type(error).__name__)

    async def _disconnected(self) -> None:
        self._since_ms = self._clock.monotonic_ms()
        if not self._closing:
            log.warning("the connection to NATS at %s is lost; reconnecting until it works", self._where())

    async def _reconnected(self) -> None:
        log.warning(
            "the connection to NATS at %s is back after %.1f s",
            self._where(),
            (self._clock.monotonic_ms() - self._since_ms) / 1000,
        )
        for call in self._on_connected:
            call()

    async def _closed(self) -> None:
        if not self._closing:
            # The servers refuse this process for good: wrong credentials, an account that is gone.
            error = self.client.last_error or ConnectionError("closed")
            end_process("connection to NATS", error)


def _publish_answer(data: bytes) -> PublishAnswer:
    try:
        said = json.loads(data)
        error = said.get("error")
        if error is not None:
            return PublishAnswer(error_code=int(error.get("err_code", 0)), error=str(error.get("description")))
        return PublishAnswer(sequence=int(said["seq"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return PublishAnswer(error=f"an answer that cannot be read ({error})")


SEEN_MAX = 4096
"""Messages that are remembered, so that one that is read again is not counted again."""

_counters: WeakKeyDictionary[CollectorRegistry, Counter] = WeakKeyDictionary()
"""A process has several connections to NATS, and one series of this name."""


def foreign_counter(registry: CollectorRegistry) -> Counter:
    """Return the counter of a registry, made with the first call."""
    counter = _counters.get(registry)
    if counter is None:
        counter = _counters[registry] = Counter(
            "poolgrid_nats_foreign_messages_total",
            "Messages in poolgrid's NATS streams from other writers, by stream, counted once per reading "
            "process. The log has the sequence and the command that removes it.",
            ["stream"],
            registry=registry,
        )
    return counter


class ForeignMessages:
    """What one connection found."""

    def __init__(self, clock: Clock) -> None:
        self._complaints = Complaints(log, clock)
        self._seen: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._counter: Counter | None = None

    def count_in(self, registry: CollectorRegistry) -> None:
        self._counter = foreign_counter(registry)

    def skipped(self, stream: str, sequence: int, why: object) -> None:
        """Count a message that is skipped, and log how to remove it."""
        if (stream, sequence) in self._seen:
            return
        self._seen[stream, sequence] = None
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        if self._counter is not None:
            self._counter.labels(stream).inc()
        self._complaints.about(
            f"stream {stream}",
            f"message {sequence} is not from poolgrid ({why}); to remove it: nats stream rmm {stream} {sequence}",
        )
