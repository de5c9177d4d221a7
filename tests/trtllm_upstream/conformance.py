"""The facts of TensorRT-LLM that poolgrid relies on, each compared with upstream's own code.

A fact that upstream contradicts is *handled* where our code reads both sides; what says so is named. Facts about
behaviour run upstream's code; facts about fields read its source.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import msgspec

from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.kv_events.cache_events import Cleared
from poolgrid.kernel.kv_events.pub import EngineStored, decode_pub
from poolgrid.kernel.kv_events.trtllm import parse_event
from poolgrid.kernel.wire.events import BlocksRemoved, BlocksStored, GroupsReported
from poolgrid.kernel.wire.hashing import block_hashes, hash_array, pack_tokens, sequence_hashes
from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey
from poolgrid.kernel.wire.sessions import SessionTurn
from poolgrid.kernel.worker_protocol.event_translation import EventTranslator
from poolgrid.plugins.trtllm.arguments.contract import KV_CACHE, TOP, Contract, contract, contract_of
from poolgrid.plugins.trtllm.arguments.engine_rules import KV_EVENTS, EventStreamEndpoints, stream_faults
from poolgrid.plugins.trtllm.arguments.installed import TOP_CLASS, read_facts
from poolgrid.server.forwarding import trtllm_serve
from poolgrid.server.workers.engines.root_seeds import root_digest, root_key, salt_ids
from poolgrid.server.workers.engines.server.dialects.trtllm_serve import FANOUT_EVENTS_MAX
from tests.fakes import FAKES_PATH
from tests.fakes.tensorrt_llm._fake.block_key import block_key_hash, radix_key, salt_id, truncated
from tests.fakes.tensorrt_llm.llmapi.llm import _block_names
from tests.trtllm_upstream.argument_classes import ArgumentClasses
from tests.trtllm_upstream.files import (
    ARGUMENTS,
    COMMON,
    CONVERSATION,
    DISAGGREGATED,
    EVENTS,
    FANOUT,
    HASH,
    PUBLISHER,
    REQUESTS,
    SAMPLING,
    TREE,
    StoredInStream,
    UpstreamFiles,
)
from tests.trtllm_upstream.tenants import ALGORITHMS, BLOCK, Engine, TenantsReport, TreeBlock, TreePage, as_json

HELD, CONTRADICTED, ABSENT = "held", "contradicted", "absent"


@dataclass(frozen=True)
class Fact:
    """One fact and what upstream says of it."""

    name: str
    status: str
    ours: object = None
    theirs: object = None
    handled: str = ""
    """Where our code reads both sides of a contradiction; empty = nowhere."""

    def __str__(self) -> str:
        if self.status == HELD:
            return f"held          {self.name}: {_short(self.ours)}"
        if self.status == ABSENT:
            return f"absent        {self.name}: {self.theirs}"
        handled = f"handled by {self.handled}" if self.handled else "NOT HANDLED"
        return f"contradicted  {self.name}: ours {_short(self.ours)}, upstream {_short(self.theirs)}; {handled}"


def check(files: UpstreamFiles) -> Iterator[Fact]:
    """Yield every fact."""
    for name, group in GROUPS.items():
        if files.text(name) is None:
            yield Fact(name, ABSENT, theirs="no such file in the folder")
        else:
            yield from group(files)


def _compare(name: str, ours: object, theirs: object, handled: str = "") -> Fact:
    return Fact(name, HELD if ours == theirs else CONTRADICTED, ours, theirs, handled)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


@cache
def _contract_facts() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FAKES_PATH / "contract_1_2_1.json").read_text(encoding="utf-8"))
    return loaded


# -- hashes ------------------------------------------------------------------------------------------------------------


def _hashes(files: UpstreamFiles) -> Iterator[Fact]:
    theirs = files.load(HASH)
    randomness = random.Random(0)
    ours_at, theirs_at, root = [], [], []
    for _ in range(500):
        tokens = [randomness.getrandbits(32) for _ in range(randomness.randint(1, 40))]
        parent = randomness.choice([0, randomness.getrandbits(64)])
        lora, salt = (randomness.choice([None, randomness.getrandbits(bits)]) for bits in (31, 64))
        ours_at.append(block_key_hash(tokens, parent, salt, lora))
        theirs_at.append(theirs.hash_v1_block_key(tokens, parent, lora, salt))
        if not parent:
            root.append(root_key(tokens, salt, lora) == theirs_at[-1])
    yield _compare("block_hash.v1 (500 random blocks, the fake's)", ours_at, theirs_at)
    yield _compare("block_hash.v1 (first blocks, the worker's)", True, all(root))
    vectors = [each for each in _contract_facts()["block_hash"]["vectors"] if isinstance(each["tokens"], str)]
    for vector in vectors:
        first, last = map(int, vector["tokens"].split(".."))
        found = theirs.hash_v1_block_key(
            range(first, last + 1), vector["parent"], vector.get("lora_task_id"), vector.get("cache_salt_id")
        )
        yield _compare(f"block_hash.vectors {vector['tokens']} on {vector['parent']}", vector["hash"], found)
    salt_of = theirs.get_cache_salt_id("a tenant")
    names = {salt_id("a tenant", algorithm): algorithm for algorithm in ("blake3", "sha256")}
    handled = "root_seeds.salt_ids (both are computed)" if salt_of in salt_ids("a tenant") else ""
    yield _compare("block_hash.cache_salt_id (1.2.1's facts)", "blake3", names.get(salt_of, "neither"), handled)
    yield _compare("block_hash.cache_salt_id (the fake's second manager)", salt_id("a tenant"), salt_of)
    digest = bytes(range(32))
    yield _compare("block_hash.v2_sha256_64", truncated(digest), theirs.truncate_sha256_hash_to_int64(digest))
    automatic = SimpleNamespace(use_kv_cache_manager_v2=True, kv_cache_event_hash_algo="auto")
    effective = theirs.get_effective_kv_cache_event_hash_algo("auto", True)
    yield _compare("block_hash.auto with the second manager (the fake's)", _block_names(automatic).value, effective)


def _names(files: UpstreamFiles) -> Iterator[Fact]:
    """Compare the names in the stream, by which tenants are distinguished there."""
    parts = "Hasher", "reuse_scope_to_bytes", "sequence_to_blockchain_keys"
    theirs = files.part(TREE, *parts, hashlib=hashlib, itertools=itertools, array=array, NDEBUG=0)
    randomness = random.Random(0)
    ours_at, theirs_at, roots = [], [], []
    for _ in range(500):
        tokens: list[int | bytes] = [randomness.getrandbits(31) for _ in range(BLOCK * randomness.randint(1, 4))]
        if randomness.random() < 0.2:
            tokens[-1] = randomness.randbytes(32)  # a medium
        lora, salt = (randomness.choice([None, 0, randomness.getrandbits(bits)]) for bits in (31, 64))
        _, *blocks = theirs["sequence_to_blockchain_keys"](BLOCK, (lora, salt), tokens)
        above = None
        for block, name in blocks:
            written = [each.hex() if isinstance(each, bytes) else each for each in block]
            above = radix_key(above, written, salt, lora)
            ours_at.append(above)
            theirs_at.append(name)
        first, name = blocks[0]
        if not any(isinstance(each, bytes) for each in first):
            roots.append(root_digest(pack_tokens(first), salt, lora) == truncated(name))
    yield _compare(f"stream.names ({len(ours_at)} random blocks, the fake's)", ours_at, theirs_at)
    yield _compare("stream.names (first blocks, the worker's)", True, all(roots))


# -- the second cache manager's events ---------------------------------------------------------------------------------


def _events(files: UpstreamFiles) -> Iterator[Fact]:
    module = files.load(EVENTS, HASH, COMMON)
    if files.text(HASH) is None:
        yield Fact("events of the second manager", ABSENT, theirs=f"they need {HASH}")
        return
    fields = list(module.KVCacheEvent.__dataclass_fields__)
    yield _compare("events.envelope", [*_ENVELOPE], fields)
    block = list(module.KVCacheStoredBlockData.__dataclass_fields__)
    yield _compare(
        "events.stored_block fields",
        ["block_hash", "tokens", "cache_level", "priority", "mm_keys"],
        block,
        "kv_events.trtllm._Block" if set(block) <= _BLOCK_FIELDS else "",
    )
    for algorithm in ALGORITHMS:
        engine = Engine(files, algorithm, names_salts=False, salts_are_known=True)
        engine.insert(list(range(12)), "a tenant", ("", None))
        engine.insert(list(range(12)), "", ("", None))
        engine.manager.flush_iteration_events()
        made = engine.manager.get_latest_events(0)
        stored = [event for event in made if type(event.data).__name__ == "KVCacheStoredData"]
        named = any(getattr(block, "cache_salt", None) for event in stored for block in event.data.blocks)
        yield _compare(f"events.salts are named ({algorithm})", True, named, "root_seeds, rule 5")
        chained = [len(event.data.blocks) for event in stored]
        yield _compare(f"events.stored blocks of a chain are one event ({algorithm})", [3, 3], chained)
        ids = [event.event_id for event in made]
        yield _compare(f"events.event_id has no holes ({algorithm})", list(range(ids[0], ids[0] + len(ids))), ids)
        kinds = {type(parse_event(as_json(event)).blocks[0].block_hash) for event in stored}  # type: ignore[union-attr]
        yield _compare(f"events.names are read as integers ({algorithm})", {int}, kinds)
        report = TenantsReport()
        for key in [block.key for block in reversed(engine.blocks.values())]:
            engine.manager.add_removed_event(key)
        engine.read(report)
        yield _compare(
            f"events.removed blocks are one event, and none stays ({algorithm})",
            (1, 0),
            (
                report.events,
                engine.translator.resident_blocks,
            ),
        )
    manager = module.KVCacheEventManager(3, window_size=1)
    for _ in range(5):
        manager.add_created_event([1, 0])
    manager.flush_iteration_events()
    kept = [event.event_id for event in manager.get_latest_events(0)]
    yield _compare("events.a full buffer drops the oldest", [2, 3, 4], kept)
    yield _windows_of_groups(module)
    yield from _groups(module)


def _windows_of_groups(module: Any) -> Fact:
    """Events of a group name the window of its layers, and a block that one group loses is removed of it alone."""
    manager = module.KVCacheEventManager(100, window_size=64, window_size_by_layer_group={0: 8, 1: 64})
    root = SimpleNamespace(reuse_scope=None, ordinal=-1)
    block = TreeBlock(b"k" * 32, [1, 2, 3, 4], root, 0, [TreePage] * 2)
    manager.add_created_event([9, 0], [0, 1])
    manager.add_stored_block_event_from_block(block)
    manager.add_removed_life_cycle_event(block.key, 0)
    manager.flush_iteration_events()
    read = [parse_event(as_json(event)) for event in manager.get_latest_events(0)]
    told = [(type(event).__name__, event.window_size, event.layer_group_id) for event in read]
    ours = [(kind, window, group) for kind in ("Created", "Stored") for group, window in ((0, 8), (1, 64))]
    return _compare("events.layer_group_id: each group has its window", [*ours, ("Removed", 8, 0)], told)


def _groups(module: Any) -> Iterator[Fact]:
    """Of groups of layers with one window each, every one limits where a prompt is promised."""
    manager = module.KVCacheEventManager(
        100, window_size=80, window_size_by_layer_group={0: 80, 1: 9, 2: 80}, hash_algo="v1_block_key"
    )
    manager.add_created_event([9, 0], [0, 1, 2])
    chain: list[Any] = [SimpleNamespace(reuse_scope=None, ordinal=-1)]
    for at in range(4):
        tokens, key = [BLOCK * at + each for each in range(BLOCK)], bytes([at + 1]) * 32
        chain.append(TreeBlock(key, [*tokens], chain[-1], at, [TreePage] * 3))
        manager.add_stored_block_event_from_block(chain[-1])
    translator, index, worker = EventTranslator(BLOCK, 2), PrefixIndex(), WorkerKey(WorkerId("w"))
    path = sequence_hashes(block_hashes(pack_tokens(range(4 * BLOCK)), BLOCK))
    promised = []
    # The window of 9 tokens needs two blocks before a place; the third group needs all, as the first does.
    for removed, group in ((None, 0), (3, 1), (1, 1), (2, 2), (1, 2), (1, 0)):
        if removed is not None:
            manager.add_removed_life_cycle_event(chain[removed + 1].key, group)
        manager.flush_iteration_events()
        made = [parse_event(as_json(event)) for event in manager.get_latest_events(0)]
        for event in translator.translate(made).events:
            if isinstance(event, GroupsReported):
                index.report_groups(worker, event)
            elif isinstance(event, BlocksStored | BlocksRemoved) and event.group:
                index.change_group(worker, event)
            elif isinstance(event, BlocksStored):
                index.store(worker, event.parent, hash_array(event.sequence_hashes), event.tier)
            elif isinstance(event, BlocksRemoved):
                index.remove(worker, hash_array(event.sequence_hashes), event.tier)
        promised.append(max((depth for depth, _ in index.find(path)), default=0))
    yield _compare(
        "events.layer_group_id: prompts are promised where every group resumes", [4, 3, 1, 1, 1, 1], promised
    )


_ENVELOPE = ("event_id", "data", "window_size", "hash_algo", "attention_dp_rank", "layer_group_id")
_BLOCK_FIELDS = {"block_hash", "tokens", "cache_level", "priority", "mm_keys", "cache_salt"}


# -- the stream --------------------------------------------------------------------------------------------------------


def _stream(files: UpstreamFiles) -> Iterator[Fact]:
    module = files.load(PUBLISHER)
    source = module._StreamingEventSource(block_size=4, max_entries=9, mm_token_id_offset=32_000)
    key = (bytes(32), 0, "a name")
    tokens: list[int | str] = [1, 2, 3, 4, "0" * 64, 32_001, 7, 8]
    source.event_sink.events.append(StoredInStream([5, 6], None, tokens, None, [[], [key]]))
    source.event_sink.events.append(StoredInStream([7], None, [1, 2, 3, 4], 9, [[]]))
    batch = module.KVEventBatch(ts=1.0, events=[*source.drain_events(), module.AllBlocksCleared()])
    read = decode_pub(msgspec.msgpack.encode(batch))
    stored = [event for event in read.events if isinstance(event, EngineStored)]
    yield _compare("stream.mm_keys: blocks from an image on are left out", [[5]], [event.hashes for event in stored])
    yield _compare("stream.lora_id without a name is left out", 1, read.ignored)
    yield _compare("stream.AllBlocksCleared", 2, len(read.events))
    yield _compare("stream.end of replay", b"\xff" * 8, module.ZmqEventPublisher.END_SEQ)
    endpoints = ["tcp://10.0.0.7:5557", "ipc:///run/events"]
    yield _compare(
        "stream.endpoint of a rank",
        [EventStreamEndpoints(each).of_rank(rank)[0] for each, rank in product(endpoints, (0, 1, 7))],
        [module.ZmqEventPublisher.offset_endpoint_port(each, rank) for each, rank in product(endpoints, (0, 1, 7))],
    )
    grid = product((1, 2), (1, 2), (5557, 65_530, 65_535), (None, 5556, 5560, 5565), (1, 4, 8))
    ours, theirs = [], []
    for pipeline, context, port, replay, ranks in grid:
        config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"}
        config |= {"replay_endpoint": f"tcp://*:{replay}"} if replay else {}
        values = {
            KV_CACHE: {KV_EVENTS: config, "use_kv_cache_manager_v2": True},
            "pipeline_parallel_size": pipeline,
            "context_parallel_size": context,
        }
        ours.append(not list(stream_faults(values, ranks)))
        given = SimpleNamespace(endpoint=config["endpoint"], replay_endpoint=config.get("replay_endpoint"))
        sizes = {"pp_size": pipeline, "cp_size": context, "ranks_per_host": ranks, "data_parallel_size": ranks}
        theirs.append(_passes(module.validate_streaming_support, given, **sizes))
    yield _compare(f"stream.limits of parallelism and ports ({len(ours)} configurations)", ours, theirs)


def _passes(call: Callable[..., object], *given: object, **named: object) -> bool:
    try:
        call(*given, **named)
    except ValueError:
        return False
    return True


# -- trtllm-serve ------------------------------------------------------------------------------------------------------


def _fanout(files: UpstreamFiles) -> Iterator[Fact]:
    theirs = files.load(FANOUT).KvEventFanout(SimpleNamespace())
    yield _compare("fan-out.events kept for HTTP", FANOUT_EVENTS_MAX, theirs.buffer_size)
    made = [
        {"type": "created", "num_blocks_per_cache_level": [9, 0]},
        _stored_data(1, None),
        {"type": "updated", "block_hash": 1, "cache_level": None, "priority": None},
        _stored_data(2, 1),
    ]
    for at, data in enumerate(made):
        theirs._publish({"event_id": at, "data": data, "window_size": 8})
    passed = theirs.drain_http_buffer()
    ids = [event["event_id"] for event in passed]
    yield _compare(
        "fan-out.event_id has no holes", list(range(len(ids))), ids, "EventTranslator.is_filtered (from 1.4)"
    )
    translator = EventTranslator(BLOCK, is_filtered=True)
    translation = translator.translate([parse_event(event) for event in passed])
    yield _compare("fan-out.its holes are no losses", (2, 0), (translator.resident_blocks, translation.lost))
    queue: asyncio.Queue[tuple[int, dict[str, Any]]] = asyncio.Queue()
    theirs._subscribers = {queue: frozenset()}
    theirs._publish({"event_id": 9, "data": made[1], "window_size": 8})
    yield _compare("fan-out.a gap is all_cleared, and read", Cleared, type(parse_event(queue.get_nowait()[1])))


def _conversations(files: UpstreamFiles) -> Iterator[Fact]:
    module = files.load(CONVERSATION)
    ours = [name.decode() for name in trtllm_serve.CONVERSATION_HEADERS]
    yield _compare("requests.headers of conversations", ours, [*module.CONVERSATION_ID_HEADERS])
    turn = SessionTurn("talk", tenant=7)
    lines = {name.decode(): value.decode() for name, value in trtllm_serve.conversation_lines(turn, ())}
    found = module.extract_conversation_id_from_headers(lines)
    yield _compare("requests.conversation that is read", turn.conversation, found)


REQUEST_CLASSES = {
    "/v1/chat/completions": "ChatCompletionRequest",
    "/v1/completions": "CompletionRequest",
    "/v1/responses": "ResponsesRequest",
}


def _requests(files: UpstreamFiles) -> Iterator[Fact]:
    for path, kind in REQUEST_CLASSES.items():
        fields = files.fields(REQUESTS, kind)
        if fields is None:
            yield Fact(f"requests.{kind}", ABSENT, theirs="no such class")
            continue
        ours = (path == trtllm_serve.SALTED_PATH, path in trtllm_serve.PRIORITY_PATHS)
        theirs = ("cache_salt" in fields, "priority" in fields)
        yield _compare(f"requests.salt and priority on {path}", ours, theirs)


def _stored_data(name: int, parent: int | None) -> dict[str, Any]:
    tokens = [{"type": "unique_token", "token_id": 4 * name + at, "token_extra_id": 0} for at in range(BLOCK)]
    block = {"type": "stored_block", "block_hash": name, "tokens": tokens, "cache_level": 0, "priority": 35}
    return {"type": "stored", "parent_hash": parent, "blocks": [block]}


# -- fields ------------------------------------------------------------------------------------------------------------


def _arguments(files: UpstreamFiles) -> Iterator[Fact]:
    text = files.text(ARGUMENTS)
    assert text is not None
    facts = read_facts(text, files.version)
    if facts is None:
        yield Fact(f"{ARGUMENTS} {TOP_CLASS}", ABSENT, theirs="no such class")
        return
    installed, classes = contract_of(facts), ArgumentClasses(text)
    for section, kind in SECTIONS.items():
        known = classes.fields(kind)
        if known is None:
            yield Fact(f"{section} ({kind})", ABSENT, theirs="no such class")
            continue
        tried = [(name, value) for name in known for value in classes.values(kind, name)]
        verdicts = [classes.verdict(kind, *each) for each in tried]
        valid = [each for each, verdict in zip(tried, verdicts, strict=True) if verdict is True]
        invalid = [each for each, verdict in zip(tried, verdicts, strict=True) if verdict is False]
        ours = {name.rpartition(".")[2] for name in contract().fields if _is_in(name, section)}
        gone = [(name, 1) for name in sorted(ours - known.keys()) if name not in facts["sections"][TOP]]
        invalid += [*gone, (f"{next(iter(known))}x", 1)]
        size = f"{len(known)} fields, {len(valid)} valid and {len(invalid)} invalid values"
        for name, checked in (("installed", installed), ("1.2.1 and later names", contract())):
            refused = [
                each for each in valid if each not in REFUSED_BY_VALIDATORS and _refuses(checked, section, *each)
            ]
            yield _compare(f"{section}: valid arguments of {kind} refused ({name}; {size})", [], refused)
        # One with an underscore is a Python object, which a file cannot hold.
        unnamed = [name for name in known if name not in ours and not name.startswith("_")]
        yield _compare(f"{section}: arguments of {kind} without a name (1.2.1 and later names)", [], unnamed)
        taken = [each for each in invalid if not _refuses(installed, section, *each)]
        yield _compare(f"{section}: invalid arguments of {kind} accepted (installed)", [], taken)
        yield _compare(
            f"{section}: arguments of 1.2.1 and later that {files.version} does not have",
            [],
            [name for name, _ in gone],
            "installed_contract, where it is installed",
        )


REFUSED_BY_VALIDATORS = (
    ("max_attention_window", [0]),
    *product(("encoder_max_batch_size", "encoder_max_num_tokens"), (0, -1)),
)
"""Values that pass upstream's field and not the validator behind it."""

SECTIONS: Mapping[str, str] = {
    TOP: TOP_CLASS,
    "kv_cache_config": "KvCacheConfig",
    "scheduler_config": "SchedulerConfig",
    "cache_transceiver_config": "CacheTransceiverConfig",
    "attention_dp_config": "AttentionDpConfig",
    "peft_cache_config": "PeftCacheConfig",
    "torch_compile_config": "TorchCompileConfig",
    "kv_cache_config.kv_events_config": "KVEventsConfig",
    "scheduler_config.dynamic_batch_config": "DynamicBatchConfig",
}


def _is_in(path: str, section: str) -> bool:
    above = path.rpartition(".")[0]
    return above == ("" if section == TOP else section)


def _refuses(checked: Contract, section: str, name: str, value: Any) -> bool:
    path = name if section == TOP else f"{section}.{name}"
    nested: Any = value
    for key in reversed(path.split(".")):
        nested = {key: nested}
    return any(
        f"{fault.path}.".startswith(f"{path}.") or fault.path.startswith(f"{path}[") for fault in checked.check(nested)
    )


def _parameters(file: str, kind: str, section: str) -> Callable[[UpstreamFiles], Iterator[Fact]]:
    def group(files: UpstreamFiles) -> Iterator[Fact]:
        fields = files.fields(file, kind)
        if fields is None:
            yield Fact(f"{file} {kind}", ABSENT, theirs="no such class")
            return
        ours = [name for name in _contract_facts()[section] if not name.startswith("_")]
        yield _compare(f"{section}: fields of ours that are gone", [], [name for name in ours if name not in fields])

    return group


GROUPS: Mapping[str, Callable[[UpstreamFiles], Iterator[Fact]]] = {
    HASH: _hashes,
    TREE: _names,
    EVENTS: _events,
    PUBLISHER: _stream,
    FANOUT: _fanout,
    CONVERSATION: _conversations,
    REQUESTS: _requests,
    ARGUMENTS: _arguments,
    DISAGGREGATED: _parameters(DISAGGREGATED, "DisaggregatedParams", "disaggregated_params"),
    SAMPLING: _parameters(SAMPLING, "SamplingParams", "sampling_params"),
}
