"""Requests with pictures before engine servers: token ids and pictures together, and blocks that nobody mistakes."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from poolgrid.wire import codec
from poolgrid.wire.hashing import BASE_SEED, block_hashes, pack_tokens, sequence_hashes
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.multimodal import MediaItem, MediaKind, MultimodalInput, digest_media
from poolgrid.wire.requests import Generate, Routing, Sampling
from poolgrid.workers.core.refusal import RefusedError, UnableError
from poolgrid.workers.engines.server.core.calls import ServerDialect
from poolgrid.workers.engines.server.dialects.sglang import SglangDialect
from poolgrid.workers.engines.server.dialects.trtllm_serve import TrtllmServeDialect
from poolgrid.workers.engines.server.dialects.vllm import VllmDialect
from tests.fakes.engine_server.sglang import SglangServer
from tests.fakes.engine_server.trtllm_serve import TrtllmServe
from tests.fakes.engine_server.vllm import (
    IMAGE_TOKEN,
    Options,
    VllmServer,
    answer_of,
    filled_in,
    tokens_of_picture,
)
from tests.workers.server.running import Front, index_of, worker_before

CAT, DOG = b"\x89PNG cat", b"\x89PNG dog, a little longer"
BEFORE = list(range(10, 21))  # two blocks of text, and most of a third
AFTER = list(range(30, 36))


def picture(data: bytes, first_token: int = 0, token_count: int = 0, **changes: Any) -> MediaItem:
    item = MediaItem(MediaKind.IMAGE, data, "image/png", digest_media(data), first_token, token_count)
    return msgspec.structs.replace(item, **changes)


def seeing(prompt: list[int], *items: MediaItem, name: str = "r", **sampling: Any) -> Generate:
    media = codec.multimodal.encode(MultimodalInput("as text", items))
    return Generate(name, pack_tokens(prompt), Sampling(**{"max_tokens": 6, **sampling}), multimodal=media)


def url(data: bytes) -> str:
    return f"data:image/png;base64,{b64encode(data).decode()}"


def asked(dialect: ServerDialect, request: Generate) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(dialect.call(request).body)
    return body


VLLM = VllmDialect("m", ranks=(4, 5), priorities=True, takes_pictures=True)
SGLANG = SglangDialect(takes_pictures=True)


def test_vllm_is_asked_with_token_ids_and_pictures_that_are_named_by_their_bytes() -> None:
    request = seeing([5, IMAGE_TOKEN, 6], picture(CAT, 1), temperature=0.5, logprobs=2, guided_regex="a+")
    routing = Routing(dp_rank=1, priority=3, lora_name="poet", cache_salt="s")
    call = VLLM.call(msgspec.structs.replace(request, routing=routing, stop_token_ids=(2,)))

    assert (call.path, call.streams) == ("/inference/v1/generate", True)
    assert call.headers == ("X-Request-Id: r", "X-data-parallel-rank: 5")
    assert json.loads(call.body) == {
        "model": "poet",
        "token_ids": [5, IMAGE_TOKEN, 6],
        "content_parts": [{"type": "image_url", "url": url(CAT), "uuid": digest_media(CAT).hex()}],
        "sampling_params": {
            "max_tokens": 6,
            "detokenize": False,
            "temperature": 0.5,
            "logprobs": 2,
            "structured_outputs": {"regex": "a+"},
            "stop_token_ids": [2],
        },
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "s",
        "priority": -3,
    }


def test_sglang_is_asked_with_both_at_its_own_endpoint() -> None:
    body = asked(SGLANG, seeing([5, IMAGE_TOKEN, 6, IMAGE_TOKEN], picture(CAT, 1), picture(DOG, 3)))

    assert (body["input_ids"], body["image_data"]) == ([5, IMAGE_TOKEN, 6, IMAGE_TOKEN], [url(CAT), url(DOG)])


@pytest.mark.parametrize(("dialect", "where"), [(VLLM, "token_ids"), (SGLANG, "input_ids")])
def test_placeholders_that_a_router_has_multiplied_are_one_token_again(dialect: ServerDialect, where: str) -> None:
    request = seeing(
        [5, *[IMAGE_TOKEN] * 3, 6, IMAGE_TOKEN, *[IMAGE_TOKEN] * 2],
        picture(CAT, 1, 3),
        picture(CAT, 5),
        picture(DOG, 6, 2),
    )

    assert asked(dialect, request)[where] == [5, IMAGE_TOKEN, 6, IMAGE_TOKEN, IMAGE_TOKEN]


@pytest.mark.parametrize("dialect", [VLLM, SGLANG])
@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (seeing([IMAGE_TOKEN], picture(CAT, kind=MediaKind.EMBEDDINGS)), UnableError, "media 0 are embeddings"),
        (seeing([IMAGE_TOKEN], picture(b"")), UnableError, "image 0 comes without its bytes"),
        (seeing([IMAGE_TOKEN], picture(CAT), prompt_logprobs=1), UnableError, "prompt_logprobs are set"),
        (msgspec.structs.replace(seeing([1], picture(CAT)), stage=Stage.PREFILL), UnableError, "whole requests only"),
        (msgspec.structs.replace(seeing([1], picture(CAT)), stage=Stage.DECODE), UnableError, "whole requests only"),
        (seeing([1, 2], picture(CAT, 1, 2)), RefusedError, "tokens 1 to 2 of 2"),
        (seeing([1, 2, 3], picture(CAT, 1, 2), picture(DOG, 0, 2)), RefusedError, "tokens 0 to 1 of 3"),
        (msgspec.structs.replace(seeing([1], picture(CAT)), multimodal=b"\xff"), RefusedError, "multimodal: "),
    ],
)
def test_what_cannot_go_with_token_ids_is_refused_by_name(
    dialect: ServerDialect, request_: Generate, error: type[RefusedError], words: str
) -> None:
    with pytest.raises(error, match=words):
        dialect.call(request_)


@pytest.mark.parametrize(
    ("dialect", "words"),
    [
        (VllmDialect("m"), "image_placeholder, and the server --enable-scale-out"),
        (SglangDialect(), "needs image_placeholder"),
        (TrtllmServeDialect("m"), "a worker with the engine trtllm does"),
    ],
)
def test_a_worker_that_takes_no_pictures_says_what_does(dialect: ServerDialect, words: str) -> None:
    with pytest.raises(UnableError, match=words):
        dialect.call(seeing([IMAGE_TOKEN], picture(CAT)))


def test_log_probabilities_beside_pictures_are_read_by_token_id() -> None:
    read = VLLM.call(seeing([IMAGE_TOKEN], picture(CAT), logprobs=1)).read
    piece = read(
        b'{"request_id":"x","output_mode":"tokens","choices":[{"index":0,"finish_reason":null,"token_ids":[11],"logprobs":'
        b'{"content":[{"token_id":11,"logprob":-2.0,"rank":2,"top_logprobs":[{"token_id":11,"logprob":-2.0,"rank":2},'
        b'{"token_id":3,"logprob":-0.5,"rank":1}]}]}}]}'
    )

    assert piece is not None
    assert piece.logprobs is not None
    assert [(each.token_id, each.logprob, each.alternatives) for each in piece.logprobs] == [(11, -2.0, ((3, -0.5),))]


def names_of(tokens: list[int]) -> set[int]:
    return set(sequence_hashes(block_hashes(pack_tokens(tokens), 4, BASE_SEED)))


async def answered(front: Front, request: Generate) -> int | None:
    """Ask, see that the answer is the model's own, and return how much was reused."""
    await front.router.send(request)
    await front.router.until_finished(request.request_id)
    last = front.router.last(request.request_id)
    assert last.error is None
    return next(
        each.cached_tokens for each in front.router.deltas[request.request_id] if each.cached_tokens is not None
    )


async def refused_to_start(server: VllmServer, engine: str, **changes: Any) -> str:
    with pytest.raises(ValueError, match="image_placeholder") as caught:
        async with worker_before(server, engine, image_placeholder="<image>", **changes):
            pass
    return str(caught.value)


async def test_pictures_before_vllm() -> None:
    context = zmq.asyncio.Context()
    server = VllmServer(context, Options(scale_out=True))
    await server.start()
    try:
        async with worker_before(server, image_placeholder="<image>") as front:
            media = front.journal.cards[0].media
            assert (media.kinds, media.placeholder, media.tokens_per_image) == (("image",), "<image>", 0)
            prompt = [*BEFORE, IMAGE_TOKEN, *AFTER]
            seen, _ = filled_in(prompt, [CAT])
            assert await answered(front, seeing(prompt, picture(CAT, 11), name="cold", logprobs=1)) == 0
            assert front.router.output("cold") == pack_tokens(answer_of(seen, 6))
            assert all(each.logprobs for each in front.router.deltas["cold"] if each.token_ids)
            # The same picture is reused with all of its tokens, another one is not, nor are its tokens as text.
            # More than the prompt that was asked cannot be: clients and counters subtract one from the other.
            assert (len(seen) - 1) // 4 * 4 > len(prompt)
            assert await answered(front, seeing(prompt, picture(CAT, 11), name="warm")) == len(prompt)
            assert await answered(front, seeing(prompt, picture(DOG, 11), name="other")) == 8
            text = msgspec.structs.replace(seeing(seen, picture(CAT)), request_id="text", multimodal=None)
            assert await answered(front, text) == 8
            await front.settled()
            # What the index has of the four: the text before the picture, and the one that is all text.
            held = index_of(front.journal.events)
            assert held == names_of([*seen, *answer_of(seen, 6)][: (len(seen) + 5) // 4 * 4])
            await server.reset_prefix_cache()
            await front.settled()
            await answered(front, seeing(prompt, picture(DOG, 11), name="again"))
            await front.consolidator.until(lambda journal: index_of(journal.events) == names_of(BEFORE[:8]))
            assert len(server.caches[0]._cached) > 2
        for options in (Options(), Options(scale_out=True, content_parts=False)):
            server.options = options
            words = await refused_to_start(server, "vllm")
            assert "image_placeholder is '<image>'" in words
            assert "start version 0.32 or newer with --enable-scale-out" in words
    finally:
        await server.stop()
        context.destroy(linger=0)


async def test_pictures_before_sglang() -> None:
    context = zmq.asyncio.Context()
    server = SglangServer(context, sees=True)
    await server.start()
    try:
        async with worker_before(server, "sglang", image_placeholder="<image>") as front:
            assert front.journal.cards[0].media.kinds == ("image",)
            prompt = [*BEFORE, IMAGE_TOKEN, *AFTER]
            assert await answered(front, seeing(prompt, picture(CAT, 11), name="cold")) == 0
            assert (len(prompt) - 1 + tokens_of_picture(CAT) - 1) // 4 * 4 > len(prompt)
            assert await answered(front, seeing(prompt, picture(CAT, 11), name="warm")) == len(prompt)
            assert await answered(front, seeing(prompt, picture(DOG, 11), name="other")) == 8
            await front.settled()
            held = index_of(front.journal.events)
            as_text, _ = filled_in(prompt, [CAT])
            assert held & names_of(as_text) == names_of(BEFORE[:8])
        server.sees = False
        assert "its model takes none (has_image_understanding)" in await refused_to_start(server, "sglang")
    finally:
        await server.stop()
        context.destroy(linger=0)


async def test_trtllm_serve_takes_none_and_roles_apart_take_none() -> None:
    context = zmq.asyncio.Context()
    server = TrtllmServe(context)
    await server.start()
    try:
        assert "a worker with --engine trtllm does" in await refused_to_start(server, "trtllm-serve", kv_block_size=4)
        assert "allowed is role aggregated" in await refused_to_start(server, "vllm", role="prefill")
    finally:
        await server.stop()
        context.destroy(linger=0)
