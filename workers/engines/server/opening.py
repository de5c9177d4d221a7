"""Opens an engine server as the engine of a worker: asked what it is, followed, and described by a card."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec

from poolgrid.kernel.wire.addresses import bracketed, ip_endpoint_problem
from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.identifiers import Role
from poolgrid.kernel.wire.limits import PROMPT_TOKENS_MAX, TEXT_CHARS_MAX
from poolgrid.server.http.http_client import HttpTarget
from poolgrid.server.transport.security import is_loopback
from poolgrid.server.workers.engines.definition import EngineHost, OpenedEngine
from poolgrid.server.workers.engines.root_seeds import RootSeeds
from poolgrid.server.workers.engines.server.cache_events import CacheEvents, DrainedEvents, FollowedEvents
from poolgrid.server.workers.engines.server.core.server_facts import (
    EventSource,
    ModelList,
    ServerFacts,
    adapters_of,
    aliases_of,
    choose_model,
)
from poolgrid.server.workers.engines.server.engine import ServerEngine
from poolgrid.server.workers.engines.server.kinds import MODELS, ServerKind, kind_of, learn
from poolgrid.server.workers.engines.server.server_client import KeyRefused, ServerClient, ServerError
from poolgrid.server.workers.engines.server.settings import EngineServerSettings
from poolgrid.server.workers.engines.server.started_server import StartedServer, start_server

log = logging.getLogger(__name__)

ASSUMED_BLOCK_SIZE = 16
"""Tokens of a block in the books about a server that reports no size: the smallest usual one, so that a beginning that
two prompts share counts to 16 tokens. Its cache events, which count in its own blocks, are then not followed."""

ASK_AGAIN_S = 1.0
"""Time between two questions to a server that is not there yet: loading a model takes minutes."""


@asynccontextmanager
async def open_server(
    settings: EngineServerSettings, around: EngineHost, kinds: Mapping[str, ServerKind]
) -> AsyncIterator[OpenedEngine]:
    """Ask a server that runs, or that is about to, or start one; waits for it until cancelled.

    It is of the only kind, or of the one that it looks like, each time that it is asked.

    Raises ``ValueError`` naming an option that the server contradicts, ``ServerEnded`` when its own server does not
    start.
    """
    if not settings.starts_server:
        async with _asked(settings, around, kinds, None) as opened:
            yield opened
        return
    (kind,) = kinds.values()
    async with (
        start_server(settings, around, kind) as server,
        _asked(server.settings, around, kinds, server) as opened,
    ):
        yield opened


@asynccontextmanager
async def _asked(
    settings: EngineServerSettings,
    around: EngineHost,
    kinds: Mapping[str, ServerKind],
    server: StartedServer | None,
) -> AsyncIterator[OpenedEngine]:
    client = ServerClient(settings.server_url, around.clock, settings.engine_api_key)
    try:
        facts = await _first_facts(client, kinds, settings, around.say_start)
        kind = _kind_of(facts, kinds)
        facts = completed(facts, settings, kind)
        assert facts.block_size is not None, "completed has seen to it"
        events = CacheEvents()

        def tell_fault(fault: str) -> None:
            served.note(fault)

        if not settings.follow_events:
            log.warning("the cache events of %s are not followed (follow_events)", client.target.url)
        elif facts.events_missing:
            log.warning(
                "the cache events of %s cannot be followed: %s. Routers know of it what they sent; give them --policy "
                "approximate",
                client.target.url,
                facts.events_missing,
            )
        elif facts.drained_events and kind.parse_drained is not None:
            events = DrainedEvents(
                client, facts.drained_events, kind.parse_drained, facts.block_size, facts.kept_events_max
            )
        else:
            events = FollowedEvents(
                facts.sources,
                facts.block_size,
                around.context,
                around.awake,
                roots=None if kind.names_salts else RootSeeds(facts.block_size, digest_is_known=True),
                total_blocks=facts.total_blocks or 0,
                on_fault=tell_fault,
                drafts=facts.drafts,
            )

        async def confirm(all_facts: bool) -> str:
            listed = await client.ask_for(MODELS, ModelList)
            try:
                model = choose_model(listed, facts.model)
            except ValueError as error:
                if settings.served_model_name:
                    raise
                return str(error)
            again = replace(facts, loras=adapters_of(listed, model), aliases=aliases_of(listed, model))
            if len(kinds) > 1:
                again = replace(again, kind=kind_of(model, kinds).name)
            if all_facts and again.kind == facts.kind:
                again = completed(await kind.ask(client, listed, model), settings, kind)
            difference = again.differs_from(facts)
            if not difference:
                served.follow(again.loras, again.aliases)
            return difference

        def about() -> dict[str, object]:
            known = {"url": client.target.url, "kind": facts.kind, "version": facts.version}
            own = {} if server is None else {"process": server.describe()}
            return {**known, "model_path": facts.model_path, **own}

        engine = ServerEngine(
            client,
            facts.ranks,
            facts.block_size,
            facts.total_blocks or 0,
            settings,
            events,
            confirm,
            about,
            around.awake,
            around.metrics,
            server,
            kind.health_path,
            kind.figures,
        )
        around.metrics.engine_healthy.set(1)
        try:
            card = make_card(settings, facts, kind, around.request_port, around.http_port, server is not None)
            if facts.sources and facts.events_missing:
                card = msgspec.structs.replace(card, cache_events_fault=facts.events_missing[:TEXT_CHARS_MAX])
            served = _ShownCard(card)
            yield OpenedEngine(
                engine,
                card,
                observe_card=served.observe,
                until_known=engine.until_known,
                forward_books=engine.books,
            )
        finally:
            await engine.close()
    finally:
        client.close()


class _ShownCard:
    """The card of a worker, whose server loads and unloads adapters, and whose events may turn out not to fit it."""

    def __init__(self, card: WorkerCard) -> None:
        self._card = card
        self._changed: Callable[[WorkerCard], None] = lambda card: None

    def observe(self, changed: Callable[[WorkerCard], None]) -> None:
        self._changed = changed

    def follow(self, loras: tuple[str, ...], aliases: tuple[str, ...]) -> None:
        """Take note of what the server lists now."""
        card = msgspec.structs.replace(self._card, loras=loras, aliases=aliases)
        if card == self._card:
            return
        log.warning(
            "the server serves other names: adapters %s (before: %s), aliases %s (before: %s)",
            ", ".join(loras) or "none",
            ", ".join(self._card.loras) or "none",
            ", ".join(aliases) or "none",
            ", ".join(self._card.aliases) or "none",
        )
        self._show(card)

    def note(self, fault: str) -> None:
        """Take note of what the server's events do not fit."""
        card = msgspec.structs.replace(self._card, cache_events_fault=fault[:TEXT_CHARS_MAX])
        if card != self._card:
            self._show(card)

    def _show(self, card: WorkerCard) -> None:
        self._card = card
        self._changed(card)


def _kind_of(facts: ServerFacts, kinds: Mapping[str, ServerKind]) -> ServerKind:
    return next(each for each in kinds.values() if each.name == facts.kind)


async def _first_facts(
    client: ServerClient,
    kinds: Mapping[str, ServerKind],
    settings: EngineServerSettings,
    say_start: Callable[[str], None],
) -> ServerFacts:
    """Ask until the server answers."""
    said = ""
    wanted = next(iter(kinds)) if len(kinds) == 1 else ""
    while True:
        try:
            return await learn(client, kinds, wanted, settings.served_model_name)
        except KeyRefused as error:
            raise ValueError(str(error)) from None
        except (ServerError, DecodeError) as error:
            if str(error) != said:
                said = str(error)
                log.warning("waiting for the engine server: %s", said)
                say_start(f"waiting for the engine server: {said}")
        await asyncio.sleep(ASK_AGAIN_S)


def completed(facts: ServerFacts, settings: EngineServerSettings, kind: ServerKind) -> ServerFacts:
    """Return a server's facts, completed by options.

    Raises ``ValueError`` for a role that is not the server's, and for ranks that cannot be chosen.
    """
    if kind.chooses_rank and len(settings.kv_events_endpoint) > 1:
        raise ValueError(
            f"kv_events_endpoint is given {len(settings.kv_events_endpoint)} times, and {kind.title} at "
            f"{settings.server_url} chooses the rank of a request itself: the events of several ranks cannot be "
            "followed, leave the option out"
        )
    facts = replace(
        facts,
        block_size=settings.kv_block_size or facts.block_size,
        ranks=settings.data_parallel_size or len(settings.kv_events_endpoint) or facts.ranks,
    )
    if settings.kv_events_endpoint:
        replays = settings.kv_events_replay_endpoint or ("",) * len(settings.kv_events_endpoint)
        facts = replace(
            facts,
            sources=tuple(
                EventSource(number, endpoint, replay)
                for number, endpoint, replay in zip(facts.numbers, settings.kv_events_endpoint, replays, strict=True)
            ),
            events_missing="",
            drained_events="",
        )
    elif not facts.events_missing and not facts.drained_events and len(facts.sources) != facts.ranks:
        facts = replace(
            facts,
            events_missing=f"{len(facts.sources)} publishers are known and {facts.ranks} ranks: give "
            "kv_events_endpoint for each rank",
        )
    if facts.role and facts.role != settings.role:
        raise ValueError(
            f"role is {settings.role!r}, and {kind.title} at {settings.server_url} was started for {facts.role!r}: "
            f"give role {facts.role}, or start it for the other"
        )
    if facts.block_size is None:
        facts = replace(
            facts,
            block_size=ASSUMED_BLOCK_SIZE,
            sources=(),
            drained_events="",
            events_missing=facts.events_missing or "it does not report its block size: give kv_block_size",
        )
    return facts


def make_card(
    settings: EngineServerSettings,
    facts: ServerFacts,
    kind: ServerKind,
    request_port: int,
    http_port: int,
    started: bool = False,
) -> WorkerCard:
    """Return the card of a worker in front of a server; ``started``: the server is its own."""
    assert facts.block_size is not None, "no worker joins without"
    return WorkerCard(
        model=facts.model,
        role=Role[settings.role.upper()],
        decodes_only=facts.role == "decode",
        block_size=facts.block_size,
        limits=WorkerLimits(
            max_batch_size=facts.max_batch_size or settings.max_batch_size,
            max_num_tokens=facts.max_num_tokens or settings.max_num_tokens,
            total_kv_blocks=facts.total_blocks or 0,
            # Without a known limit, the server itself refuses what is too long for it.
            max_sequence_length=facts.max_sequence_length or PROMPT_TOKENS_MAX,
        ),
        request_endpoint=f"tcp://{settings.advertised_host}:{request_port}",
        http_endpoint=f"{settings.http_scheme}://{settings.advertised_host}:{http_port}",
        loras=facts.loras,
        aliases=facts.aliases,
        dp_size=facts.ranks,
        engine=f"{kind.title} {facts.version}".strip(),
        server_url=_server_url(settings),
        server_kind=kind.name,
        server_version=facts.version,
        serving_endpoints=_serving(settings, started),
        step_times=settings.step_times(),
        kv_bootstrap_port=facts.kv_bootstrap_port,
        server_ranks=() if facts.numbers == tuple(range(facts.ranks)) else facts.numbers,
    )


def _serving(settings: EngineServerSettings, started: bool) -> tuple[str, ...]:
    """Return where gateways reach the server; empty where no option gives it, and its URL does not show it."""
    if settings.serving_endpoint:
        return settings.serving_endpoint
    target = HttpTarget(settings.server_url)
    if target.secure or started:
        # Gateways speak plain HTTP to pods. A server of the worker's own is on loopback, unless its arguments say more.
        return ()
    host = settings.advertised_host if is_loopback(target.host) else target.host
    endpoint = f"{bracketed(host)}:{target.port}"
    return () if ip_endpoint_problem(endpoint) else (endpoint,)


def _server_url(settings: EngineServerSettings) -> str:
    """Return where routers reach the server: on loopback only where this worker's own address is."""
    target = HttpTarget(settings.server_url)
    if not is_loopback(target.host) or is_loopback(settings.advertised_host):
        return target.url
    return f"{'https' if target.secure else 'http'}://{settings.advertised_host}:{target.port}{target.path}"
