"""What a seed means: machines, settings, load and the faults that will happen, drawn once, before anything runs.

A profile says what kind of trouble there is. ``calm`` has none, ``pauses`` processes that stand still and slow disks;
both are strict: every request must succeed. ``stalls`` has the same among crashes and broken connections.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Literal

from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.identifiers import Role
from poolgrid.kernel.wire.requests import Sampling
from tests.fault_simulation.jetstream import StreamFaults
from tests.fault_simulation.network import Faults

PROFILES = (
    "calm",
    "lossy-network",
    "crashes",
    "disk",
    "slow-readers",
    "disaggregated",
    "pools",
    "everything",
    "pauses",
    "stalls",
    "streams",
    "full",
)

STRICT = ("calm", "pauses")
"""Profiles under which nothing may go wrong for any client."""

LONG_PAUSED = ("pauses", "stalls")
"""Profiles with pauses of ``LONG_PAUSES_S`` and slow disks."""

LONG_PAUSES_S = (1.5, 4.0, 8.0, 30.0)
"""A lease and a link time out within a second here, a peer within two."""

CONSOLIDATORS = 2
"""Of a pool whose journal is in a stream: one is active, the other one stands by."""

MODEL = "m"
VOCABULARY_SIZE = 500
START_S = 0.3
"""When the first clients may come; now and then before all workers have joined."""
CALM_START_S = 1.5
"""When nothing may go wrong, everybody is there by then."""

FaultKind = Literal[
    "crash",
    "power-failure",
    "drain",
    "join",
    "remove",
    "partition",
    "break",
    "pause",
    "clock-jump",
    "disk-full",
    "sync-fails",
    "slow-write",
    "slow-disk",
    "silence",
    "leaderless",
    "full",
]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to a machine, or between two."""

    at_s: float
    kind: FaultKind
    target: str
    other: str = ""
    for_s: float = 0.0
    amount_ms: int = 0

    def __str__(self) -> str:
        parts = [self.kind, self.target]
        if self.other:
            parts.append(self.other)
        if self.for_s:
            parts.append(f"for {1000 * self.for_s:.0f} ms")
        if self.amount_ms:
            parts.append(f"by {self.amount_ms} ms")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker machine."""

    name: str
    pool: str
    role: Role
    total_kv_blocks: int
    host_kv_blocks: int
    max_batch_size: int
    speedup: float
    same_port: bool
    """A restarted worker answers where the one before did."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool: its routers, its consolidator, its workers."""

    name: str
    routers: tuple[str, ...]
    embedded: bool
    """The consolidator lives in the (only) router's process."""
    workers: tuple[WorkerPlan, ...]
    journal: Literal["memory", "disk", "stream"]
    fsync: Literal["interval", "always", "never"]


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One client's request."""

    request_id: str
    at_s: float
    entrance: int
    """Which of the routers (or the global router) the client asks."""
    token_ids: bytes
    sampling: Sampling
    cancel_after_tokens: int | None = None
    cancel_after_s: float | None = None
    attempt: int = 0
    """Of a probe: how often it was refused before."""
    read_whole: bool = False
    """Whether its workers may send tokens of several steps together."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a seed decides ahead of the run."""

    seed: int
    profile: str
    pools: tuple[PoolPlan, ...]
    global_router: bool
    mode: Literal["aggregated", "disagg"]
    block_size: int
    eos_probability: float
    answer_tokens: float
    """Mean length of answers that end by themselves; 0 = none does."""
    local_prefill_max_tokens: int
    requests: tuple[RequestPlan, ...]
    faults: tuple[Fault, ...]
    network: Faults
    ends_s: float
    """When the last fault is over and everything is mended."""
    outbox_bytes: int
    memory_journal_bytes: int
    snapshot_every_records: int
    queue_limit: int
    worker_queue_factor: float
    restart_s: float
    stream: StreamFaults = StreamFaults()
    """What goes wrong with streams, beside ``faults``."""

    @property
    def strict(self) -> bool:
        """Say whether nothing may go wrong for any client."""
        return self.profile in STRICT

    def workers(self) -> list[WorkerPlan]:
        """Return the workers of all pools."""
        return [worker for pool in self.pools for worker in pool.workers]


@dataclass(slots=True)
class _Mix:
    """How likely each kind of fault is, and how many there are."""

    count: tuple[int, int]
    kinds: dict[FaultKind, int] = field(default_factory=dict)


_MIXES: dict[str, _Mix] = {
    "calm": _Mix((0, 0)),
    "pauses": _Mix((0, 0)),
    "stalls": _Mix((0, 3), {"crash": 4, "break": 3, "partition": 1, "power-failure": 1, "clock-jump": 1}),
    "lossy-network": _Mix((1, 5), {"partition": 3, "break": 4}),
    "crashes": _Mix((2, 6), {"crash": 8, "drain": 2, "join": 2, "remove": 1, "clock-jump": 1, "break": 1, "pause": 1}),
    "disk": _Mix((2, 6), {"power-failure": 6, "disk-full": 4, "sync-fails": 2, "crash": 2}),
    "slow-readers": _Mix((2, 6), {"pause": 6, "break": 1, "crash": 1}),
    "disaggregated": _Mix((0, 5), {"crash": 4, "drain": 1, "break": 2, "partition": 2, "pause": 1}),
    "pools": _Mix((0, 5), {"crash": 4, "drain": 1, "break": 2, "partition": 2, "pause": 1}),
    "streams": _Mix(
        (2, 7),
        {
            "crash": 5,
            "power-failure": 3,
            "leaderless": 2,
            "slow-disk": 1,
            "partition": 4,
            "break": 3,
            "pause": 4,
            "clock-jump": 1,
            "drain": 1,
        },
    ),
    "full": _Mix((2, 8), {"full": 8, "crash": 2, "drain": 1, "break": 1}),
    "everything": _Mix(
        (3, 9),
        {
            "crash": 5,
            "power-failure": 2,
            "drain": 1,
            "join": 1,
            "remove": 1,
            "partition": 3,
            "break": 3,
            "pause": 2,
            "clock-jump": 2,
            "disk-full": 2,
            "sync-fails": 1,
        },
    ),
}


def make_scenario(seed: int, profile: str | None = None) -> Scenario:
    """Return the scenario of a seed; without a profile the seed chooses that too."""
    rng = Random(f"{seed}/scenario")
    drawn = rng.choice(PROFILES)
    profile = profile or drawn
    if profile not in PROFILES:
        raise ValueError(f"making a scenario: the profile is {profile!r}, allowed are {', '.join(PROFILES)}")
    rng = Random(f"{seed}/{profile}")
    disaggregated = profile == "disaggregated" or (
        profile in ("pools", "everything", "pauses", "stalls", "streams", "full") and rng.random() < 0.5
    )
    global_router = profile == "pools" or (profile in ("everything", "stalls", "full") and rng.random() < 0.3)
    block_size = rng.choice((4, 8, 16))
    pools = _pools(rng, profile, disaggregated, global_router)
    entrances = len(pools[0].routers)
    if global_router:
        # Pools that can serve whole requests have clients of their own, too.
        entrances = 1 if disaggregated else 1 + len(pools)
    span_s = rng.choice((1.0, 2.0, 4.0))
    requests = _requests(
        rng, rng.randint(4, 12 if profile in LONG_PAUSED else 24), span_s, entrances, block_size, profile
    )
    ends_s = span_s + 1.0 + (CALM_START_S - START_S if profile in STRICT else 0.0)
    if profile == "streams":
        ends_s += 2.0  # a lease ends, another consolidator begins, and something happens to that one
    faults = _faults(rng, profile, pools, global_router, ends_s)
    if profile in LONG_PAUSED:
        faults += _long_pauses(rng, profile, pools, global_router, ends_s)
        ends_s = max([ends_s, *(fault.at_s + fault.for_s for fault in faults)]) + 0.5
    return Scenario(
        seed=seed,
        profile=profile,
        pools=pools,
        global_router=global_router,
        mode="disagg" if disaggregated else "aggregated",
        block_size=block_size,
        eos_probability=rng.choice((0.0, 0.02)),
        # By a hand of its own: seeds that are known for what they do keep doing it.
        answer_tokens=Random(f"{seed}/answers").choice((0.0, 0.0, 12.0)),
        local_prefill_max_tokens=rng.choice((0, 0, 16)),
        requests=requests,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        network=_network(rng, profile),
        ends_s=ends_s,
        outbox_bytes=64 * 1024,
        memory_journal_bytes=rng.choice((2_000, 20_000, 10_000_000)),
        snapshot_every_records=rng.choice((10, 40, 10_000)),
        queue_limit=rng.choice((2, 100)) if profile not in STRICT else 100,
        worker_queue_factor=rng.choice((0.5, 1.0, 2.0)),
        restart_s=rng.choice((0.05, 0.3, 1.5)),
        stream=_stream_faults(rng) if profile == "streams" else StreamFaults(),
    )


def _stream_faults(rng: Random) -> StreamFaults:
    """Return what goes wrong between a pool and NATS."""

    def some(*shares: float) -> float:
        return rng.choice((0.0, 0.0, *shares))

    return StreamFaults(
        refused=some(0.02, 0.1),
        lost=some(0.02, 0.1),
        late=some(0.05, 0.2),
        unanswered=some(0.02, 0.1),
        doubled=some(0.05, 0.3),
        untold=some(0.05, 0.3),
        told_twice=some(0.1),
        told_late=some(0.1, 0.4),
        lagging=some(0.1, 0.5),
        slow=some(0.05),
        sync_s=rng.choice((0.0, 0.3, 1.0, 120.0)),
    )


def _pools(rng: Random, profile: str, disaggregated: bool, global_router: bool) -> tuple[PoolPlan, ...]:
    pools: list[PoolPlan] = []
    names: tuple[str, ...]
    if global_router:
        names = ("prefill-a", "prefill-b", "decode-a", "decode-b") if disaggregated else ("a", "b")
        if disaggregated and rng.random() < 0.5:
            names = ("prefill-a", "decode-a")
    else:
        names = ("pool",)
    for name in names:
        if not disaggregated:
            roles = [Role.AGGREGATED] * rng.randint(1, 2 if global_router else 4)
        elif name.startswith("prefill"):
            roles = [Role.PREFILL] * rng.randint(1, 2)
        elif name.startswith("decode"):
            roles = [Role.DECODE] * rng.randint(1, 2)
        else:
            roles = [Role.PREFILL] * rng.randint(1, 2) + [Role.DECODE] * rng.randint(1, 2)
            if rng.random() < 0.2:
                roles.append(Role.AGGREGATED)
        routers = 1 if global_router else rng.choice((1, 1, 2))
        streamed = profile == "streams"
        embedded = routers == 1 and rng.random() < 0.4 and not streamed
        on_disk = profile in ("disk", "pauses") or (profile != "calm" and rng.random() < 0.5)
        pools.append(
            PoolPlan(
                name,
                tuple(f"{name}.router{number}" for number in range(routers)),
                embedded,
                tuple(
                    WorkerPlan(
                        name=f"{name}.worker{number}",
                        pool=name,
                        role=role,
                        total_kv_blocks=rng.choice((24, 40, 80)),
                        host_kv_blocks=rng.choice((0, 0, 16)),
                        max_batch_size=rng.choice((2, 4)),
                        # Slow ones are still at it when a long pause is over.
                        speedup=rng.choice((0.1, 0.5, 3.0) if profile in LONG_PAUSED else (0.5, 1.0, 3.0)),
                        same_port=rng.random() < 0.5,
                    )
                    for number, role in enumerate(roles)
                ),
                "stream" if streamed else "disk" if on_disk else "memory",
                rng.choice(("interval", "interval", "always", "never")),
            )
        )
    return tuple(pools)


def _requests(
    rng: Random, count: int, span_s: float, entrances: int, block_size: int, profile: str
) -> tuple[RequestPlan, ...]:
    def tokens(number: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY_SIZE) for _ in range(number)]

    shared = [tokens(block_size * rng.randint(1, 5)) for _ in range(3)]
    cancels = (0.0 if rng.random() < 0.5 else 0.2) if profile in STRICT else rng.choice((0.1, 0.4))
    plans: list[RequestPlan] = []
    for number in range(count):
        prompt = [*(rng.choice(shared) if rng.random() < 0.8 else []), *tokens(rng.randint(1, 3 * block_size))]
        osl = rng.randint(1, 24)
        cancel = rng.random() < cancels
        by_tokens = cancel and rng.random() < 0.6
        plans.append(
            RequestPlan(
                request_id=f"r{number}",
                at_s=(CALM_START_S if profile in STRICT else START_S) + rng.random() * span_s,
                entrance=rng.choice((0, rng.randrange(entrances))),
                token_ids=pack_tokens(prompt),
                sampling=Sampling(max_tokens=osl, seed=rng.choice((None, number))),
                cancel_after_tokens=rng.randint(1, osl) if by_tokens else None,
                cancel_after_s=rng.uniform(0.0, rng.choice((0.3, 1.5))) if cancel and not by_tokens else None,
                read_whole=number % 3 == 0,
            )
        )
    return tuple(plans)


def _faults(
    rng: Random, profile: str, pools: tuple[PoolPlan, ...], global_router: bool, ends_s: float
) -> tuple[Fault, ...]:
    mix = _MIXES[profile]
    if not mix.kinds:
        return ()
    kinds = [kind for kind, weight in mix.kinds.items() for _ in range(weight)]
    workers = [worker.name for pool in pools for worker in pool.workers]
    routers = [router for pool in pools for router in pool.routers]
    stores = [pool.routers[0] if pool.embedded else f"{pool.name}.consolidator" for pool in pools]
    servers = [f"{pool.name}.nats" for pool in pools if pool.journal == "stream"]
    if servers:
        # What is new with streams is who writes them.
        stores = [f"{pool.name}.consolidator{number}" for pool in pools for number in range(CONSOLIDATORS)]
        stores = [*stores, *stores]
    everyone = [*workers, *workers, *routers, *stores, *(["global"] if global_router else [])]

    def talks_to(name: str) -> list[str]:
        """Return whom a machine has connections with."""
        if servers:
            return [*workers, *routers, *stores, *servers * 4] if name not in servers else [*stores, *everyone]
        if name == "global":
            return [*workers, *routers]
        pool = next(pool for pool in pools if name.startswith(f"{pool.name}."))
        own = [worker.name for worker in pool.workers]
        if name in own:
            # Prefill workers hand KV over to decode workers, wherever those are.
            others = [worker for worker in workers if worker != name]
            return [*pool.routers, stores[pools.index(pool)], *others, *(["global"] if global_router else [])]
        peers = [*own, stores[pools.index(pool)], *pool.routers, *(["global"] if global_router else [])]
        return [peer for peer in peers if peer != name]

    faults: list[Fault] = []
    removed: set[str] = set()
    for _ in range(rng.randint(*mix.count)):
        at_s = 0.2 + rng.random() * (ends_s - 0.4)
        left_s = ends_s - at_s
        kind = rng.choice(kinds)
        target = rng.choice(everyone)
        other, for_s, amount_ms = "", 0.0, 0
        if kind in ("drain", "join", "remove"):
            target = rng.choice(workers)
            if kind == "remove":
                plan = next(worker for pool in pools for worker in pool.workers if worker.name == target)
                alike = [
                    worker.name
                    for pool in pools
                    for worker in pool.workers
                    if (worker.pool, worker.role) == (plan.pool, plan.role) and worker.name not in removed
                ]
                if len(alike) < 2:
                    continue
                removed.add(target)
        elif kind in ("leaderless", "slow-disk") or (servers and kind == "power-failure"):
            target = rng.choice(servers)
            for_s = min(left_s, rng.choice((0.3, 1.0, 2.5))) if kind != "power-failure" else 0.0
            amount_ms = rng.choice((20, 200)) if kind == "slow-disk" else 0
        elif kind in ("power-failure", "disk-full", "sync-fails"):
            target = rng.choice(stores)
            for_s = min(left_s, rng.choice((0.1, 0.6, 2.0))) if kind != "power-failure" else 0.0
        elif kind in ("partition", "break"):
            if servers and rng.random() < 0.6:
                target = rng.choice(servers)
            other = rng.choice([each for each in talks_to(target) if each != target])
            for_s = min(left_s, rng.choice((0.1, 0.7, 1.5, 3.0))) if kind == "partition" else 0.0
        elif kind == "pause":
            # Longer than a lease: another one takes over, and then this one goes on.
            for_s = min(left_s, rng.choice((0.4, 1.5, 3.0) if servers else (0.05, 0.4, 1.5)))
        elif kind == "full":
            target = rng.choice(workers)
            for_s = min(left_s, rng.choice((0.1, 0.7, 2.0)))
            amount_ms = rng.choice((0, 50, 400, 3_000))
        elif kind == "clock-jump":
            amount_ms = rng.choice((-3_600_000, -5_000, 5_000, 3_600_000))
        faults.append(Fault(at_s, kind, target, other, for_s, amount_ms))
        if kind == "crash" and target in workers and rng.random() < 0.4:
            # A router that sleeps over a worker's death and return learns of both in one turn.
            router = rng.choice([name for name in talks_to(target) if name in routers])
            faults.append(Fault(at_s, "pause", router, for_s=min(left_s, rng.choice((0.4, 1.2)))))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _long_pauses(
    rng: Random, profile: str, pools: tuple[PoolPlan, ...], global_router: bool, ends_s: float
) -> tuple[Fault, ...]:
    """Return processes that stand still for up to half a minute, and disks that are slow."""
    stores = [pool.routers[0] if pool.embedded else f"{pool.name}.consolidator" for pool in pools]
    routers = [router for pool in pools for router in pool.routers]
    workers = [
        worker.name
        for pool in pools
        for worker in pool.workers
        if profile not in STRICT or sum(worker.role is other.role for other in pool.workers) > 1
    ]
    begin_s = CALM_START_S if profile in STRICT else START_S
    # One worker, and in a strict run one of several: a request for which nobody is left is refused, rightly.
    someone = [*routers, *stores, *(["global"] if global_router else [])]
    paused = [rng.choice(someone) for _ in range(rng.randint(0, 2))]
    if workers and rng.random() < 0.6:
        paused.append(rng.choice(workers))
    faults = [
        Fault(begin_s + rng.random() * (ends_s - begin_s), "pause", target, for_s=rng.choice(LONG_PAUSES_S))
        for target in paused
    ]
    for _ in range(rng.randint(0, 2)):
        at_s = begin_s + rng.random() * (ends_s - begin_s)
        if rng.random() < 0.6:
            faults.append(Fault(at_s, "slow-write", rng.choice(stores), amount_ms=rng.choice((500, 4000, 8000))))
        else:
            slow_ms = rng.choice((200, 1000))
            faults.append(Fault(at_s, "slow-disk", rng.choice(stores), for_s=rng.choice((1.0, 5.0)), amount_ms=slow_ms))
    apart = [pool for pool in pools if not pool.embedded]
    if workers and apart and rng.random() < 0.3:
        # Its signs of life do not reach the consolidator, its tokens do reach the router.
        pool = rng.choice(apart)
        silent = [worker.name for worker in pool.workers if worker.name in workers]
        if silent and not any(fault.target in workers for fault in faults):
            faults.append(
                Fault(
                    begin_s + rng.random(),
                    "silence",
                    rng.choice(silent),
                    f"{pool.name}.consolidator",
                    rng.choice((1.5, 4.0)),
                )
            )
    return tuple(faults)


def _network(rng: Random, profile: str) -> Faults:
    if profile in ("calm", "disk", "pauses"):
        return Faults()
    if profile == "slow-readers":
        return Faults(slow=0.05, queue_max=rng.choice((4, 16, 64)))
    if profile == "lossy-network":
        return Faults(
            loss=rng.choice((0.0, 0.02, 0.1, 0.3)),
            duplicate=rng.choice((0.0, 0.05, 0.2)),
            overtake=rng.choice((0.0, 0.05, 0.2)),
            slow=rng.choice((0.0, 0.05)),
            delay_max_s=rng.choice((0.001, 0.01, 0.05)),
        )
    if profile == "pools" and rng.random() < 0.5:
        return Faults(loss=rng.choice((0.05, 0.15)), delay_max_s=0.01)
    if rng.random() < 0.5:
        return Faults(delay_max_s=rng.choice((0.001, 0.01)))
    return Faults(
        loss=rng.choice((0.0, 0.02)), duplicate=rng.choice((0.0, 0.05)), overtake=rng.choice((0.0, 0.05)), slow=0.02
    )
