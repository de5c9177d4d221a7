"""A check from its first question to its evidence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

from poolgrid.plugins.engine_check.core.evidence import Evidence, ProbeExchange, ServerStatement, Source
from poolgrid.plugins.engine_check.core.probe_plan import PlanLimits, plan
from poolgrid.plugins.engine_check.core.transfer_rules import transfer_totals
from poolgrid.plugins.engine_check.listening import Listener
from poolgrid.plugins.engine_check.server import EngineServer
from poolgrid.plugins.engine_check.settings import AUTO, EngineCheckSettings
from poolgrid.server.process.clock import Clock
from poolgrid.server.workers.engines.registry import server_kinds
from poolgrid.server.workers.engines.server.core.server_facts import ServerFacts
from poolgrid.server.workers.engines.server.server_client import ServerError

SALT = "engine-check"
"""What salted probes are sent under."""

BLOCK_SIZE_ASSUMED = 16
"""For the length of the first probes, where neither the server nor an option sets it; vLLM's default."""

SETTLE_MS = 300
"""The events of a probe are complete when none came for so long."""

REPLAYED_BEFORE = 4
"""How many messages before the first received one are requested too: they show that the replay goes back."""


def told_by(facts: ServerFacts, settings: EngineCheckSettings) -> ServerStatement:
    """Return the start of a check: the server's facts, with options in their place."""
    listed = any(source.endpoint for source in facts.sources)
    return ServerStatement(
        facts.kind if settings.engine == AUTO else settings.engine,
        facts.model,
        facts.version,
        settings.kv_block_size or facts.block_size,
        max(facts.ranks, len(settings.kv_events_endpoint)),
        True if listed else False if facts.events_missing else None,
        kind.events_option if (kind := server_kinds().get(facts.kind)) is not None else "",
    )


def sources_of(facts: ServerFacts, settings: EngineCheckSettings) -> list[Source]:
    """Return where to listen: by the options, else by the server."""
    if not settings.kv_events_endpoint:
        return [
            Source(each.dp_rank, each.endpoint, each.replay_endpoint, each.topic, each.doubt)
            for each in facts.sources
            if each.endpoint
        ]
    replays = settings.kv_events_replay_endpoint or ("",) * len(settings.kv_events_endpoint)
    return [
        Source(rank, endpoint, replay)
        for rank, (endpoint, replay) in enumerate(zip(settings.kv_events_endpoint, replays, strict=True))
    ]


async def gather_evidence(
    settings: EngineCheckSettings,
    server: EngineServer,
    context: zmq.Context[Any],
    clock: Clock,
    tell: Callable[[str], None],
) -> Evidence:
    """Ask, listen, probe; raises ``ServerError`` when the server cannot be asked, ``zmq.ZMQError`` for an endpoint.

    ``tell`` is called with what happens now.
    """
    facts = await server.learn(settings.engine, settings.model)
    told, sources = told_by(facts, settings), sources_of(facts, settings)
    if not sources and facts.drained_events:
        raise ServerError(
            f"its events are handed out at {facts.drained_events} to one reader, from whom a check would take them; "
            "what it publishes over ZMQ can be checked, give --kv-events-endpoint"
        )
    limits = PlanLimits(
        seed=f"{clock.wall_ms()}",
        block_size=told.block_size or BLOCK_SIZE_ASSUMED,
        salt=SALT,
        lora=settings.lora,
        ranks=tuple(range(told.ranks)) if told.ranks > 1 else (None,),
    )
    listener = Listener(context, sources, clock)
    try:
        tell("connecting to the publishers")
        await listener.open()
        # ZMQ tells a subscriber that it is connected, not that the publisher has taken note of the subscription.
        await listener.settle(SETTLE_MS)
        exchanges = await _probe(limits, settings, server, told, listener, clock, tell)
        tell("asking for replays")
        replays = [
            await listener.replay(source, _first_heard(listener, source.rank))
            for source in sources
            if source.replay_endpoint
        ]
    finally:
        listener.close()
    return Evidence(
        told,
        tuple(sources),
        listener.contacts,
        tuple(exchanges),
        tuple(listener.heard),
        tuple(replays),
        transfers=transfer_totals(await server.metrics_page()),
    )


async def _probe(
    limits: PlanLimits,
    settings: EngineCheckSettings,
    server: EngineServer,
    told: ServerStatement,
    listener: Listener,
    clock: Clock,
    tell: Callable[[str], None],
) -> list[ProbeExchange]:
    exchanges: dict[str, ProbeExchange] = {}
    for name, make in plan(limits):
        first = exchanges.get("first")
        if first is not None and first.failure:
            break  # every other would fail likewise
        probe = make(exchanges)
        if probe is None:
            continue
        tell(f"probe {name!r}")
        before = len(listener.heard)
        answer = await server.probe(probe, told)
        ended_ms = clock.monotonic_ms()
        await listener.settle(SETTLE_MS)
        exchanges[name] = ProbeExchange(
            probe,
            before,
            len(listener.heard),
            answer.output,
            answer.cached_tokens,
            ended_ms if not answer.failure else 0.0,
            answer.failure,
            answer.prompt_tokens,
        )
    return list(exchanges.values())


def _first_heard(listener: Listener, rank: int) -> int:
    for heard in listener.heard:
        if heard.rank == rank and len(heard.message) >= 2 and len(heard.message[-2]) == 8:
            return max(0, int.from_bytes(heard.message[-2], "big") - REPLAYED_BEFORE)
    return 0
