"""Pictures in KV routing: named to the engine, found again in its events under the names that routers compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from poolgrid.kernel.kv_events.cache_events import Stored, StoredBlock
from poolgrid.kernel.kv_events.trtllm import parse_event
from poolgrid.kernel.requests.inference import InferenceRequest
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.card import MediaSpec, ResizedGrid, TiledGrid
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import BlocksStored
from poolgrid.kernel.wire.hashing import BASE_SEED, hash_seed, pack_tokens, unpack_hashes
from poolgrid.kernel.wire.identifiers import Role, Stage
from poolgrid.kernel.wire.multimodal import MediaItem, MediaKind, MultimodalInput, digest_media, media_hash_u64
from poolgrid.kernel.wire.requests import Generate, Routing, Sampling
from poolgrid.kernel.worker_protocol.event_translation import Counts
from poolgrid.plugins.trtllm import media as media_names
from poolgrid.plugins.trtllm.arguments.engine_arguments import resolve_files
from poolgrid.plugins.trtllm.core import disaggregated_params as params_codec
from poolgrid.plugins.trtllm.core.model_facts import image_rule
from poolgrid.plugins.trtllm.media import MediaNames, media_name
from poolgrid.plugins.trtllm.model_files import read_model_facts
from poolgrid.plugins.trtllm.opening import LoadedEngine, make_card
from poolgrid.plugins.trtllm.settings import TrtllmWorkerSettings
from poolgrid.server.frontend.media.placeholders import place_media
from poolgrid.server.serving.prompt_paths import TenantPaths, prompt_path
from poolgrid.server.workers.engines.root_seeds import RootSeeds
from tests.fakes import tensorrt_llm_of
from tests.fakes.tensorrt_llm._fake.pictures import ModelTokenizer
from tests.trtllm.engines import BLOCK, SEED, RunningEngine, running_engine
from tests.trtllm.seeing import IMAGE_TOKEN, IMAGE_TOKEN_ID, STAND_IN, VOCABULARY_SIZE, make_model, picture

TEXT = f"Look at this: {IMAGE_TOKEN} and tell me, what do you see in it?"
HEAD_FIRST = f"{IMAGE_TOKEN} What do you see in this picture, and in no other?"
"""A prompt whose first block a picture touches."""

GRID = ResizedGrid(14, 2, 28 * 28, 12_845_056)
SPEC = MediaSpec(("image",), placeholder_token_id=IMAGE_TOKEN_ID, resized_grid=GRID, adds_special_tokens=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "eyes")


class Client:
    """Makes requests as a front end does, and paths as a router does."""

    def __init__(self, model: Path, spec: MediaSpec = SPEC) -> None:
        self._tokenizer = ModelTokenizer(model / "tokenizer.json")
        self._spec = spec

    def request(self, request_id: str, text: str, pictures: Sequence[bytes], salt: str = "") -> InferenceRequest:
        items = [
            MediaItem(MediaKind.IMAGE, data, "image/png", digest_media(data), width=112, height=84) for data in pictures
        ]
        tokens, placed = place_media(text, items, self._spec, lambda part: pack_tokens(self._tokenizer.encode(part)))
        return InferenceRequest(
            request_id,
            "eyes",
            tokens,
            Sampling(8, seed=SEED),
            (),
            cache_salt=salt,
            multimodal=MultimodalInput(text, placed),
        )

    def path(self, request: InferenceRequest) -> list[int]:
        return list(prompt_path(request, BLOCK, TenantPaths(1024)))


def leg(request: InferenceRequest, stage: Stage = Stage.WHOLE, params: bytes | None = None) -> Generate:
    media = request.multimodal
    assert media is not None
    if params is not None:
        media = msgspec.structs.replace(
            media, items=tuple(msgspec.structs.replace(item, data=b"") for item in media.items)
        )
    return Generate(
        request.request_id,
        request.token_ids,
        request.sampling,
        routing=Routing(cache_salt=request.cache_salt),
        disaggregated_params=params,
        multimodal=codec.multimodal.encode(media),
        stage=stage,
    )


def told(engine: RunningEngine) -> set[int]:
    """Every sequence hash that routers were told of."""
    stored = [event for event in engine.events.get(0, []) if isinstance(event, BlocksStored)]
    return {each for event in stored for each in unpack_hashes(event.sequence_hashes)}


def counts(engine: RunningEngine) -> Counts:
    """What routers were not told of."""
    return engine.engine._feed._translators[0].counts


async def tells(engine: RunningEngine, path: Sequence[int]) -> None:
    await engine.until(lambda: told(engine).issuperset(path))


def seeing(model: Path) -> dict[str, Any]:
    return {"modality": "multimodal", "max_batch_size": 64, "model_path": str(model)}


@pytest.mark.parametrize("text", [TEXT, HEAD_FIRST])
async def test_a_router_finds_the_blocks_of_a_picture_and_of_no_other_picture_or_tenant(model: Path, text: str) -> None:
    client = Client(model)
    with tensorrt_llm_of("1.3"):
        async with running_engine(override_engine_args="", **seeing(model)) as engine:
            red = client.request("red", text, [picture("red")])
            path = client.path(red)
            assert len(path) == len(red.token_ids) // 4 // BLOCK, "every whole block is compared"
            first = await engine.finish(leg(red))
            await tells(engine, path[:-1])
            assert engine.deltas["red"][0].cached_tokens == 0
            assert first.finish_reason == "length"

            await engine.finish(leg(client.request("again", text, [picture("red")])))
            cached = engine.deltas["again"][0].cached_tokens
            assert cached == (len(red.token_ids) // 4 - 1) // BLOCK * BLOCK

            blue = client.request("blue", text, [picture("blue")])
            before = client.path(blue)
            shared = [own == other for own, other in zip(before, path, strict=True)]
            assert shared == sorted(shared, reverse=True)
            assert told(engine).isdisjoint(before[sum(shared) :])
            await engine.finish(leg(blue))
            assert engine.deltas["blue"][0].cached_tokens == sum(shared) * BLOCK
            await tells(engine, before[:-1])

            tenant = client.request("tenant", text, [picture("red")], "another tenant")
            assert told(engine).isdisjoint(client.path(tenant))
            await engine.finish(leg(tenant))
            assert engine.deltas["tenant"][0].cached_tokens == 0
            await tells(engine, client.path(tenant)[:-1])
            assert engine.engine._feed._metrics.media_miscounted._value.get() == 0


async def test_two_pictures_in_a_block_and_one_twice_are_told_apart(model: Path) -> None:
    text = f"{IMAGE_TOKEN}{IMAGE_TOKEN} and {IMAGE_TOKEN}: which of these is not like the others?"

    client = Client(model)
    with tensorrt_llm_of("1.3"):
        async with running_engine(override_engine_args="", **seeing(model)) as engine:
            path: list[int] = []
            shared: set[int] = set()
            for name, colours in (("a", ("red", "blue", "red")), ("b", ("red", "red", "blue"))):
                request = client.request(name, text, [picture(colour) for colour in colours])
                shared = set(path) & set(client.path(request))
                path = client.path(request)
                await engine.finish(leg(request))
                await tells(engine, path[:-1])
            assert len(shared) == 12 // BLOCK, "the first picture alone"


async def test_a_version_that_takes_no_names_is_told_of_on_the_card_and_nothing_of_media_reaches_routers(
    model: Path,
) -> None:
    client = Client(model)
    async with running_engine(**seeing(model)) as engine:
        request = client.request("r", TEXT, [picture()])
        uncounted = Client(model, MediaSpec(("image",), placeholder_token_id=IMAGE_TOKEN_ID))
        before = uncounted.path(uncounted.request("s", TEXT, [picture()]))
        assert 0 < len(before) < len(client.path(request))
        await engine.finish(leg(request))
        await tells(engine, before)
        await engine.turned(lambda: counts(engine).multimodal_blocks)
        assert told(engine) == set(before)


async def test_the_card_has_the_rule_only_where_events_will_name_media(model: Path) -> None:
    cards = {}
    for version, more in (("1.2.1", {}), ("1.3", {}), ("1.3", {"tokens_per_image": 12})):
        settings = TrtllmWorkerSettings.model_validate({**seeing(model), "kv_block_size": BLOCK, **more})
        with tensorrt_llm_of(version):
            async with running_engine(override_engine_args="", **seeing(model)) as engine:
                library = engine.engine._calls.library
                named = engine.engine.names_media and library.names_media
                loaded = LoadedEngine(engine.engine, library.version, read_model_facts(str(model)), named)
                cards[f"{version}{more}"] = make_card(settings, resolve_files(settings), loaded, 1, 2).media
    old, new, fixed = cards.values()
    kinds = ("image",)
    assert old == MediaSpec(kinds, placeholder_token_id=IMAGE_TOKEN_ID, adds_special_tokens=True)
    assert new == msgspec.structs.replace(old, resized_grid=GRID)
    assert fixed == msgspec.structs.replace(old, tokens_per_image=12)


async def test_embeddings_of_an_encode_worker_are_found_by_the_digest_that_came_with_them(model: Path) -> None:
    client = Client(model)
    async with (
        running_engine(Role.ENCODE, model_path=str(model)) as encode,
        running_engine(**seeing(model)) as engine,
    ):
        request = client.request("r", HEAD_FIRST, [picture()])
        encoded = await encode.finish(leg(request, Stage.ENCODE))
        await engine.finish(leg(request, params=encoded.disaggregated_params))
        await tells(engine, client.path(request)[:-1])
        salted = client.request("s", HEAD_FIRST, [picture()], "a tenant")
        encoded = await encode.finish(leg(salted, Stage.ENCODE))  # a handle can be opened once
        await engine.finish(leg(salted, params=encoded.disaggregated_params))
        await engine.turned(lambda: counts(engine).foreign_blocks)
        assert told(engine).isdisjoint(client.path(salted)), "its first block cannot be told from that of others"


async def test_a_wrong_rule_is_noticed(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrong = Client(model, MediaSpec(("image",), placeholder_token_id=IMAGE_TOKEN_ID, tokens_per_image=11))
    with tensorrt_llm_of("1.3"):
        async with running_engine(override_engine_args="", **seeing(model)) as engine:
            for name in ("r", "s"):
                await engine.finish(leg(wrong.request(name, TEXT, [picture()])))
            assert engine.engine._feed._metrics.media_miscounted._value.get() == 2
    assert sum("its router counted" in record.message for record in caplog.records) == 1


# -- the parts -----------------------------------------------------------------------------------------------------


def stored(*keys: Any, tokens: Sequence[int] = (1, STAND_IN, STAND_IN + 5, 4), **more: Any) -> dict[str, Any]:
    block = {
        "block_hash": 7,
        "tokens": [{"token_id": each, "token_extra_id": 0} for each in tokens],
        "cache_level": 0,
        "priority": 35,
        "mm_keys": list(keys),
        **more,
    }
    return {"event_id": 0, "window_size": 8, "data": {"type": "stored", "parent_hash": None, "blocks": [block]}}


def block_of(event: dict[str, Any]) -> StoredBlock:
    parsed = parse_event(event)
    assert isinstance(parsed, Stored)
    return parsed.blocks[0]


@pytest.mark.parametrize("key", [{"hash": 1}, {"hash": "a" * 257}, "a", None, {"hash": ["a"]}])
def test_a_medium_without_a_proper_name_is_refused(key: Any) -> None:
    with pytest.raises(DecodeError):
        parse_event(stored(key))


def test_names_of_our_own_say_medium_and_tenant() -> None:
    medium = digest_media(b"a cat")
    seed = hash_seed("", "a tenant")
    names = MediaNames(VOCABULARY_SIZE, IMAGE_TOKEN_ID)
    name = media_name(medium, seed)
    assert len(name) == 32
    (made,) = names([block_of(stored({"hash": name}))])
    assert made.media_hashes == (media_hash_u64(medium),)
    assert (made.hash_seed, made.multimodal) == (seed, False)
    assert made.tokens == pack_tokens([1, IMAGE_TOKEN_ID, IMAGE_TOKEN_ID, 4])
    assert RootSeeds(4)(made) == seed


def test_a_digest_tells_the_tenant_only_while_it_came_with_one() -> None:
    names, medium, digest = MediaNames(VOCABULARY_SIZE, IMAGE_TOKEN_ID), digest_media(b"a cat"), "d" * 64

    def seed() -> int | None:
        (block,) = names([block_of(stored({"hash": digest}))])
        assert block.media_hashes == (media_hash_u64(medium),)
        return RootSeeds(4)(block)

    names.note([digest], [medium], BASE_SEED)
    assert seed() == BASE_SEED
    names.note([digest], [medium], hash_seed("", "a tenant"))
    assert seed() is None
    names.note([digest], [medium], BASE_SEED)
    assert seed() is None


def test_digests_are_forgotten_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_names, "DIGESTS_MAX", 1)
    names = MediaNames(VOCABULARY_SIZE, IMAGE_TOKEN_ID)
    names.note(["a" * 64, "b" * 64], [bytes(32), bytes(32)], BASE_SEED)
    first, second = names([block_of(stored({"hash": each * 64})) for each in "ab"])
    assert (first.multimodal, second.multimodal) == (True, False)


def test_digests_are_read_from_params_as_events_write_them() -> None:
    words = [[-1, 1, 2, 3, 4, 5, 6, 7]]
    packed = msgspec.msgpack.encode({"multimodal_hashes": words, "handles": msgspec.msgpack.Ext(1, b"\x90")})
    assert params_codec.media_digests(packed) == ["ffffffff" + "".join(f"{each:08x}" for each in range(1, 8))]
    assert params_codec.media_digests(b"\x80") == params_codec.media_digests(b"\xc1") == []


@pytest.mark.parametrize(
    ("architecture", "config", "preprocessor", "rule"),
    [
        (
            "Qwen3VLForConditionalGeneration",
            {},
            {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
            ResizedGrid(16, 2, 65_536, 16_777_216),
        ),
        (
            "LlavaNextForConditionalGeneration",
            {
                "vision_config": {"image_size": 336, "patch_size": 14},
                "image_grid_pinpoints": [[336, 672], [672, 336]],
                "vision_feature_select_strategy": "default",
            },
            {},
            TiledGrid(336, 14, ((336, 672), (672, 336))),
        ),
        ("LlavaNextForConditionalGeneration", {"vision_config": {}}, {}, None),
        ("Qwen2VLForConditionalGeneration", {}, {"patch_size": 0, "merge_size": 2, "size": {}}, None),
        ("Qwen2VLForConditionalGeneration", {}, {"size": "large"}, None),
        ("Gemma3ForConditionalGeneration", {}, {}, None),
    ],
)
def test_the_rule_of_a_model_is_in_its_files(
    architecture: str, config: dict[str, Any], preprocessor: dict[str, Any], rule: Any
) -> None:
    assert image_rule(architecture, config, preprocessor) == rule
