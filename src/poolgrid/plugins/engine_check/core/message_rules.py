"""Findings about the messages: their form, their numbers, and what the replay socket answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from poolgrid.plugins.engine_check.core.evidence import Contact, Evidence, ReplayAnswer, Source
from poolgrid.plugins.engine_check.core.finding import Finding, Kind, fault, note, warning
from poolgrid.plugins.engine_check.core.said import RankStream, SaidOther
from poolgrid.plugins.engine_check.core.views import ExpectedPath, RouterView
from poolgrid.server.diagnosis.evidence import Announcement
from poolgrid.server.process.figures import counted

REPLAY_REMEDY = '"replay_endpoint": "tcp://*:5657" in --kv-events-config'


def message_findings(evidence: Evidence, streams: Mapping[int, RankStream]) -> Iterator[Finding]:
    """Yield what is wrong with messages, stream by stream."""
    replays = {replay.rank: replay for replay in evidence.replays}
    for source in evidence.sources:
        stream = streams[source.rank]
        yield from _shapes(stream)
        yield from _forms(stream)
        yield from _topics(stream, source)
        yield from _ranks(stream)
        yield from _numbers(stream, source)
        if evidence.contacts.get(source.rank, Contact.CONNECTED) is Contact.CONNECTED:
            yield from _replay(stream, source, replays.get(source.rank))


def _shapes(stream: RankStream) -> Iterator[Finding]:
    if stream.shapeless:
        number, words = stream.shapeless[0]
        yield fault(
            Kind.MESSAGE_SHAPE,
            f"rank {stream.rank}, message {number}",
            f"{counted(len(stream.shapeless), 'message')} of another shape: {words}",
            "look whether the endpoint is that of a KV event publisher",
        )
    unread = [each for each in stream.live if each.said is None]
    if unread:
        yield fault(
            Kind.UNDECODABLE,
            f"rank {stream.rank}, sequence {unread[0].sequence}",
            f"{counted(len(unread), 'message')} cannot be read: {unread[0].error}",
        )
    others = Counter(event.words for _, said in stream.said() for event in said.events if isinstance(event, SaidOther))
    for words, count in others.most_common(3):
        yield warning(
            Kind.UNKNOWN_EVENTS, f"rank {stream.rank}", f"{words}, {counted(count, 'time')}: it is left out by routers"
        )


def _forms(stream: RankStream) -> Iterator[Finding]:
    envelopes = {said.envelope_form for _, said in stream.said()}
    events = {form for _, said in stream.said() for form in said.event_forms}
    for what, forms in (("batches", envelopes), ("events", events)):
        if len(forms) > 1:
            yield warning(
                Kind.FORMS_MIXED,
                f"rank {stream.rank}",
                f"{what} are arrays and maps in one stream: two publishers of different versions share the endpoint",
                "give each engine a port of its own",
            )


def _topics(stream: RankStream, source: Source) -> Iterator[Finding]:
    # A replay's answers have no topic.
    topics = {message.said.topic for message in stream.live if message.said is not None}
    others = sorted(topic for topic in topics if not topic.startswith(source.topic))
    if others:
        yield fault(
            Kind.WRONG_TOPIC,
            f"rank {stream.rank}, {source.endpoint}",
            f"its topics are {', '.join(map(repr, others[:4]))}; a subscription to {source.topic!r} gets none of them",
            "start the engine with an empty topic",
        )


def _ranks(stream: RankStream) -> Iterator[Finding]:
    others = Counter(
        said.dp_rank for _, said in stream.said() if said.dp_rank is not None and said.dp_rank != stream.rank
    )
    if others:
        (rank, count), *_ = others.most_common()
        yield fault(
            Kind.WRONG_RANK,
            f"rank {stream.rank}",
            f"{counted(count, 'message')} carry rank {rank}: this is rank {rank}'s port, or ports of ranks collide",
            "the port of a rank is the endpoint's port plus the global rank",
        )


def _numbers(stream: RankStream, source: Source) -> Iterator[Finding]:
    before = None
    holes: list[tuple[int, int]] = []
    for message in stream.live:
        if before is not None and message.sequence > before + 1:
            holes.append((before + 1, message.sequence - 1))
        elif before is not None and message.sequence <= before:
            yield fault(
                Kind.RESTARTED,
                f"rank {stream.rank}, message {message.number}",
                f"the sequence went back from {before} to {message.sequence}: the engine restarted, or two publishers "
                "share the endpoint; what was known of its cache is void, and so is this check",
                "check again once it stands; if it happens again, give each engine a port of its own",
            )
        before = message.sequence
    for first, last in holes[:3]:
        filled = all(number in stream.replayed for number in range(first, last + 1))
        words = f"messages {first} to {last} did not arrive" if last > first else f"message {first} did not arrive"
        if filled:
            yield warning(
                Kind.SEQUENCE_JUMPS, f"rank {stream.rank}, sequence {first}", f"{words}, and the replay has them"
            )
        else:
            end = "its replay does not have them" if source.replay_endpoint else "there is no replay to ask for them"
            yield fault(
                Kind.SEQUENCE_JUMPS,
                f"rank {stream.rank}, sequence {first}",
                f"{words}, and {end}: their events are lost",
                f'{REPLAY_REMEDY}; "hwm" is how many messages wait for a slow subscriber, "buffer_steps" how many are '
                "kept for a replay",
            )


def _replay(stream: RankStream, source: Source, replay: ReplayAnswer | None) -> Iterator[Finding]:
    place = f"rank {stream.rank}, {source.replay_endpoint or source.endpoint}"
    if not source.replay_endpoint:
        if stream.live:
            yield warning(
                Kind.REPLAY_MISSING,
                place,
                "no replay socket is known: lost messages, and those before the connection, are never recovered",
                f"{REPLAY_REMEDY}, and --kv-events-replay-endpoint here",
            )
        return
    if replay is None:
        return
    if not replay.messages and not replay.ended:
        yield fault(
            Kind.REPLAY_SILENT,
            place,
            f"it was asked for all from {replay.asked_from} on and did not answer",
            REPLAY_REMEDY,
        )
        return
    if not replay.ended:
        yield warning(Kind.REPLAY_SILENT, place, "its answer broke off: the mark of the end (sequence −1) did not come")
    differing = [
        message.sequence
        for message in stream.live
        if message.said is not None
        and message.sequence in stream.replayed
        and stream.replayed[message.sequence] != message.said.payload
    ]
    strange = {said.dp_rank for said in stream.replayed_said.values()} - {None, stream.rank}
    if differing or strange:
        of_rank = f": it is rank {min(strange - {None}, key=str)}'s" if strange else ""
        yield fault(
            Kind.REPLAY_DIFFERS,
            place,
            f"what it answers is not what was published{of_rank}, first at sequence "
            f"{min(differing) if differing else min(stream.replayed_said)}",
            "the replay port of a rank is the replay endpoint's port plus the global rank; put it further from the "
            "endpoint's port than there are ranks",
        )
        return
    heard = {message.sequence for message in stream.live if message.sequence >= replay.asked_from}
    lacking = sorted(heard - set(stream.replayed))
    if lacking:
        yield note(
            Kind.REPLAY_DIFFERS,
            place,
            f"{counted(len(lacking), 'message')} that were published are not in its answer, first {lacking[0]}: "
            '"buffer_steps" is how many it keeps',
        )


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
                Kind.RANK_SILENT,
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


@dataclass(frozen=True, slots=True)
class Comparison:
    """One probe: what a router would have predicted when it was sent, and what the server reported."""

    path: ExpectedPath
    predicted: int
    reported: int


@dataclass(slots=True)
class ReuseFigures:
    """All probes whose cached tokens were reported."""

    comparisons: list[Comparison] = field(default_factory=list)
    unsaid: int = 0

    @property
    def equal(self) -> int:
        return sum(each.predicted == each.reported for each in self.comparisons)


def compare(
    paths: Sequence[ExpectedPath], views: Mapping[int, RouterView], block_size: int, figures: ReuseFigures
) -> None:
    """Advance the views from probe to probe, and compare each prediction with its report."""
    for path in paths:
        for view in views.values():
            view.advance(path.exchange.heard_before)
        if path.exchange.cached_tokens is None:
            figures.unsaid += 1
            continue
        rank = path.probe.rank
        if rank is None and len(views) > 1:
            continue  # which rank served it is not known
        served_by = views.get(rank or 0) or next(iter(views.values()), None)
        held = 0
        for name in path.names[: path.reusable_blocks(block_size)]:
            if served_by is None or name not in served_by.held:
                break
            held += 1
        figures.comparisons.append(Comparison(path, held * block_size, path.exchange.cached_tokens))


def announcements(paths: Sequence[ExpectedPath], views: Mapping[int, RouterView]) -> list[Announcement]:
    """Return in which rank's events each probe came whose blocks no other had sent; the views are complete."""
    found, known = [], set[int]()
    for path in paths:
        fresh = next((name for name in path.names if name not in known), None)
        known.update(path.names)
        served_by = next(iter(views), 0) if path.probe.rank is None else path.probe.rank
        if fresh is None or (path.probe.rank is None and len(views) > 1):
            continue
        holders = [rank for rank, view in views.items() if fresh in view.ever]
        others = tuple(f"rank {rank}" for rank in holders if rank != served_by)
        found.append(Announcement(served_by in holders, others, 0, path.probe.domain, path.number))
    return found
