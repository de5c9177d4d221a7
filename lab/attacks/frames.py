"""Attacks on the ZMQ planes when they are open: whoever reaches them sends what it likes.

What is sent begins from messages recorded on the pool itself: one more worker of each role, and one more router, join
through relays (``wiretap``), do some work, and leave.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from lab.attacks import identifiers
from lab.attacks.attack import Attack, Outcome, Part, Run, Scene
from lab.attacks.mutated_sender import Order, send
from lab.attacks.pool import ATTACKER_HOST, HOST, Shape, Topology, until
from lab.attacks.wiretap import COMMAND, LONG, Message, Wiretap
from lab.benchmarks.fleet import free_port
from lab.benchmarks.services import PoolFailed, Service, plain_client
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.ingest import CONTROL_FRAME, Heartbeat, Hello
from poolgrid.kernel.wire.selection import AskStatus, Probe, Release, Renew, Reservation, Select, WorkerRank

OWN, DISAGGREGATED = Shape(), Shape("disaggregated")
PLANES = ("ingest", "query", "feed", "select", "request")
TAP_HOST = "127.0.0.2"
"""Where the recorded workers say they are: the relay."""

MUTATED = 60_000
SUBSCRIPTIONS = 500_000
HUGE_BYTES = 500_000_000
RECORD_TIMEOUT_S = 60.0
GREET_S = 10.0
LEASE_S = 4.0
"""A little longer than the lease of a worker that nobody renews."""


JOIN_TIMEOUT_S = 60.0
"""Attackers give way to others, and so do the processes that they start."""


BAD_ENDPOINTS = (
    *("", "tcp://", "tcp://w9", "tcp://my host:5", "tcp://http://w9:5", "tcp://*:5", "tcp://127.0.0.1:70000"),
    *("tcp://127.0.0.1:0", "tcp://127.0.0.1:-1", "tcp://127.0.0.1:port", "udp://127.0.0.1:5", "inproc://x"),
    *("ipc://", "tcp://[::1", "tcp://127.0.0.1:5;127.0.0.1:6", "nonsense", "tcp://\x1b[2J:5", "tcp://" + "a" * 240),
)
"""Addresses that nobody can connect to, or should; none of them names another machine."""

MISCONFIGURED_HOSTS = ("http://w9", "my host", "*", "", "127.0.0.1:5", "tcp://127.0.0.1", "[::1")


@dataclass(slots=True)
class Recording:
    """Messages by plane, as they went towards it."""

    messages: dict[str, list[Message]]
    hello: Hello
    """Of a worker that joined."""


_recordings: dict[Topology, Recording] = {}


async def recording(scene: Scene) -> Recording:
    """Return what was recorded on a pool of this topology, once in a run."""
    found = _recordings.get(scene.pool.shape.topology)
    if found is None:
        found = _recordings[scene.pool.shape.topology] = await _record(scene)
    return found


async def _record(scene: Scene) -> Recording:
    pool = scene.pool
    taps: dict[str, Wiretap] = {}

    async def tap(name: str, endpoint: str, host: str = HOST, port: int = 0) -> str:
        target_host, _, target_port = endpoint.removeprefix("tcp://").rpartition(":")
        taps[name] = Wiretap(target_host, int(target_port))
        return await taps[name].start(host, port)

    guests: list[Service] = []
    try:
        ingest = await tap("ingest", pool.endpoint("ingest"))
        roles = ("prefill", "decode") if pool.shape.topology == "disaggregated" else ("aggregated",)
        for role in roles:
            port = free_port()
            await tap(f"request {role}", f"tcp://{HOST}:{port}", TAP_HOST, port)
            options = ("--advertise-host", TAP_HOST, "--request-port", str(port))
            arguments = pool.worker_arguments(f"guest-{role}", ingest, *options, role=role)
            guests.append(await Service.start(f"guest-{role}", ["worker", *arguments], scene.directory))
        feed, query = await tap("feed", pool.endpoint("feed")), await tap("query", pool.endpoint("query"))
        router = ["router", "--port", "0", "--feed-endpoint", feed, "--query-endpoint", query]
        guests.append(await Service.start("guest-router", [*router, "--legs", "two"], scene.directory))
        async with asyncio.timeout(RECORD_TIMEOUT_S):
            await asyncio.gather(*(guest.wait_ready() for guest in guests))
            async with plain_client() as http:

                async def complete() -> bool:
                    rows = (await http.get(f"{guests[-1].url}/v1/workers")).json()["data"]
                    return {"guest-" + role for role in roles} <= {
                        r["worker_id"] for r in rows if r["state"] == "ready"
                    }

                await until("the recorded router reaches all workers", complete, RECORD_TIMEOUT_S)
                for number in range(40):
                    body = {"model": pool.model.name, "prompt": f"{number} " * 200, "max_tokens": 4}
                    (await http.post(f"{guests[-1].url}/v1/completions", json=body)).raise_for_status()
    finally:
        await asyncio.gather(*(guest.stop() for guest in guests))
        for relay in taps.values():
            relay.stop()
    messages = {
        "ingest": taps["ingest"].sent.messages,
        "query": taps["query"].sent.messages,
        # ZMTP 3.1 subscribes by command; as a message it is the older form, which libzmq takes as well.
        "feed": [[b"\x01poolgrid"], [b"\x00poolgrid"], *taps["feed"].sent.messages],
        "request": [message for role in roles for message in taps[f"request {role}"].sent.messages],
    }
    bare = [plane for plane, found in messages.items() if not found]
    if bare:
        raise RuntimeError(f"recording messages: nothing was heard on the planes {', '.join(bare)}")
    return Recording(messages, first_hello(messages["ingest"]))


def selections(model: str) -> list[Select | Probe | Renew | Release | AskStatus]:
    """Return what a global router asks a pool."""
    reservation = Reservation("a", WorkerRank("decode-0"))
    return [
        AskStatus(1),
        Select(2, "a", model, "whole", 64, b"\1" * 16, lease_ms=1000),  # type: ignore[arg-type]
        Probe(3, model, "whole", 64, b"\1" * 16),  # type: ignore[arg-type]
        Renew((reservation,)),
        Release(reservation),
    ]


def first_hello(messages: list[Message]) -> Hello:
    """Return the first ``Hello`` among messages to the ingest plane."""
    for message in messages:
        if message[0] == CONTROL_FRAME:
            try:
                decoded = codec.to_consolidator.decode(message[-1])
            except DecodeError:
                continue
            if isinstance(decoded, Hello):
                return decoded
    raise RuntimeError("recording messages: no worker said Hello")


def endpoints(scene: Scene, plane: str) -> list[str]:
    """Return where a plane is; the request plane is every worker's."""
    return scene.pool.request_endpoints if plane == "request" else [scene.pool.endpoint(plane)]


def from_attacker(endpoint: str) -> str:
    """Return the endpoint as ZMQ connects to it from the attacker's address."""
    return endpoint.replace("tcp://", f"tcp://{ATTACKER_HOST}:0;")


def mutating(plane: str) -> Run:
    """Return an attack with mutated messages on a plane."""

    async def run(scene: Scene) -> Outcome:
        # What a global router asks has no recording: there is none in these pools.
        select = [[codec.to_pool.encode(message)] for message in selections(scene.pool.model.name)]
        messages = select if plane == "select" else (await recording(scene)).messages[plane]
        kind = zmq.XSUB if plane == "feed" else zmq.DEALER
        where = [from_attacker(endpoint) for endpoint in endpoints(scene, plane)]
        count = scene.count(MUTATED, 1000)
        sent = await send(Order(kind, where, messages, count, scene.seconds, scene.random.getrandbits(64)))
        if plane == "ingest":
            await asyncio.sleep(LEASE_S)
        return Outcome(f"{sent} mutations of {len(messages)} messages")

    return run


GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL" + bytes(16) + b"\0" + bytes(31)


def ready(kind: bytes) -> bytes:
    """Return the READY command of a socket type."""
    body = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return bytes([COMMAND, len(body)]) + body


KINDS = {"ingest": b"DEALER", "query": b"DEALER", "select": b"DEALER", "request": b"DEALER", "feed": b"SUB"}


async def _raw(endpoint: str, start: bytes, chunk: bytes, size: int, deadline: float) -> tuple[int, bool]:
    """Send bytes past ZMQ's own library; return how many were sent and whether the plane ended the connection."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    sent, ended = 0, False
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(ATTACKER_HOST, 0))

    async def read() -> None:
        nonlocal ended
        try:
            while await reader.read(65_536):
                pass
        except OSError:
            pass
        ended = True

    reading = asyncio.create_task(read())
    try:
        async with asyncio.timeout_at(deadline):
            writer.write(start)
            while sent < size and not ended:
                writer.write(chunk)
                await writer.drain()
                sent += len(chunk)
            await reading
    except (TimeoutError, OSError):
        pass
    finally:
        reading.cancel()
        writer.transport.abort()
    return sent, ended


async def huge(scene: Scene) -> Outcome:
    """One frame of 500 MB for each plane."""
    chunk = bytes(1_000_000)
    size = scene.count(HUGE_BYTES, 100_000_000)
    said = []
    for plane in PLANES:
        (endpoint, *_) = endpoints(scene, plane)
        start = GREETING + ready(KINDS[plane]) + bytes([LONG]) + size.to_bytes(8, "big")
        sent, ended = await _raw(endpoint, start, chunk, size, scene.deadline())
        said.append(f"{plane} {sent / 1e6:.0f} MB{'' if ended else ' taken'}")
    return Outcome(", ".join(said))


async def claimed(scene: Scene) -> Outcome:
    """Frames that claim 2^62 bytes, and connections that never greet, on each plane."""
    deadline = scene.deadline()
    starts: list[Callable[[bytes], bytes]] = [
        lambda kind: GREETING + ready(kind) + bytes([LONG]) + (2**62).to_bytes(8, "big"),
        lambda kind: GREETING + ready(kind) + bytes([COMMAND | LONG]) + (2**62).to_bytes(8, "big"),
        lambda kind: GREETING[:10],
        lambda kind: b"GET / HTTP/1.1\r\n\r\n",
        lambda kind: bytes(64),
        lambda kind: b"\xff" * 64,
    ]
    tasks = []
    for plane in PLANES:
        (endpoint, *_) = endpoints(scene, plane)
        tasks += [
            _raw(endpoint, start(KINDS[plane]), b"", 0, deadline) for start in starts for _ in range(scene.count(20, 2))
        ]
    ends = await asyncio.gather(*tasks)
    return Outcome(f"{sum(ended for _, ended in ends)} of {len(ends)} connections ended by the planes")


async def subscriptions(scene: Scene) -> Outcome:
    """Half a million different subscriptions to the feed, from four connections."""
    endpoint = scene.pool.endpoint("feed")
    count = scene.count(SUBSCRIPTIONS) // 4
    deadline = scene.deadline()

    def frames(connection: int) -> bytes:
        bodies = (b"\x01" + b"%d/%d" % (connection, number) + b"s" * 40 for number in range(count))
        return b"".join(bytes([0, len(body)]) + body for body in bodies)

    start = GREETING + ready(b"SUB")
    ends = await asyncio.gather(*(_raw(endpoint, start + frames(number), b"", 0, deadline) for number in range(4)))
    return Outcome(f"{4 * count} subscriptions, {sum(ended for _, ended in ends)} of 4 connections ended by the feed")


def greet(endpoint: str, hello: Hello, seconds: float) -> int:
    """Join workers at addresses where nobody is, and keep their leases; return how many were greeted."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    deadline = time.monotonic() + seconds
    peers = []
    greeted: set[int] = set()
    try:
        for number, bad in enumerate(BAD_ENDPOINTS):
            peer = context.socket(zmq.DEALER)
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(from_attacker(endpoint))
            card = msgspec.structs.replace(hello.card, request_endpoint=bad)
            forged = msgspec.structs.replace(
                hello, worker_id=f"forged-{number}", epoch=hello.epoch + 1, card=card, next_seq=0, oldest_seq=0
            )
            peers.append((peer, forged))
            peer.send_multipart([CONTROL_FRAME, raw_hello(forged, card)])
        while time.monotonic() < deadline:
            for number, (peer, forged) in enumerate(peers):
                if peer.poll(0):
                    answer = codec.from_consolidator.decode(peer.recv_multipart()[-1])
                    if type(answer).__name__ == "Welcome":
                        greeted.add(number)
                beat = Heartbeat(forged.worker_id, forged.dp_rank, forged.epoch, 0)
                peer.send_multipart([CONTROL_FRAME, codec.to_consolidator.encode(beat)])
            peers[0][0].poll(500)
    finally:
        context.destroy(linger=0)
    return len(greeted)


def raw_hello(hello: Hello, card: WorkerCard) -> bytes:
    """Encode a ``Hello`` past every check of our own."""
    return msgspec.msgpack.encode(msgspec.structs.replace(hello, card=card))


async def forged_hello(scene: Scene) -> Outcome:
    """Workers that say they are where nobody can connect to; meanwhile a good one joins."""
    recorded = await recording(scene)
    pool = scene.pool
    greeting = asyncio.create_task(
        asyncio.to_thread(greet, pool.endpoint("ingest"), recorded.hello, scene.seconds + GREET_S)
    )
    await asyncio.sleep(1.0)
    faults = await _newcomer(scene)
    greeted = await greeting
    return Outcome(f"{greeted} of {len(BAD_ENDPOINTS)} bad addresses welcomed", faults)


async def _newcomer(scene: Scene) -> list[str]:
    """Start a good worker beside the bad ones, which has to be reached as any other; return what went wrong."""
    pool = scene.pool
    ingest = pool.endpoint("ingest")
    role = "decode" if pool.shape.topology == "disaggregated" else "aggregated"
    command = ["worker", *pool.worker_arguments("newcomer", ingest, role=role)]
    newcomer = await Service.start("newcomer", command, scene.directory)
    try:
        await newcomer.wait_ready()

        async def reached() -> bool:
            return any(
                row["worker_id"] == "newcomer" and row["state"] == "ready" for row in await pool.workers(pool.url)
            )

        await until("a good worker that joins beside them is reached", reached, JOIN_TIMEOUT_S)
    except TimeoutError as error:
        return [str(error)]
    finally:
        await newcomer.stop()
    return []


async def _started(guest: Service) -> None:
    try:
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            await guest.wait_ready()
    except PoolFailed:
        await guest.process.wait()
    except TimeoutError:
        pass


async def misconfigured(scene: Scene) -> Outcome:
    """Real workers whose ``--advertise-host`` is none."""
    pool = scene.pool
    ingest = pool.endpoint("ingest")
    role = "decode" if pool.shape.topology == "disaggregated" else "aggregated"
    guests = [
        await Service.start(
            f"misconfigured-{number}",
            [
                "worker",
                *pool.worker_arguments(f"misconfigured-{number}", ingest, "--advertise-host", host, role=role),
            ],
            scene.directory,
        )
        for number, host in enumerate(MISCONFIGURED_HOSTS)
        if host
    ]
    try:
        # Ready, ended, or neither: one that the consolidator does not take goes on asking.
        await asyncio.gather(*(_started(guest) for guest in guests))
        refused = sum(guest.process.returncode is not None for guest in guests)
        faults = await _newcomer(scene)
    finally:
        await asyncio.gather(*(guest.stop() for guest in guests))
    return Outcome(f"{refused} of {len(guests)} refused at the start", faults)


PART = Part(
    "frames",
    "ZMQ planes without CURVE",
    (
        *(
            Attack(
                f"mutated frames, {plane}",
                f"Sends 60,000 mutations of recorded messages to the {plane} plane"
                f"{' of every worker, KV fetches among them' if plane == 'request' else ''}.",
                mutating(plane),
                DISAGGREGATED if plane == "request" else OWN,
                # Workers that a mutation invented leave when nobody renews their leases.
                expiries_max=MUTATED if plane == "ingest" else 0,
                short=plane == "select",
            )
            for plane in PLANES
        ),
        Attack("huge frames", "Sends one frame of 500 MB to each plane.", huge, OWN, short=False),
        Attack(
            "claimed frames", "Announces frames of 2^62 bytes, or sends a wrong greeting, on each plane.", claimed, OWN
        ),
        Attack("subscriptions", "Subscribes half a million times to the feed.", subscriptions, OWN, short=False),
        Attack(
            "forged workers",
            "Registers workers with invalid addresses while a valid one joins.",
            forged_hello,
            OWN,
            judge_latency=False,
            expiries_max=len(BAD_ENDPOINTS),
            short=False,
        ),
        Attack(
            "misconfigured workers",
            "Starts workers with an invalid `--advertise-host` while a valid one joins.",
            misconfigured,
            OWN,
            judge_latency=False,
            expiries_max=len(MISCONFIGURED_HOSTS),
            short=False,
        ),
        Attack(
            "crossing identifiers",
            "Uses request ids derived from another tenant's.",
            identifiers.crossing,
            Shape("disaggregated", router=("--legs", "expected-time")),
            judge_latency=False,
            short=False,
        ),
    ),
)
