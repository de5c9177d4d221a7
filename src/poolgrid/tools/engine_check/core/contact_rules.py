"""Findings about reaching the publishers: before a single event is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from poolgrid.tools.engine_check.core.evidence import Contact, Evidence, Source
from poolgrid.tools.engine_check.core.finding import Finding, Kind, fault, warning
from poolgrid.tools.engine_check.core.said import RankStream

EVENTS_OPTION = (
    "--kv-events-config "
    '\'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5657"}\''
)
"""As vLLM takes it, and SGLang without ``enable_kv_cache_events``. The two ports are a hundred apart, because each rank
adds its number to both."""

PORT_DISTANCE = 100
"""How far apart replay and event ports are in what is proposed."""


def contact_findings(evidence: Evidence, streams: Mapping[int, RankStream]) -> Iterator[Finding]:
    """Yield what keeps messages from arriving at all."""
    yield from _collisions(evidence.sources)
    yield from _ranks_without_source(evidence)
    answered = any(not exchange.failure for exchange in evidence.exchanges)
    if not evidence.sources:
        words = (
            "the server reports that it publishes no events"
            if evidence.told.publishes is False
            else ("the server does not report where its events are, and no --kv-events-endpoint was given")
        )
        yield fault(
            Kind.EVENTS_OFF, "server", words, f"start the engine with {evidence.told.events_option or EVENTS_OPTION}"
        )
        return
    for source in evidence.sources:
        yield from _contact(source, evidence, streams[source.rank], answered)


def _contact(source: Source, evidence: Evidence, stream: RankStream, answered: bool) -> Iterator[Finding]:
    contact = evidence.contacts.get(source.rank, Contact.CONNECTED)
    place = f"rank {source.rank}, {source.endpoint}"
    if contact is Contact.CONNECTS:
        yield fault(
            Kind.PUBLISHER_CONNECTS,
            place,
            "no process listens there: the publisher connects to this endpoint instead of binding it, so subscribers "
            "never receive anything",
            f'give the engine an endpoint with a *: "endpoint": "tcp://*:{_port(source.endpoint)}"',
        )
    elif contact is Contact.NO_PUBLISHER:
        yield fault(
            Kind.NO_PUBLISHER,
            place,
            "what listens there is no ZMQ publisher; the replay socket, or another rank's, has such a port",
            "give the port of the publisher, which is the endpoint's port plus the rank",
        )
    elif contact is Contact.REFUSED:
        replays = bool(stream.replayed)
        kind = Kind.PUBLISHER_CONNECTS if replays or source.doubt else Kind.ENDPOINT_REFUSED
        words = "no process listens there"
        if replays:
            words += ", while its replay socket has events: the publisher connects instead of binding"
        elif source.doubt:
            words += f": {source.doubt.partition(': ')[0]}"
        elif evidence.told.publishes:
            words += (
                ", while the server reports that it publishes: the publisher connects instead of binding, or is on "
            )
            words += "another host or port"
        else:
            words += ": events are off, the port is another one, or the publisher connects instead of binding"
        yield fault(
            kind,
            place,
            words,
            f"start the engine with {evidence.told.events_option or EVENTS_OPTION}: with a * in the endpoint it binds",
        )
    elif not stream.live and not stream.shapeless and answered:
        if stream.replayed:
            yield fault(
                Kind.RANK_SILENT,
                place,
                "its replay socket has events, and nothing was published while probes were answered",
                "look whether the endpoint is that of this server's publisher",
            )
        elif len(evidence.sources) > 1 and any(heard.rank != source.rank for heard in evidence.heard):
            yield fault(
                Kind.RANK_SILENT,
                place,
                "it published nothing, while other ranks did and a probe of its own was answered",
                "look whether this is the rank's port: the endpoint's port plus the global rank",
            )
        else:
            yield fault(
                Kind.EVENTS_OFF,
                place,
                "the connection stands, and nothing was published while probes were answered: events are off, or this "
                "is the publisher of another server",
                f"start the engine with {evidence.told.events_option or EVENTS_OPTION}",
            )


def _collisions(sources: tuple[Source, ...]) -> Iterator[Finding]:
    taken: dict[str, tuple[str, int]] = {}
    for source in sources:
        for name, endpoint in (("events", source.endpoint), ("replay", source.replay_endpoint)):
            if not endpoint:
                continue
            what, rank = taken.setdefault(_bare(endpoint), (name, source.rank))
            if (what, rank) != (name, source.rank):
                yield fault(
                    Kind.PORTS_COLLIDE,
                    f"rank {source.rank}, {endpoint}",
                    f"the {name} port of rank {source.rank} is the {what} port of rank {rank}: every rank adds its "
                    "number to both ports",
                    f'put them further apart than there are ranks: "replay_endpoint": "tcp://*:'
                    f'{(_port(sources[0].endpoint) or 5557) + PORT_DISTANCE}"',
                )


def _ranks_without_source(evidence: Evidence) -> Iterator[Finding]:
    known = {source.rank for source in evidence.sources}
    lacking = [rank for rank in range(evidence.told.ranks) if rank not in known]
    if known and lacking:
        numbers = ", ".join(map(str, lacking[:8]))
        yield warning(
            Kind.RANK_WITHOUT_SOURCE,
            f"rank {numbers}",
            f"the server has {evidence.told.ranks} data-parallel ranks, and of rank {numbers} no worker follows the "
            "events: what these hold is not known",
            "give --kv-events-endpoint once for each rank, in their order",
        )


def _bare(endpoint: str) -> str:
    """Return an endpoint so that two names of one loopback port are equal."""
    parts = urlsplit(endpoint)
    host = "127.0.0.1" if parts.hostname in ("localhost", "0.0.0.0", "::1", "*") else parts.hostname
    return f"{host}:{parts.port}" if parts.scheme == "tcp" else endpoint


def _port(endpoint: str) -> int | None:
    parts = urlsplit(endpoint)
    return parts.port if parts.scheme == "tcp" else None
