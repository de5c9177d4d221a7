"""Golden frames: every message of the contract, encoded once and committed; and hostile bytes, for every codec.

``golden_frames.txt`` holds the frames as hex. A change there is a change of the contract: old and new processes of one
pool stop understanding each other, and journals on disk become unreadable. Adding a trailing field with a default is
the one change that is safe; it appears here as a longer frame.
"""

from __future__ import annotations

import re
import struct
import sys
import tracemalloc
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.wire import codec, feed, ingest, limits
from poolgrid.kernel.wire import ingest as loading
from poolgrid.kernel.wire.card import ChatSpec, MediaSpec, ResizedGrid, StepTimes, TiledGrid, WorkerCard, WorkerLimits
from poolgrid.kernel.wire.codec import Codec
from poolgrid.kernel.wire.errors import DecodeError, LimitError
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksReleased,
    BlocksRemoved,
    BlocksShared,
    BlocksStored,
    CacheCleared,
    EventBatch,
    GroupsReported,
    JournalRecord,
    KvGroup,
    LoadReported,
    PrefillCompleted,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
    SnapshotBegan,
    SnapshotEnded,
    StreamStateChanged,
    TurnBegan,
    TurnEnded,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from poolgrid.kernel.wire.feed import (
    BlockChain,
    Records,
    Replay,
    RequestState,
    SnapshotPart,
    SourceStream,
    TakeSnapshot,
    TooOld,
    WorkerState,
)
from poolgrid.kernel.wire.hashing import pack_hashes, pack_tokens
from poolgrid.kernel.wire.identifiers import PackedHashes, PackedTokens, Role, Stage, StreamState, Tier
from poolgrid.kernel.wire.ingest import Acknowledged, Goodbye, Heartbeat, Hello, JoinRefused, Resend, Unknown, Welcome
from poolgrid.kernel.wire.limits import FRAME_BYTES_MAX, U32_MAX, U64_MAX
from poolgrid.kernel.wire.multimodal import (
    FetchTensor,
    MediaItem,
    MediaKind,
    MultimodalInput,
    NixlRegion,
    ReleaseTensor,
    TensorChunk,
    TensorDescriptor,
    TensorList,
    TensorUnknown,
    digest_media,
)
from poolgrid.kernel.wire.requests import (
    Cancel,
    Drain,
    FetchKv,
    FinishReason,
    ForwardBegan,
    Forwarded,
    ForwardEnded,
    Generate,
    KvOffered,
    KvRetention,
    LogitsProcessorCall,
    Ping,
    Pong,
    RefusalKind,
    ReleaseKv,
    RetainedTokens,
    Routing,
    Sampling,
    TokenBatch,
    TokenDelta,
    TokenLogprobs,
)
from poolgrid.kernel.wire.selection import (
    AskStatus,
    ModelStatus,
    PoolStatus,
    Probe,
    Probed,
    Release,
    Renew,
    Reservation,
    RoleStatus,
    Select,
    Selected,
    SelectRefusal,
    SelectRefused,
    WorkerRank,
)
from poolgrid.kernel.wire.sessions import (
    Footprint,
    Gap,
    KeptPrompt,
    SessionRecord,
    SessionsSnapshot,
    SessionTurn,
    Tail,
    Turn,
    TurnAnswer,
    TurnEnding,
    TurnPlace,
)
from poolgrid.kernel.wire.tasks import EmbeddingTask, TaskResult, VisualTask
from poolgrid.kernel.wire.trace_context import TraceContext
from tests.cases import for_each
from tests.wire.messages import messages

GOLDEN_FILE = Path(__file__).with_name("golden_frames.txt")

CODECS: dict[str, Codec[Any]] = {name: value for name, value in vars(codec).items() if isinstance(value, Codec)}

PLACE = TurnPlace(3, U64_MAX, -1, 250, 600, ((7, "s-2"),))
TURN = SessionTurn("s-1", U64_MAX, "s-0", True, U64_MAX, 5, 6, 900, 300_000, 96, 0, "r-0", PLACE, 8)

SMALL_CARD = WorkerCard("tiny", Role.AGGREGATED, 16, WorkerLimits(8, 2048, 512, 4096), "tcp://127.0.0.1:40001")
FULL_CARD = WorkerCard(
    model="meta-llama/Llama-3.1-8B",
    role=Role.DECODE,
    block_size=32,
    limits=WorkerLimits(256, 8192, U32_MAX, 131_072, host_kv_blocks=1_000_000),
    request_endpoint="ipc:///tmp/w1",
    http_endpoint="http://10.0.0.7:9000",
    loras=("legal", "médical"),
    dp_size=8,
    engine="TensorRT-LLM 1.2.1",
    eos_token_ids=(2, 128_009),
    vocabulary_size=128_256,
    media=MediaSpec(
        ("image", "embeddings"),
        "<image>",
        32_000,
        576,
        U32_MAX,
        8 * 2**20,
        ResizedGrid(14, 2, 3136, 12_845_056),
        TiledGrid(336, 14, ((336, 672), (672, 336))),
        adds_special_tokens=True,
    ),
    endpoint_name="poolgrid.decode.generate",
    simulated_speedup=2.5,
    chat=ChatSpec("qwen3", "hermes", "{{ messages }}"),
    step_times=StepTimes(((1, 12.5), (8192, 220.75)), ((0.0, 7.5), (1.0, 21.25))),
    takes_retention=True,
    serving_endpoints=("10.0.0.7:8000",),
    inabilities=(("seed", "which it ignores"),),
    decodes_only=True,
    server_url="http://10.0.0.7:8000",
    server_kind="vllm",
    server_version="0.33.0",
)
LOAD = LoadReported(3, 1, 4096, 700, 900, 1024, steps=12_345_678_901)


def _batch(*items: AnyEvent) -> EventBatch:
    return EventBatch("w1", 0, 7, 41, 1_700_000_000_123, list(items))


GOLDEN: dict[tuple[str, str], Any] = {
    ("event_batch", "worker joined, smallest card"): _batch(WorkerJoined(SMALL_CARD)),
    ("event_batch", "worker joined, every field"): _batch(WorkerJoined(FULL_CARD)),
    ("event_batch", "worker draining"): _batch(WorkerDraining()),
    ("event_batch", "worker left"): _batch(WorkerLeft("lease expired")),
    ("event_batch", "blocks stored at the root"): _batch(BlocksStored(None, pack_hashes([0, 1, U64_MAX]))),
    ("event_batch", "blocks stored below a parent, on disk"): _batch(
        BlocksStored(U64_MAX, pack_hashes([15310707395893867146]), Tier.DISK)
    ),
    ("event_batch", "blocks removed from the host tier"): _batch(BlocksRemoved(pack_hashes([9]), Tier.HOST)),
    ("event_batch", "blocks shared and released by one of several sources"): _batch(
        BlocksShared(pack_hashes([9])), BlocksReleased(pack_hashes([9]), Tier.HOST)
    ),
    ("event_batch", "groups of a hybrid model, and blocks of a window"): _batch(
        GroupsReported((KvGroup(16), KvGroup(1, 4))),
        BlocksStored(None, pack_hashes([5, 9]), Tier.DEVICE, 1),
        GroupsReported((KvGroup(0),), has_full_attention=False),
    ),
    ("event_batch", "a stream is not trusted any more"): _batch(
        StreamStateChanged("worker", StreamState.STALE, "batches from 7 are missing")
    ),
    ("event_batch", "cache cleared"): _batch(CacheCleared()),
    ("event_batch", "life of a request"): _batch(
        RequestStarted("r-1", 100, 96, 7),
        PrefillCompleted("r-1"),
        RequestProgressed("r-1", 8),
        RequestFinished("r-1", "stop"),
    ),
    ("event_batch", "turn of a session"): _batch(
        TurnBegan("r-1", 100, TURN), TurnEnded(TurnAnswer("r-1", U64_MAX, "s-1", 120, U64_MAX, (7, U64_MAX)))
    ),
    ("event_batch", "load reported"): _batch(LOAD),
    ("event_batch", "restatement of a cache"): _batch(SnapshotBegan(), SnapshotEnded()),
    ("event_batch", "no events, largest numbers, another source"): EventBatch(
        "ns.component.endpoint", U32_MAX, U64_MAX, U64_MAX, U64_MAX, [], source="pub"
    ),
    ("journal_record", "a record"): JournalRecord(
        U64_MAX, "w1", 3, 7, 41, 1_700_000_000_123, 1_700_000_000_456, [CacheCleared()]
    ),
    ("to_worker", "generate, smallest"): Generate("r-1", pack_tokens([1, 2, 3]), Sampling(16)),
    ("to_worker", "generate, every field"): Generate(
        request_id="r-2",
        token_ids=pack_tokens([0, U32_MAX]),
        sampling=Sampling(
            max_tokens=1,
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            seed=-1,
            min_tokens=1,
            ignore_eos=True,
            logprobs=5,
            logit_bias={50256: -100.0},
            guided_json=b'{"type":"object"}',
            guided_regex="a+",
            guided_grammar='root ::= "a"',
            guided_choice=("yes", "no"),
            structural_tag="{}",
            bad_token_ids=(7, U32_MAX),
            prompt_logprobs=0,
            logits_processors=(
                LogitsProcessorCall("banned_tokens", b'{"token_ids":[7]}'),
                LogitsProcessorCall("own"),
            ),
            engine_fields={"min_p": 0.05, "presence_penalty": -0.25, "top_p_reset_ids": 7, "early": True, "word": "a"},
        ),
        stop_token_ids=(2, 128_009),
        routing=Routing(1, -2, "legal", "tenant-7", 1, 64, 8192, 32),
        disaggregated_params=b"\x00\xff",
        multimodal=b"\x01",
        stage=Stage.DECODE,
        trace=TraceContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "vendor=1"),
        retention=KvRetention(
            (RetainedTokens(0, 2048, 80, 600_000), RetainedTokens(4096)), decode_priority=0, decode_duration_ms=U32_MAX
        ),
        turn=TURN,
    ),
    ("to_worker", "generate, media of a request to encode"): Generate(
        "r-3", pack_tokens([1]), Sampling(1), multimodal=b"\x00" * 8, stage=Stage.ENCODE
    ),
    ("to_worker", "generate, embeddings"): Generate(
        "r-4", b"", Sampling(1), stage=Stage.EMBEDDING, task=EmbeddingTask(("a text", (1, U32_MAX)), 256)
    ),
    ("to_worker", "generate, a video"): Generate(
        "r-5",
        b"",
        Sampling(1),
        stage=Stage.VIDEO,
        task=VisualTask(
            "a cat",
            video=True,
            width=832,
            height=480,
            negative_prompt="a dog",
            steps=50,
            guidance_scale=5.0,
            seed=-1,
            output_format="mp4",
            seconds=4.0,
            frame_rate=24.0,
            frames=81,
            reference=b"\x89PNG",
            extra=b"{}",
        ),
    ),
    ("to_worker", "cancel"): Cancel("r-1"),
    ("to_worker", "answer of a turn"): Cancel("r-1", (TurnAnswer("r-1", 0, "s-1", 120, 7),)),
    ("to_worker", "ping"): Ping(5),
    ("to_worker", "forwarded"): Forwarded(
        (ForwardBegan("r-1~a1", 1, 1200, 960, TURN), ForwardBegan("r-2", 0, 7, 0, cache_salt="acme")),
        ("r-1~a1",),
        (ForwardEnded("r-0", 0, "stop", 64), ForwardEnded("r-2", 0, "cancelled")),
    ),
    ("to_worker", "fetch kv"): FetchKv("7-12"),
    ("to_worker", "release kv"): ReleaseKv("7-12"),
    ("to_worker", "drain"): Drain(),
    ("to_worker", "drain, in a given time"): Drain(25_000),
    ("from_worker", "token batch"): TokenBatch(
        9,
        [
            TokenDelta("r-1", 0, pack_tokens([11]), cached_tokens=96),
            TokenDelta(
                request_id="r-2",
                position=4,
                token_ids=pack_tokens([12, 13]),
                finish_reason=FinishReason.LENGTH,
                cached_tokens=0,
                error=None,
                logprobs=(TokenLogprobs(12, -0.5, ((12, -0.5), (99, -1.25))), TokenLogprobs(13, -2.0)),
                disaggregated_params=b"\x00",
                prompt_logprobs=(TokenLogprobs(2, -3.5),),
            ),
            TokenDelta("r-3", 0, b"", FinishReason.ERROR, error="out of blocks", refusal=RefusalKind.BROKEN),
            TokenDelta(
                "r-4", 0, pack_tokens([14]), FinishReason.PREFILLED, cached_tokens=0, disaggregated_params=b"\x01\x02"
            ),
            TokenDelta("r-5", 0, b"", FinishReason.ENCODED, disaggregated_params=b"\x03"),
            TokenDelta("r-6", 0, b"", FinishReason.ERROR, error="no guides here", refusal=RefusalKind.CANNOT_DO),
            TokenDelta("r-7", 0, b"", progress=40),
            TokenDelta("r-8", 0, b"", FinishReason.STOP, result=TaskResult((b"\x00\x00\x80\x3f",), "image/png", 3)),
        ],
    ),
    ("from_worker", "pong"): Pong(5, 7, draining=True),
    ("from_worker", "kv offered"): KvOffered("7-12", True, pack_hashes([1, U64_MAX]), 3),
    ("from_worker", "kv not known"): KvOffered("7-12", False),
    ("to_consolidator", "hello"): Hello("w1", 0, 7, SMALL_CARD, 42, 10),
    ("to_consolidator", "heartbeat"): Heartbeat("w1", 0, 7, 42),
    ("to_consolidator", "goodbye"): Goodbye("w1", 0, 7, "drained"),
    ("from_consolidator", "welcome"): Welcome("w1", 0, 7, 42, "c-1", 5000),
    ("from_consolidator", "acknowledged"): Acknowledged("w1", 0, 7, 42, "c-1"),
    ("from_consolidator", "resend"): Resend("w1", 0, 7, 40),
    ("from_consolidator", "unknown"): Unknown("w1", 0),
    ("from_consolidator", "refused"): JoinRefused("w1", 0, "block_size 32, the pool has 16"),
    ("to_feed", "replay"): Replay(1, 100, 50),
    ("to_feed", "take snapshot"): TakeSnapshot(2),
    ("from_feed", "records"): Records(1, [b"\x01\x02", b""], 102),
    ("from_feed", "too old"): TooOld(1, 90),
    ("from_feed", "snapshot part"): SnapshotPart(
        2,
        102,
        0,
        True,
        [
            WorkerState(
                "w1",
                0,
                7,
                42,
                SMALL_CARD,
                False,
                [RequestState("r-1", 100, 96, 7, True)],
                LOAD,
                True,
                [SourceStream("worker", StreamState.LIVE)],
            )
        ],
        [(0, BlockChain(None, pack_hashes([5, 6]))), (0, BlockChain(6, pack_hashes([7]), Tier.HOST))],
        SessionsSnapshot(
            [
                SessionRecord(
                    "s-1",
                    U64_MAX,
                    "s-0",
                    1_700_000_000_123,
                    1_700_000_000_456,
                    3,
                    1,
                    "r-1",
                    100,
                    96,
                    1_700_000_000_400,
                    "stop",
                    TurnEnding.TOOL,
                    (Gap(2, 900, 300), Gap(), Gap()),
                    (Footprint("w1", 0, 7, U64_MAX, 3, 9),),
                    (Tail("r-1", 5, 4, 100, 3, 120, 7, (8,), 9),),
                    -1,
                    True,
                    900,
                )
            ],
            [Turn("r-1", U64_MAX, "s-1", "w1", 0, 5, 7, 96, 3, 9)],
            (Gap(2, 900, 300), Gap(), Gap()),
            [KeptPrompt(U64_MAX, "s-1", 5, 96, 1_700_000_300_123)],
        ),
    ),
    ("to_pool", "select, smallest"): Select(1, "r-1", "tiny", Stage.WHOLE, 100),
    ("to_pool", "select, every field"): Select(
        2,
        "r-2~1",
        "tiny",
        Stage.DECODE,
        U32_MAX,
        pack_hashes([5, U64_MAX]),
        (WorkerRank("w1", 3),),
        -2,
        30_000,
        pack_hashes([7, U64_MAX]),
        ("embeddings", "image"),
        TraceContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"),
        U64_MAX,
    ),
    ("to_pool", "probe"): Probe(3, "tiny", Stage.PREFILL, 100, pack_hashes([5])),
    ("to_pool", "renew"): Renew((Reservation("r-1", WorkerRank("w1")), Reservation("r-2", WorkerRank("w2", 1)))),
    ("to_pool", "release"): Release(Reservation("r-1", WorkerRank("w1"))),
    ("to_pool", "ask status"): AskStatus(U64_MAX),
    ("from_pool", "selected"): Selected(1, WorkerRank("w1"), "tcp://10.0.0.7:40001", 7, 3, 32, "lowest_cost", 30_000),
    ("from_pool", "select refused"): SelectRefused(
        2,
        SelectRefusal.BUSY,
        "every worker is busy",
        1.5,
        ((WorkerRank("w1"), "busy"), (WorkerRank("w2", 1), "draining")),
    ),
    ("from_pool", "probed, every field"): Probed(3, None, 2, 4, 32, 4096, 9),
    ("from_pool", "probed, nobody there"): Probed(4, SelectRefusal.NO_WORKER),
    ("from_pool", "pool status"): PoolStatus(
        5,
        True,
        (
            ModelStatus("tiny", 32, "xxh3-64/1337", 4096, (RoleStatus(Role.AGGREGATED, 2, 1, 0, 3, 64),), ("legal",)),
            ModelStatus(
                "eyes",
                32,
                "xxh3-64/1337",
                9,
                (),
                (),
                MediaSpec(("image",)),
                ChatSpec("none", "hermes", "{}"),
                server_kind="vllm",
            ),
        ),
        4,
        0.5,
        2.0,
        3,
    ),
    ("from_pool", "pool status, not ready"): PoolStatus(6, False),
    ("loading_worker", "fetching"): loading.LoadingWorker("w1", "org/model", "decode", "fetch", 2**31, 2**40),
    ("loading_workers", "two"): loading.LoadingWorkers(
        [
            loading.LoadingWorker("w1", "org/model", "decode", "fetch", 2**31, 2**40),
            loading.LoadingWorker("w2", "tiny", "aggregated", "load", 0, 0),
        ]
    ),
    ("leader", "a consolidator that is active"): ingest.Leader(
        "c0ffee0123456789", "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558", "tcp://10.0.0.7:5559"
    ),
    ("tensor_list", "a tensor of one image, by both ways"): TensorList(
        (
            TensorDescriptor("7-1", "image 0", "float16", (576, 4096), 4_718_592, "tcp://10.0.0.7:41001"),
            TensorDescriptor(
                "7-2", "image 1", "float32", (), 4, "tcp://10.0.0.7:41001", NixlRegion("e-7", b"\x00\x01", U64_MAX)
            ),
        )
    ),
    ("to_tensor_source", "fetch"): FetchTensor("7-1", 4_194_304, 524_288),
    ("to_tensor_source", "release"): ReleaseTensor("7-1"),
    ("from_tensor_source", "chunk"): TensorChunk("7-1", 4_194_304, b"\x00\x3c"),
    ("from_tensor_source", "unknown"): TensorUnknown("7-1"),
    ("multimodal", "an image and embeddings"): MultimodalInput(
        "USER: <image> and <image>?",
        (
            MediaItem(MediaKind.IMAGE, b"\x89PNG", "image/png", digest_media(b"\x89PNG"), 3, 576, 336, 224),
            MediaItem(MediaKind.EMBEDDINGS, b"", "application/x-safetensors", digest_media(b"")),
        ),
    ),
}
KEYS = list(GOLDEN)


def _read_golden() -> dict[tuple[str, str], bytes]:
    frames: dict[tuple[str, str], str] = {}
    key = ("", "")
    for line in GOLDEN_FILE.read_text().splitlines():
        if line.startswith("["):
            family, _, case = line.strip("[]").partition(": ")
            key = (family, case)
            frames[key] = ""
        elif line.startswith("  "):
            frames[key] += line
    return {key: bytes.fromhex(text) for key, text in frames.items()}


FRAMES = _read_golden()


def _fault(name: str, frame: bytes) -> DecodeError | None:
    """Decode hostile bytes: a value or a ``DecodeError`` is fine, anything else fails the test."""
    try:
        CODECS[name].decode(frame)
    except DecodeError as error:
        return error
    return None


class TestGoldenFrames:
    def test_every_case_has_a_frame_and_every_frame_a_case(self) -> None:
        assert set(FRAMES) == set(GOLDEN)

    def test_every_message_of_the_contract_has_a_case(self) -> None:
        """A message that is added to a module of ``wire`` needs a golden frame."""
        seen: set[type] = set()

        def visit(value: Any) -> None:
            if isinstance(value, msgspec.Struct):
                seen.add(type(value))
                for field in value.__struct_fields__:
                    visit(getattr(value, field))
            elif isinstance(value, list | tuple):
                for item in value:
                    visit(item)

        visit(list(GOLDEN.values()))

        assert set(messages()) <= seen
        assert {family for family, _ in GOLDEN} == set(CODECS)

    @for_each("key", KEYS)
    def test_encoding_is_unchanged(self, key: tuple[str, str]) -> None:
        assert CODECS[key[0]].encode(GOLDEN[key]).hex() == FRAMES[key].hex()

    @for_each("key", KEYS)
    def test_decoding_yields_the_value(self, key: tuple[str, str]) -> None:
        assert CODECS[key[0]].decode(FRAMES[key]) == GOLDEN[key]

    @for_each("key", KEYS)
    def test_a_memoryview_decodes_like_bytes(self, key: tuple[str, str]) -> None:
        assert CODECS[key[0]].decode(memoryview(FRAMES[key])) == GOLDEN[key]

    def test_feed_frames_carry_the_offset_big_endian_so_that_bytes_sort_like_numbers(self) -> None:
        assert feed.encode_alive(258, b"")[1] == bytes.fromhex("0000000000000102")
        assert feed.FEED_TOPIC == b"poolgrid"
        assert (ingest.BATCH_FRAME, ingest.CONTROL_FRAME) == (b"B", b"C")

    def test_a_worker_key_reads_as_id_and_rank(self) -> None:
        record = GOLDEN[("journal_record", "a record")]

        assert str(record.worker) == "w1/3"
        assert str(_batch().worker) == "w1"


def _with_a_byte_more(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a message once for each packed field in it, with a byte too much there, and which field it was."""
    if isinstance(value, msgspec.Struct):
        hints = get_type_hints(type(value), include_extras=True)
        for name in value.__struct_fields__:
            field = getattr(value, name)
            where = f"{path}.{name}" if path else f"{type(value).__name__}.{name}"
            if hints[name] in (PackedHashes, PackedTokens):
                yield where, msgspec.structs.replace(value, **{name: field + b"x"})
            else:
                for inner, changed in _with_a_byte_more(field, where):
                    yield inner, msgspec.structs.replace(value, **{name: changed})
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            for inner, changed in _with_a_byte_more(item, f"{path}[{at}]"):
                yield inner, type(value)([*value[:at], changed, *value[at + 1 :]])


TAMPERED = [(key, where, changed) for key in KEYS for where, changed in _with_a_byte_more(GOLDEN[key])]


class TestPackedFields:
    """A golden frame of every message and of every event is there, so a packed field that nobody checks is found."""

    def test_there_are_some_in_events_requests_and_answers(self) -> None:
        fields = {re.sub(r"\[\d+\]", "", where) for _, where, _ in TAMPERED}

        assert fields > {
            "EventBatch.events.sequence_hashes",
            "Generate.token_ids",
            "SnapshotPart.chains.sequence_hashes",
        }

    @for_each("key, where, changed", TAMPERED)
    def test_one_of_an_odd_length_is_refused_by_name(self, key: tuple[str, str], where: str, changed: Any) -> None:
        codec_of = CODECS[key[0]]
        frame = msgspec.msgpack.encode(changed)

        with pytest.raises(DecodeError, match="allowed are multiples of"):
            codec_of.decode(frame)


class TestEvolution:
    """A reader ignores trailing fields it does not know; a missing trailing field takes its default."""

    @for_each("key", KEYS)
    def test_unknown_trailing_fields_are_ignored(self, key: tuple[str, str]) -> None:
        fields = msgspec.msgpack.decode(FRAMES[key])
        newer = msgspec.msgpack.encode([*fields, "a later field", {"of": ["any", 1, None, 2.5, b"kind"]}])

        assert CODECS[key[0]].decode(newer) == GOLDEN[key]

    def test_unknown_trailing_fields_of_an_event_are_ignored(self) -> None:
        fields = msgspec.msgpack.decode(codec.event_batch.encode(_batch(PrefillCompleted("r-1"))))
        fields[5][0].append([1, 2, 3])

        assert codec.event_batch.decode(msgspec.msgpack.encode(fields)) == _batch(PrefillCompleted("r-1"))

    @pytest.mark.parametrize(
        ("name", "value", "dropped"),
        [
            ("event_batch", _batch(CacheCleared()), 1),
            ("to_worker", Generate("r-1", b"", Sampling(1)), 9),
            ("from_worker", Pong(1, 2), 1),
            ("from_worker", KvOffered("t", True), 2),
            ("journal_record", JournalRecord(0, "w1", 0, 0, 0, 0, 0, []), 2),
        ],
    )
    def test_missing_trailing_fields_take_their_defaults(self, name: str, value: Any, dropped: int) -> None:
        fields = msgspec.msgpack.decode(CODECS[name].encode(value))

        older = msgspec.msgpack.encode(fields[:-dropped])

        assert CODECS[name].decode(older) == value
        assert _fault(name, msgspec.msgpack.encode(fields[: -dropped - 1])) is not None

    def test_an_older_card_without_optional_fields_is_understood(self) -> None:
        fields = msgspec.msgpack.decode(codec.event_batch.encode(_batch(WorkerJoined(SMALL_CARD))))
        fields[5][0][1] = fields[5][0][1][:5]

        assert codec.event_batch.decode(msgspec.msgpack.encode(fields)) == _batch(WorkerJoined(SMALL_CARD))

    @pytest.mark.parametrize("name", [name for name in CODECS if name not in ("event_batch", "journal_record")])
    def test_an_unknown_message_tag_is_a_decode_error(self, name: str) -> None:
        assert _fault(name, msgspec.msgpack.encode(["MessageOfTheFuture", 1])) is not None

    def test_an_unknown_event_tag_is_a_decode_error_that_names_it(self) -> None:
        fields = msgspec.msgpack.decode(codec.event_batch.encode(_batch(CacheCleared())))
        fields[5] = [["BlocksTeleported", 1]]

        with pytest.raises(DecodeError, match=r"an event batch: .*BlocksTeleported"):
            codec.event_batch.decode(msgspec.msgpack.encode(fields))


class TestChecks:
    """What types alone do not say is checked too, and the error says where."""

    @pytest.mark.parametrize(
        ("name", "value", "where"),
        [
            ("event_batch", _batch(BlocksStored(None, b"1234567")), r"BlocksStored\.sequence_hashes: 7 bytes"),
            ("event_batch", _batch(CacheCleared(), BlocksRemoved(b"123456789")), r"BlocksRemoved\.sequence_hashes"),
            ("event_batch", _batch(BlocksShared(b"1")), r"BlocksShared\.sequence_hashes: 1 bytes"),
            ("event_batch", _batch(BlocksReleased(b"1")), r"BlocksReleased\.sequence_hashes: 1 bytes"),
            ("journal_record", JournalRecord(0, "w", 0, 0, 0, 0, 0, [BlocksRemoved(b"1")]), "BlocksRemoved"),
            ("to_worker", Generate("r", b"12345", Sampling(1)), r"Generate\.token_ids: 5 bytes"),
            ("from_worker", TokenBatch(0, [TokenDelta("r", 0, b"1")]), r"TokenDelta\.token_ids: 1 bytes"),
            ("to_pool", Select(1, "r", "m", Stage.WHOLE, 1, b"1"), r"Select\.sequence_hashes: 1 bytes"),
            ("to_pool", Probe(1, "m", Stage.WHOLE, 1, b"123"), r"Probe\.sequence_hashes: 3 bytes"),
            ("from_worker", KvOffered("t", True, b"1234"), r"KvOffered\.sequence_hashes: 4 bytes"),
            (
                "from_feed",
                SnapshotPart(0, 0, 0, True, [], [(0, BlockChain(None, b"123"))]),
                r"BlockChain\.sequence_hashes: 3 bytes",
            ),
        ],
    )
    def test_packed_bytes_of_a_broken_length_are_refused(self, name: str, value: Any, where: str) -> None:
        with pytest.raises(DecodeError, match=where):
            CODECS[name].decode(CODECS[name].encode(value))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("to_worker", Cancel("x" * (limits.IDENTIFIER_BYTES_MAX + 1))),
            ("to_worker", Ping(-1)),
            ("to_worker", FetchKv("x" * (limits.IDENTIFIER_BYTES_MAX + 1))),
            ("to_worker", ReleaseKv("x" * (limits.IDENTIFIER_BYTES_MAX + 1))),
            ("to_worker", Drain(-1)),
            ("to_worker", Drain(limits.DRAIN_TIMEOUT_MS_MAX + 1)),
            ("from_worker", KvOffered("t", True, b"", U32_MAX + 1)),
            ("from_worker", KvOffered("t", True, bytes(8 * limits.BLOCKS_PER_EVENT_MAX + 8))),
            ("to_worker", Generate("r", b"", Sampling(U32_MAX + 1))),
            ("to_worker", Generate("r", b"", Sampling(1, logprobs=limits.LOGPROBS_MAX + 1))),
            ("to_worker", Generate("r", b"", Sampling(1), stop_token_ids=(1,) * (limits.STOP_TOKENS_MAX + 1))),
            ("to_consolidator", Goodbye("w", 0, 0, "x" * (limits.TEXT_CHARS_MAX + 1))),
            ("event_batch", _batch(*[CacheCleared()] * (limits.EVENTS_PER_BATCH_MAX + 1))),
            ("event_batch", _batch(BlocksStored(None, bytes(8 * limits.BLOCKS_PER_EVENT_MAX + 8)))),
            (
                "to_pool",
                Select(1, "r", "m", Stage.WHOLE, 1, b"", (WorkerRank("w"),) * (limits.WORKERS_EXCLUDED_MAX + 1)),
            ),
            ("to_pool", Renew((Reservation("r", WorkerRank("w")),) * (limits.RENEWALS_MAX + 1))),
            (
                "from_pool",
                SelectRefused(
                    1, SelectRefusal.BUSY, "", None, ((WorkerRank("w"), ""),) * (limits.REFUSAL_REASONS_MAX + 1)
                ),
            ),
            ("from_feed", Records(0, [b""] * (limits.REPLAY_RECORDS_MAX + 1), 0)),
        ],
        ids=lambda value: value if isinstance(value, str) else type(value).__name__,
    )
    def test_values_beyond_their_limit_are_refused(self, name: str, value: Any) -> None:
        assert _fault(name, CODECS[name].encode(value)) is not None

    def test_an_oversize_value_of_our_own_is_not_encoded(self) -> None:
        with pytest.raises(LimitError, match="an answer of the feed is") as caught:
            codec.from_feed.encode(Records(0, [bytes(FRAME_BYTES_MAX)], 0))

        assert caught.value.value > caught.value.maximum == FRAME_BYTES_MAX

    @pytest.mark.parametrize("name", CODECS)
    def test_an_oversize_frame_is_refused_before_it_is_read(self, name: str) -> None:
        """The frame only claims its length: whoever reads it fails with another error than the one expected."""

        class Unreadable(bytes):
            def __len__(self) -> int:
                return FRAME_BYTES_MAX + 1

        with pytest.raises(DecodeError, match=f"{FRAME_BYTES_MAX + 1} bytes, allowed are at most {FRAME_BYTES_MAX}"):
            CODECS[name].decode(Unreadable())


HEADERS = {"str32": b"\xdb", "bin32": b"\xc6", "array32": b"\xdd", "map32": b"\xdf", "ext32": b"\xc9"}


def _value_spans(frame: bytes) -> Iterator[int]:
    """Offsets at which a msgpack value of the frame starts."""
    at = 0
    while at < len(frame):
        yield at
        code = frame[at]
        if code <= 0x7F or code >= 0xE0 or 0x80 <= code <= 0x9F or code in (0xC0, 0xC2, 0xC3):
            at += 1
        elif 0xA0 <= code <= 0xBF:
            at += 1 + (code & 0x1F)
        elif code in (0xC4, 0xD9):
            at += 2 + frame[at + 1]
        elif code in (0xCA, 0xCB, 0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3):
            at += 1 + {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}[code]
        elif code == 0xDC:  # an array of more than 15 values
            at += 3
        else:  # pragma: no cover - golden frames hold nothing else
            raise AssertionError(f"byte {code:#x} in a golden frame")


class TestHostileBytes:
    """Decoding returns a value or raises ``DecodeError``, in proportion to the bytes given. Nothing else."""

    @given(name=st.sampled_from(sorted(CODECS)), frame=st.binary(max_size=512))
    def test_random_bytes(self, name: str, frame: bytes) -> None:
        _fault(name, frame)

    @given(
        name=st.sampled_from(sorted(CODECS)),
        value=st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), U64_MAX) | st.floats() | st.text() | st.binary(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(-(2**63), U64_MAX), inner),
        ),
        tag=st.sampled_from([type(value).__name__ for value in GOLDEN.values()]) | st.none(),
    )
    def test_well_formed_msgpack_of_any_shape(self, name: str, value: Any, tag: str | None) -> None:
        _fault(name, msgspec.msgpack.encode(value if tag is None else [tag, value, value, value]))

    @for_each("key", KEYS)
    def test_every_truncation_is_a_decode_error(self, key: tuple[str, str]) -> None:
        frame = FRAMES[key]

        accepted = [end for end in range(len(frame)) if _fault(key[0], frame[:end]) is None]

        assert accepted == []

    @for_each("key", KEYS)
    def test_trailing_bytes_are_a_decode_error(self, key: tuple[str, str]) -> None:
        assert _fault(key[0], FRAMES[key] + b"\x00") is not None

    @for_each("key", KEYS)
    def test_every_single_byte_set_to_a_hostile_value(self, key: tuple[str, str]) -> None:
        """All type codes that claim a length or nest, at every position; other values are hypothesis' below."""
        frame = bytearray(FRAMES[key])
        for at, original in enumerate(FRAMES[key]):
            for code in (0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xC0, 0xC1, *range(0xC4, 0xE0), 0xFF):
                frame[at] = code
                _fault(key[0], bytes(frame))
            frame[at] = original

    @given(key=st.sampled_from(KEYS), data=st.data())
    def test_single_byte_mutations(self, key: tuple[str, str], data: st.DataObject) -> None:
        frame = bytearray(FRAMES[key])
        at = data.draw(st.integers(0, len(frame) - 1), label="position")
        frame[at] = data.draw(st.integers(0, 255), label="byte")

        _fault(key[0], bytes(frame))

    @given(source=st.sampled_from(KEYS), name=st.sampled_from(sorted(CODECS)))
    def test_a_frame_of_another_family_is_a_decode_error(self, source: tuple[str, str], name: str) -> None:
        pairs = {frozenset({"event_batch", "journal_record"})}
        if source[0] != name and frozenset({source[0], name}) not in pairs:
            assert _fault(name, FRAMES[source]) is not None

    @pytest.mark.parametrize("name", CODECS)
    @for_each("depth, opening", product([10_000, 1_000_000], [b"\x91", b"\x81\x01", b"\xdd\x00\x00\x00\x01"]))
    def test_deep_nesting_is_a_decode_error(self, name: str, depth: int, opening: bytes) -> None:
        """At the top, and where it hides best: in a trailing field that the reader skips.

        There it is an error once it is too deep for the stack, which Python 3.14 measures; before it counts calls.
        """
        nested = opening * depth + b"\xc0"
        golden = next(frame for key, frame in FRAMES.items() if key[0] == name)
        assert 0x90 <= golden[0] < 0x9F
        skipped = bytes([golden[0] + 1]) + golden[1:] + nested

        assert _fault(name, nested) is not None
        assert _fault(name, skipped) is not None or (depth < 1_000_000 and sys.version_info >= (3, 14))

    @pytest.mark.parametrize("name", CODECS)
    @for_each("kind, claimed", product(HEADERS, [U32_MAX, 2**28]))
    def test_a_claimed_length_is_never_allocated(self, name: str, kind: str, claimed: int) -> None:
        """The claim replaces each value of each golden frame in turn; the peak stays in proportion to the bytes."""
        claim = HEADERS[kind] + struct.pack(">I", claimed)
        tracemalloc.start()
        try:
            for key, frame in FRAMES.items():
                if key[0] != name:
                    continue
                for at in _value_spans(frame):
                    hostile = frame[:at] + claim + frame[at:][:64]
                    fault, peaks = None, list[int]()
                    # Other threads of the process may allocate meanwhile; what a claim allocates it does each time.
                    while not peaks or (peaks[-1] >= 64 * 1024 + 100 * len(hostile) and len(peaks) < 3):
                        tracemalloc.reset_peak()
                        before, _ = tracemalloc.get_traced_memory()
                        fault = _fault(name, hostile)
                        peaks.append(tracemalloc.get_traced_memory()[1] - before)

                    assert fault is not None
                    assert min(peaks) < 64 * 1024 + 100 * len(hostile)
                    del fault
        finally:
            tracemalloc.stop()

    def test_memory_stays_in_proportion_for_the_densest_legal_frames(self) -> None:
        """An object per byte is the worst that a frame can ask for: small bodies, as many as the limit allows."""
        count = limits.EVENTS_PER_BATCH_MAX
        dense = {
            "event_batch": codec.event_batch.encode(_batch(*[PrefillCompleted("")] * count)),
            "from_worker": codec.from_worker.encode(TokenBatch(0, [TokenDelta("", 0, b"")] * count)),
            "from_feed": codec.from_feed.encode(Records(0, [b""] * limits.REPLAY_RECORDS_MAX, 0)),
        }
        for name, frame in dense.items():
            tracemalloc.start()
            try:
                CODECS[name].decode(frame)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()

            assert peak < 64 * 1024 + 40 * len(frame), name


def test_a_decode_error_names_what_was_decoded_and_keeps_it_as_fields() -> None:
    with pytest.raises(DecodeError) as caught:
        codec.to_feed.decode(b"\xc1")

    assert caught.value.what == "a request to the feed"
    assert str(caught.value) == f"cannot decode a request to the feed: {caught.value.detail}"
    assert caught.value.__cause__ is None


SYSTEM = RetainedTokens(0, 10, 80, 5000)
DOCUMENT = RetainedTokens(12, None, 5)


def test_a_block_has_what_the_range_says_in_which_it_begins() -> None:
    retention = KvRetention((SYSTEM, DOCUMENT), 20, 9)

    blocks = [(80, 5000), (80, 5000), (80, 5000), (5, None), (5, None), (20, 9), (20, 9)]
    for start in range(8):
        for end in range(start, 8):
            assert retention.of_blocks(4, start, end, prompt_tokens=18) == blocks[start:end]
    nothing = (None, None)
    assert KvRetention((SYSTEM,)).of_blocks(8, 0, 3, prompt_tokens=24) == [(80, 5000), (80, 5000), nothing]


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ((RetainedTokens(4, 4),), "ranges[0] ends at 4, allowed is more than where it starts (4)"),
        ((SYSTEM, RetainedTokens(9)), "ranges[1] starts at 9, and the one before it reaches to 10"),
        ((DOCUMENT, RetainedTokens(99)), "ranges[1] starts at 99, and the one before it reaches to the end"),
    ],
)
def test_ranges_that_overlap_or_are_empty_are_no_message(ranges: tuple[RetainedTokens, ...], words: str) -> None:
    retention = KvRetention(ranges)
    assert retention.fault.startswith(words)
    frame = msgspec.msgpack.encode(Generate("r", b"", Sampling(1), retention=retention))

    with pytest.raises(DecodeError, match=r"Generate\.retention"):
        codec.to_worker.decode(frame)


def test_priorities_can_be_capped() -> None:
    assert KvRetention((SYSTEM, DOCUMENT), 90).capped(35) == KvRetention(
        (RetainedTokens(0, 10, 35, 5000), DOCUMENT), 35
    )
