"""What a check says of recorded real engines: nothing where nothing is wrong, and the right name for every mutation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from poolgrid.plugins.engine_check.core.evidence import (
    Contact,
    Evidence,
    ProbeExchange,
    RecordError,
    ReplayAnswer,
    Source,
)
from poolgrid.plugins.engine_check.core.examination import Examination, examine
from poolgrid.plugins.engine_check.core.finding import FindingSeverity, Kind
from poolgrid.server.diagnosis.causes import Cause
from tests.engine_check.records import (
    NAMES,
    Batch,
    first_salted,
    numbered,
    record,
    with_batches,
    with_events,
    with_exchanges,
    with_messages,
    with_stored,
    without_messages,
)

replace = msgspec.structs.replace

of_every_record = pytest.mark.parametrize("name", NAMES)


def kinds(found: Examination, *severities: FindingSeverity) -> list[Kind]:
    return [each.kind for each in found.findings if not severities or each.severity in severities]


def faults(evidence: Evidence) -> list[Kind]:
    return kinds(examine(evidence), FindingSeverity.FAULT)


def test_there_are_records_of_several_versions() -> None:
    assert {"vllm-0.25.0", "vllm-0.32.0"} <= set(NAMES)


@of_every_record
def test_a_real_engine_has_no_fault_and_the_index_holds_all_that_its_tokens_imply(name: str) -> None:
    found = examine(record(name))

    assert kinds(found, FindingSeverity.FAULT) == []
    assert found.blocks.expected == found.blocks.taken_in > 15
    assert found.reuse.comparisons
    assert found.reuse.equal == len(found.reuse.comparisons)
    assert found.forms == "batches are arrays, events maps"


@pytest.mark.parametrize(("page", "blocks", "lacking"), [(16, 19, 5), (1, 28, 7)])
def test_of_sglang_only_the_salt_is_missing(page: int, blocks: int, lacking: int) -> None:
    """Its events are of one block each, and those of a salted prompt are named like those of a plain one."""
    found = examine(record(f"sglang-0.5.16-page-{page}"))

    assert kinds(found) == [Kind.SALT_MISSING], "its KV of a last token is real: the next turn reuses it"
    assert found.blocks.expected == blocks
    assert [path.probe.name for path, _ in found.blocks.missing] == ["salted"] * lacking
    differing = [each.path.probe.name for each in found.reuse.comparisons if each.predicted != each.reported]
    assert differing == ["salted again"]
    assert found.forms == "batches are arrays, events arrays"


def test_an_event_whose_parent_comes_later_in_the_same_message_is_a_fault() -> None:
    def turned(batch: Batch) -> Batch:
        return [batch[0], batch[1][::-1], *batch[2:]]

    assert Kind.PARENT_UNKNOWN in faults(with_batches(record("sglang-0.5.16-page-16"), turned))


@of_every_record
def test_a_record_is_read_as_it_was_written(name: str) -> None:
    assert Evidence.from_json(record(name).to_json()) == record(name)


@pytest.mark.parametrize(
    ("data", "words"), [(b"{", "reading a record"), (b"{}", "told"), (record(NAMES[0]).to_json(), "its version is 9")]
)
def test_what_is_no_record_is_refused(data: bytes, words: str) -> None:
    if b'"version":1}' in data:
        data = data.replace(b'"version":1}', b'"version":9}')

    with pytest.raises(RecordError, match=words):
        Evidence.from_json(data)


# Forms that are read


def as_array(event: dict[str, Any]) -> list[Any]:
    if event["type"] == "AllBlocksCleared":
        return [event["type"]]
    names = (
        ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
         "group_idx", "kv_cache_spec_kind")
        if event["type"] == "BlockStored"
        else ("block_hashes", "medium", "group_idx")
    )  # fmt: skip
    return [event["type"], *(event.get(name) for name in names)]


def as_map(batch: Batch) -> dict[str, Any]:
    return {"ts": batch[0], "events": batch[1], "data_parallel_rank": batch[2]}


def digest(value: int | None) -> bytes | None:
    return None if value is None else bytes(24) + (value % 2**64).to_bytes(8, "big")


def with_digests(event: dict[str, Any]) -> dict[str, Any]:
    event["block_hashes"] = [digest(each) for each in event["block_hashes"]]
    event["parent_block_hash"] = digest(event["parent_block_hash"])
    return event


def signed(event: dict[str, Any]) -> dict[str, Any]:
    event["block_hashes"] = [each - 2**64 if each >= 2**63 else each for each in event["block_hashes"]]
    return event


@of_every_record
@pytest.mark.parametrize(
    ("change", "forms"),
    [
        (lambda each: with_batches(each, lambda b: [b[0], [as_array(e) for e in b[1]], b[2]]), "arrays, events arrays"),
        (lambda each: with_batches(each, as_map), "maps, events maps"),
        (lambda each: with_batches(each, lambda b: b[:2]), "arrays, events maps"),
        (lambda each: with_stored(each, with_digests), "arrays, events maps"),
        (lambda each: with_stored(each, signed), "arrays, events maps"),
    ],
    ids=["arrays", "maps", "no rank", "digests", "signed"],
)
def test_the_same_in_another_form_is_no_fault(name: str, change: Callable[[Evidence], Evidence], forms: str) -> None:
    found = examine(change(record(name)))

    assert kinds(found, FindingSeverity.FAULT) == []
    assert found.forms == f"batches are {forms}"
    assert found.blocks.expected == found.blocks.taken_in


# Publishers


def silent(evidence: Evidence, **changes: Any) -> Evidence:
    """The same check, in which nothing was heard."""
    none = with_exchanges(evidence, lambda each: replace(each, heard_before=0, heard_after=0))
    return replace(none, heard=(), **changes)


def refused(evidence: Evidence, contact: Contact = Contact.REFUSED) -> Evidence:
    return silent(evidence, contacts={0: contact}, replays=())


def all_replayed(evidence: Evidence) -> Evidence:
    messages = tuple(each.message[-2:] for each in evidence.heard)
    return replace(evidence, replays=(ReplayAnswer(0, 0, messages, True),))


def second_rank(evidence: Evidence, endpoint: str, replay: str) -> Evidence:
    sources = (*evidence.sources, Source(1, endpoint, replay, evidence.sources[0].topic))
    return replace(evidence, sources=sources, contacts={0: Contact.CONNECTED, 1: Contact.CONNECTED})


PUBLISHERS: list[tuple[str, Callable[[Evidence], Evidence], Kind]] = [
    ("nothing is published", lambda e: silent(e, replays=()), Kind.RANK_SILENT),
    ("no publisher is listed", lambda e: silent(e, replays=(), sources=(), contacts={}), Kind.EVENTS_OFF),
    ("nobody listens", refused, Kind.ENDPOINT_REFUSED),
    ("it came to us", lambda e: refused(e, Contact.CONNECTS), Kind.PUBLISHER_CONNECTS),
    (
        "nobody listens, but its replay answers",
        lambda e: silent(all_replayed(e), contacts={0: Contact.REFUSED}),
        Kind.PUBLISHER_CONNECTS,
    ),
    ("a replay socket in its place", lambda e: refused(e, Contact.NO_PUBLISHER), Kind.NO_PUBLISHER),
    (
        "replay ports of ranks overlap",
        lambda e: second_rank(
            replace(e, sources=(Source(0, "tcp://h:5557", "tcp://h:5558", e.sources[0].topic),)),
            "tcp://h:5558",
            "tcp://h:5559",
        ),
        Kind.PORTS_COLLIDE,
    ),
    ("one rank is silent", lambda e: second_rank(e, "tcp://h:5558", "tcp://h:5658"), Kind.RANK_SILENT),
    ("another topic", lambda e: replace(e, sources=(replace(e.sources[0], topic="kv-events"),)), Kind.WRONG_TOPIC),
]


@of_every_record
@pytest.mark.parametrize(("change", "kind"), [row[1:] for row in PUBLISHERS], ids=[row[0] for row in PUBLISHERS])
def test_a_publisher_that_is_not_heard_is_named(name: str, change: Callable[[Evidence], Evidence], kind: Kind) -> None:
    found = examine(change(record(name)))

    assert kinds(found, FindingSeverity.FAULT)[0] is kind
    assert found.findings[0].remedy


@of_every_record
def test_a_rank_that_nobody_follows_is_named(name: str) -> None:
    evidence = record(name)

    found = examine(replace(evidence, told=replace(evidence.told, ranks=4)))

    (finding,) = [each for each in found.findings if each.kind is Kind.RANK_WITHOUT_SOURCE]
    assert finding.place == "rank 1, 2, 3"


# Messages


def cut(number: int, message: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return (*message[:-1], message[-1][:-7]) if number == 2 else message


def one_part(number: int, message: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return message[-1:] if number == 2 else message


def begun_again(number: int, message: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return numbered(message, number - 3) if number >= 3 else numbered(message, 100 + number)


def another_form(number: int, message: tuple[bytes, ...]) -> tuple[bytes, ...]:
    if number != 1:
        return message
    batch = msgspec.msgpack.decode(message[-1])
    return (*message[:-1], msgspec.msgpack.encode([batch[0], [as_array(each) for each in batch[1]], batch[2]]))


def of_rank_1(batch: Batch) -> Batch:
    return [*batch[:2], 1]


def replay_of(evidence: Evidence, change: Callable[[ReplayAnswer], ReplayAnswer]) -> Evidence:
    whole = all_replayed(evidence)
    return replace(whole, replays=tuple(map(change, whole.replays)))


MESSAGES: list[tuple[str, Callable[[Evidence], Evidence], Kind, FindingSeverity]] = [
    ("cut", lambda e: with_messages(e, cut), Kind.UNDECODABLE, FindingSeverity.FAULT),
    ("one part", lambda e: with_messages(e, one_part), Kind.MESSAGE_SHAPE, FindingSeverity.FAULT),
    (
        "arrays and maps",
        lambda e: with_messages(replace(e, replays=()), another_form),
        Kind.FORMS_MIXED,
        FindingSeverity.WARNING,
    ),
    (
        "an event of the future",
        lambda e: with_events(e, lambda event: [event, {"type": "BlockPinned"}]),
        Kind.UNKNOWN_EVENTS,
        FindingSeverity.WARNING,
    ),
    (
        "begun again",
        lambda e: with_messages(replace(e, replays=()), begun_again),
        Kind.RESTARTED,
        FindingSeverity.FAULT,
    ),
    (
        "lost for good",
        lambda e: without_messages(replace(e, replays=()), [2, 3]),
        Kind.SEQUENCE_JUMPS,
        FindingSeverity.FAULT,
    ),
    (
        "lost, and replayed",
        lambda e: without_messages(all_replayed(e), [2, 3]),
        Kind.SEQUENCE_JUMPS,
        FindingSeverity.WARNING,
    ),
    (
        "of another rank",
        lambda e: with_batches(replace(e, replays=()), of_rank_1),
        Kind.WRONG_RANK,
        FindingSeverity.FAULT,
    ),
    (
        "no replay",
        lambda e: replace(e, replays=(), sources=(replace(e.sources[0], replay_endpoint=""),)),
        Kind.REPLAY_MISSING,
        FindingSeverity.WARNING,
    ),
    (
        "a replay that does not answer",
        lambda e: replay_of(e, lambda replay: replace(replay, messages=(), ended=False)),
        Kind.REPLAY_SILENT,
        FindingSeverity.FAULT,
    ),
    (
        "a replay that breaks off",
        lambda e: replay_of(e, lambda replay: replace(replay, ended=False)),
        Kind.REPLAY_SILENT,
        FindingSeverity.WARNING,
    ),
    (
        "another rank's replay",
        lambda e: replace(e, replays=with_batches(all_replayed(e), of_rank_1).replays),
        Kind.REPLAY_DIFFERS,
        FindingSeverity.FAULT,
    ),
    (
        "a short replay",
        lambda e: replay_of(e, lambda replay: replace(replay, messages=replay.messages[4:])),
        Kind.REPLAY_DIFFERS,
        FindingSeverity.NOTE,
    ),
]


@of_every_record
@pytest.mark.parametrize(
    ("change", "kind", "severity"), [row[1:] for row in MESSAGES], ids=[row[0] for row in MESSAGES]
)
def test_messages_that_are_wrong_are_named(
    name: str, change: Callable[[Evidence], Evidence], kind: Kind, severity: FindingSeverity
) -> None:
    found = examine(change(record(name)))

    assert (kind, severity) in [(each.kind, each.severity) for each in found.findings]
    others = set(kinds(found, FindingSeverity.FAULT)) - {kind}
    # What hangs on a message that is lost is lost too, and a message without a number is missed by its number.
    assert others <= ({Kind.PARENT_UNKNOWN, Kind.SEQUENCE_JUMPS} if severity is FindingSeverity.FAULT else set())


# Blocks


def without(field: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda event: {name: value for name, value in event.items() if name != field}


def set_to(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda event: {**event, **fields}


def in_two_groups(**fields: Any) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    return lambda event: [event, {**event, "group_idx": 1, **fields}]


def strange_keys(event: dict[str, Any]) -> dict[str, Any]:
    return {**event, "extra_keys": [["0f3a"] for _ in event["block_hashes"]]}


def without_roots(event: dict[str, Any]) -> dict[str, Any] | None:
    return None if event["parent_block_hash"] is None else event


def without_what_follows(event: dict[str, Any]) -> dict[str, Any]:
    if len(event["block_hashes"]) < 2:
        return event
    size = event["block_size"]
    return {**event, "block_hashes": event["block_hashes"][:1], "token_ids": event["token_ids"][:size]}


BLOCKS: list[tuple[str, Callable[[Evidence], Evidence], Kind, FindingSeverity]] = [
    (
        "the server says another size",
        lambda e: replace(e, told=replace(e.told, block_size=48)),
        Kind.BLOCK_SIZE,
        FindingSeverity.FAULT,
    ),
    ("no size", lambda e: with_stored(e, without("block_size")), Kind.BLOCK_SIZE, FindingSeverity.FAULT),
    ("no tokens", lambda e: with_stored(e, without("token_ids")), Kind.TOKENS_MISSING, FindingSeverity.FAULT),
    (
        "half of the tokens",
        lambda e: with_stored(e, lambda event: {**event, "token_ids": event["token_ids"][::2]}),
        Kind.TOKENS_AND_HASHES,
        FindingSeverity.FAULT,
    ),
    ("no first blocks", lambda e: with_stored(e, without_roots), Kind.PARENT_UNKNOWN, FindingSeverity.FAULT),
    ("first blocks only", lambda e: with_stored(e, without_what_follows), Kind.PARENT_UNKNOWN, FindingSeverity.FAULT),
    (
        "layers with a window too",
        lambda e: with_stored(e, in_two_groups(kv_cache_spec_kind="sliding_window")),
        Kind.WINDOWS,
        FindingSeverity.WARNING,
    ),
    (
        "layers with a window only",
        lambda e: with_stored(e, set_to(kv_cache_spec_kind="sliding_window")),
        Kind.WINDOWS,
        FindingSeverity.FAULT,
    ),
    (
        "groups of no kind",
        lambda e: with_stored(with_stored(e, in_two_groups()), without("kv_cache_spec_kind")),
        Kind.GROUPS_UNNAMED,
        FindingSeverity.FAULT,
    ),
    (
        "blocks on the network",
        lambda e: with_stored(e, lambda event: [event, {**event, "medium": "NETWORK"}]),
        Kind.OTHER_MEDIUM,
        FindingSeverity.NOTE,
    ),
    ("keys that nobody said", lambda e: with_stored(e, strange_keys), Kind.KEYS_UNKNOWN, FindingSeverity.FAULT),
    ("no keys", lambda e: with_stored(e, set_to(extra_keys=None)), Kind.SALT_MISSING, FindingSeverity.FAULT),
]


@of_every_record
@pytest.mark.parametrize(("change", "kind", "severity"), [row[1:] for row in BLOCKS], ids=[row[0] for row in BLOCKS])
def test_blocks_that_are_wrong_are_named(
    name: str, change: Callable[[Evidence], Evidence], kind: Kind, severity: FindingSeverity
) -> None:
    found = examine(change(record(name)))

    assert (kind, severity) in [(each.kind, each.severity) for each in found.findings]
    if severity is not FindingSeverity.FAULT:
        assert kinds(found, FindingSeverity.FAULT) == []


def reporting(change: Callable[[int], int | None]) -> Callable[[Evidence], Evidence]:
    """The server reports other cached tokens."""
    return lambda e: with_exchanges(
        e, lambda each: each if each.cached_tokens is None else replace(each, cached_tokens=change(each.cached_tokens))
    )


def counting(change: Callable[[int], int]) -> Callable[[Evidence], Evidence]:
    return lambda e: with_exchanges(e, lambda each: replace(each, prompt_tokens=change(len(each.probe.tokens))))


def nothing_stored(evidence: Evidence) -> Evidence:
    return with_batches(evidence, lambda batch: [batch[0], [], *batch[2:]])


VERDICTS: list[tuple[str, Callable[[Evidence], Evidence], Cause]] = [
    ("nothing is wrong", lambda e: e, Cause.AGREES),
    ("lengths are right", counting(lambda length: length), Cause.AGREES),
    ("a block less is reused", reporting(lambda cached: max(0, cached - 16)), Cause.AGREES),
    ("nothing is stored, nothing reused", lambda e: reporting(lambda cached: 0)(nothing_stored(e)), Cause.CACHING_OFF),
    ("nothing is reused", reporting(lambda cached: 0), Cause.REUSES_LESS),
    ("cached tokens are not said", reporting(lambda cached: None), Cause.UNREPORTED),
    ("twelve tokens more", counting(lambda length: length + 12), Cause.TEMPLATE),
    ("salts are not said", lambda e: with_stored(e, set_to(extra_keys=None)), Cause.SALT),
    ("no publisher is listed", lambda e: silent(e, replays=(), sources=(), contacts={}), Cause.NO_EVENTS),
    ("a closed port", refused, Cause.WRONG_ENDPOINT),
]


@of_every_record
@pytest.mark.parametrize(("change", "cause"), [row[1:] for row in VERDICTS], ids=[row[0] for row in VERDICTS])
def test_the_verdict_is_that_of_the_doctor(name: str, change: Callable[[Evidence], Evidence], cause: Cause) -> None:
    assert examine(change(record(name))).verdict.cause is cause


@of_every_record
def test_blocks_that_nobody_told_of_are_missing_and_their_place_is_said(name: str) -> None:
    evidence = record(name)
    last = evidence.exchanges[-1]
    more = replace(last, probe=replace(last.probe, name="never sent", tokens=tuple(range(300, 400))), cached_tokens=0)

    found = examine(replace(evidence, exchanges=(*evidence.exchanges, more)))

    (finding,) = [each for each in found.findings if each.severity is FindingSeverity.FAULT]
    assert finding.kind is Kind.BLOCKS_MISSING
    assert finding.place.startswith("probe 'never sent', block 0 of")


@of_every_record
def test_a_salt_that_the_engine_ignores_is_named(name: str) -> None:
    evidence = record(name)
    salted = first_salted(evidence)
    plain = next(
        each
        for each in evidence.exchanges
        if not each.probe.salt and len(each.probe.tokens) > (evidence.told.block_size or 0)
    )
    ignored = ProbeExchange(
        replace(plain.probe, name="ignored", salt="s"), len(evidence.heard), len(evidence.heard), (), 32
    )
    others = tuple(each for each in evidence.exchanges if each.probe.salt != salted.probe.salt)

    assert Kind.SALT_IGNORED in faults(replace(evidence, exchanges=(*others, ignored)))


def with_adapter(evidence: Evidence, change: Callable[[dict[str, Any]], Any]) -> Evidence:
    """The same check, with an adapter beside the salt."""
    salt = first_salted(evidence).probe.salt
    salted: set[int] = set()

    def of_event(event: dict[str, Any]) -> Any:
        keys = event["extra_keys"] or []
        if [salt] not in keys and event["parent_block_hash"] not in salted:
            return event
        salted.update(event["block_hashes"])
        return change(event)

    changed = with_stored(evidence, of_event)
    return with_exchanges(
        changed,
        lambda each: replace(each, probe=replace(each.probe, lora="sql")) if each.probe.salt == salt else each,
    )


def keys_with(event: dict[str, Any], *first: str) -> list[Any]:
    behind = ["sql"] if event.get("lora_name") else None
    return [list(first) if event["parent_block_hash"] is None else behind, *[behind for _ in event["block_hashes"][1:]]]


def adapted(event: dict[str, Any], *first: str, **fields: Any) -> dict[str, Any]:
    named = {**event, "lora_id": 1, "lora_name": "sql", **fields}
    return {**named, "extra_keys": keys_with(named, *first)}


@of_every_record
def test_an_adapter_beside_a_salt_is_no_fault(name: str) -> None:
    salt = first_salted(record(name)).probe.salt

    found = examine(with_adapter(record(name), lambda event: adapted(event, "sql", salt)))

    assert kinds(found, FindingSeverity.FAULT) == []
    assert found.blocks.expected == found.blocks.taken_in


@of_every_record
def test_an_adapter_by_number_and_keys_in_another_order_are_named(name: str) -> None:
    salt = first_salted(record(name)).probe.salt

    unnamed = faults(with_adapter(record(name), lambda event: adapted(event, salt, lora_name=None)))
    turned = faults(with_adapter(record(name), lambda event: adapted(event, salt, "sql")))

    assert unnamed[0] is Kind.LORA_UNNAMED
    assert turned[0] is Kind.KEYS_ORDER


@of_every_record
def test_a_probe_without_an_answer_is_named_and_the_others_are_judged(name: str) -> None:
    evidence = record(name)
    first = replace(evidence.exchanges[0], failure="/v1/completions answered 500: no", output=(), cached_tokens=None)

    found = examine(replace(evidence, exchanges=(first, *evidence.exchanges[1:])))

    assert kinds(found, FindingSeverity.FAULT) == [Kind.PROBE_FAILED]
    assert found.blocks.taken_in == found.blocks.expected
