"""Findings about the messages: their form, their numbers, and what the replay socket answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from poolgrid.process.figures import counted
from poolgrid.tools.engine_check.core.evidence import Contact, Evidence, ReplayAnswer, Source
from poolgrid.tools.engine_check.core.finding import Finding, Kind, fault, note, warning
from poolgrid.tools.engine_check.core.said import RankStream, SaidOther

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
