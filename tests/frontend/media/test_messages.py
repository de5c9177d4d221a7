"""Messages with media become a prompt with media in place: tokens, spans, text, items, in the order of the client."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from poolgrid.kernel.requests.inference import InferenceRequest, ServedModel
from poolgrid.kernel.wire import limits
from poolgrid.kernel.wire.card import MediaSpec, ResizedGrid
from poolgrid.kernel.wire.hashing import pack_tokens, unpack_tokens
from poolgrid.kernel.wire.multimodal import MediaItem, MediaKind, digest_media
from poolgrid.server.frontend.chat_template import ChatTemplate
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.media.conversation import with_media
from poolgrid.server.frontend.media.placeholders import place_media
from poolgrid.server.frontend.media.references import MediaRefused
from poolgrid.server.frontend.template_capabilities import ContentForm
from poolgrid.server.frontend.template_probes import capabilities_of
from tests.frontend.fake_backend import TINY, FakeBackend
from tests.frontend.media.loading import loading
from tests.frontend.media.samples import data_url, png
from tests.frontend.server import application, in_process

SPEC = MediaSpec(("image", "embeddings"), placeholder="<image>", tokens_per_image=5, filler_token_id=0)
CAT, DOG = png(color=(1, 1, 1)), png(color=(2, 2, 2))

LLAVA = """\
{% for message in messages -%}
{{ message.role | upper }}: {# -#}
{% for part in message.content if part.type == 'image' %}{{ '<image>\n' }}{% endfor -%}
{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor -%}
{{ '\n' }}{% endfor %}ASSISTANT:"""
"""Takes lists only, puts images first: the form of several published vision templates."""


def image_part(data: bytes = CAT) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), "detail": "high"}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def ask(
    content: Any, media: MediaSpec = SPEC, template: str | None = None, **settings: Any
) -> tuple[httpx.Response, list[InferenceRequest]]:
    model = TINY if template is None else dataclasses.replace(TINY, template=ChatTemplate(template))
    backend = FakeBackend(served=[ServedModel("tiny", 0, 4096, (), media)])

    async def run() -> httpx.Response:
        async with in_process(application(backend, models={"tiny": model}, **settings)) as client:
            body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
            return await client.post("/v1/chat/completions", json=body)

    return asyncio.run(run()), backend.requests


def _refusal(content: Any, media: MediaSpec = SPEC, **settings: Any) -> tuple[int, str, str | None]:
    response, requests = ask(content, media, **settings)
    error = response.json()["error"]
    assert not requests
    return response.status_code, error["code"], error["param"]


def test_each_image_becomes_the_tokens_that_its_model_sees_where_the_client_put_it() -> None:
    response, (request,) = ask([text_part("Compare "), image_part(CAT), text_part(" and "), image_part(DOG)])

    assert response.status_code == 200, response.text
    media = request.multimodal
    assert media is not None
    assert media.prompt_text == "<|im_start|>user\nCompare <image> and <image><|im_end|>\n<|im_start|>assistant\n"
    assert [(item.data, item.media_hash) for item in media.items] == [
        (CAT, digest_media(CAT)),
        (DOG, digest_media(DOG)),
    ]
    head, middle, tail = (TINY.encode(part) for part in media.prompt_text.split("<image>"))
    assert request.token_ids == head + pack_tokens([0] * 5) + middle + pack_tokens([0] * 5) + tail
    first, second = media.items
    assert (first.first_token, first.token_count) == (len(head) // 4, 5)
    assert (second.first_token, second.token_count) == ((len(head) + len(middle)) // 4 + 5, 5)
    assert response.json()["usage"]["prompt_tokens"] == len(request.token_ids) // 4


def test_where_the_number_of_tokens_is_not_known_the_place_still_is() -> None:
    spec = MediaSpec(("image",), placeholder="<image>")
    _, (request,) = ask([text_part("Look: "), image_part()], spec)

    assert request.multimodal is not None
    (item,) = request.multimodal.items
    assert (item.first_token, item.token_count) == (len(TINY.encode("<|im_start|>user\nLook: ")) // 4, 0)


def test_the_tokens_of_an_image_follow_from_its_size_where_the_card_says_how() -> None:
    spec = MediaSpec(("image",), placeholder="<image>", filler_token_id=0, resized_grid=ResizedGrid(14, 2, 784, 78_400))
    _, (request,) = ask([image_part(png(84, 56)), image_part(png(28, 560))], spec)

    assert request.multimodal is not None
    first, second = request.multimodal.items
    assert [(item.width, item.height, item.token_count) for item in (first, second)] == [(84, 56, 6), (28, 560, 20)]
    assert second.first_token == first.first_token + 6


def test_a_prompt_with_media_has_the_special_tokens_that_its_engine_adds() -> None:
    tokenizer = Tokenizer.from_str(TINY.tokenizer.to_str())
    tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    model = dataclasses.replace(TINY, tokenizer=tokenizer, encoder=None)
    spec = MediaSpec(("image",), placeholder_token_id=1)
    items = [MediaItem(MediaKind.IMAGE, CAT, "image/png", digest_media(CAT))]
    text = "<|im_start|>Hello"

    plain, _ = with_media(text, items, spec, model, False)
    added, _ = with_media(text, items, msgspec.structs.replace(spec, adds_special_tokens=True), model, False)

    assert added == pack_tokens([0]) + plain


async def test_media_whose_tokens_nobody_can_count_are_counted() -> None:
    counts = []
    async with loading() as loader:
        for item in await loader.take(data_url(CAT), data_url(DOG)):
            loader.loader.note_places([item, msgspec.structs.replace(item, token_count=4)])
            counts.append(
                loader.metrics.registry.get_sample_value("poolgrid_frontend_media_uncounted_total", {"kind": "image"})
            )
    assert counts == [1, 2]


def test_a_template_that_takes_lists_of_parts_writes_the_placeholders_itself() -> None:
    _, (request,) = ask([text_part("Compare them."), image_part(CAT), image_part(DOG)], template=LLAVA)
    _, (plain,) = ask("Hello", template=LLAVA)

    assert request.multimodal is not None
    assert request.multimodal.prompt_text == "USER: <image>\n<image>\nCompare them.\nASSISTANT:"
    assert TINY.decode(plain.token_ids) == "USER: Hello\nASSISTANT:"


async def test_all_choices_of_a_request_share_its_media() -> None:
    backend = FakeBackend(served=[ServedModel("tiny", 0, 4096, (), SPEC)])

    async with in_process(application(backend)) as client:
        messages = [{"role": "user", "content": [image_part()]}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 4, "n": 2}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    first, second = backend.requests
    assert first.multimodal is second.multimodal is not None


@pytest.mark.parametrize(
    ("content", "media", "refusal"),
    [
        ([image_part()], MediaSpec(), (400, "media_not_supported", "messages[0].content[0].type")),
        (
            [{"type": "image_url", "image_url": {"url": "https://media.test/x.safetensors"}}],
            MediaSpec(("image",)),
            (400, "media_not_supported", "messages[0].content[0].image_url.url"),
        ),
        ([image_part()], MediaSpec(("image",)), (400, "media_not_supported", "messages[0].content")),
        (
            [text_part("an <image>"), image_part()],
            SPEC,
            (400, "media_placeholder_mismatch", "messages"),
        ),
        (
            [text_part("x"), image_part(b"no picture")],
            SPEC,
            (400, "media_type_not_allowed", "messages[0].content[1].image_url.url"),
        ),
        ([{"type": "image_url"}], SPEC, (400, "missing_required_parameter", "messages[0].content[0].image_url.url")),
        (
            [{"type": "image_url", "image_url": {"detail": "high"}}],
            SPEC,
            (400, "missing_required_parameter", "messages[0].content[0].image_url.url"),
        ),
        (
            [{"type": "image_url", "image_url": {"url": 5}}],
            SPEC,
            (400, "invalid_type", "messages[0].content[0].image_url.url"),
        ),
        (
            [{"type": "input_audio", "input_audio": {}}],
            SPEC,
            (400, "unsupported_parameter", "messages[0].content[0].type"),
        ),
        (
            [{"type": "image_url", "image_url": "http://10.0.0.1/x.png"}],
            SPEC,
            (403, "media_address_not_allowed", "messages[0].content[0].image_url"),
        ),
        (
            [{"type": "image_url", "image_url": "/etc/passwd"}],
            SPEC,
            (403, "media_path_not_allowed", "messages[0].content[0].image_url"),
        ),
    ],
)
def test_media_that_are_not_taken_are_refused_with_their_place(
    content: Any, media: MediaSpec, refusal: tuple[int, str, str]
) -> None:
    assert _refusal(content, media) == refusal


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("an <image> <image>", "has 2 placeholders for 1 media: text must not contain the placeholder '<image>'"),
        ("<|image_pad|>", "has 0 placeholders for 1 media: the chat template does not write the placeholder '<image>'"),
    ],
)
def test_too_many_and_too_few_placeholders_have_their_own_messages(text: str, why: str) -> None:
    item = MediaItem(MediaKind.IMAGE, b"", "image/png", bytes(32))

    with pytest.raises(MediaRefused, match=re.escape(why)):
        place_media(text, [item], SPEC, TINY.encode)


def test_media_that_do_not_fit_into_a_message_beside_their_prompt_are_refused() -> None:
    item = MediaItem(
        MediaKind.EMBEDDINGS, bytes(limits.MULTIMODAL_BYTES_MAX - 1024), "application/x-safetensors", bytes(32)
    )

    with_media("<image> what?", [item], SPEC, TINY, False)
    with pytest.raises(RequestError) as caught:
        with_media("<image>" + "what? " * 1000, [item], SPEC, TINY, False)

    assert (caught.value.status, caught.value.code) == (413, "media_too_large")


@pytest.mark.parametrize(("text", "found"), [("a\x00b", [1]), ("\x00", [0]), ("ab", [])])
def test_a_placeholder_that_is_one_token_is_looked_for_among_the_tokens(text: str, found: list[int]) -> None:
    spec = MediaSpec(("image",), placeholder_token_id=0, tokens_per_image=3, filler_token_id=9)
    item = MediaItem(MediaKind.IMAGE, CAT, "image/png", bytes(32))

    def encode(part: str) -> bytes:
        return pack_tokens([ord(character) for character in part])

    tokens, placed = place_media(text, [item] * len(found), spec, encode)

    assert [(each.first_token, each.token_count) for each in placed] == [(place, 3) for place in found]
    assert unpack_tokens(tokens) == tuple(
        token for character in text for token in ([9] * 3 if character == "\x00" else [ord(character)])
    )


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ContentForm(True, False)),
        ("{% for m in messages %}{{ 'x' + m.content }}{% endfor %}", ContentForm(True, False)),
        (LLAVA, ContentForm(False, True, True)),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
            "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}",
            ContentForm(True, True, True),
        ),
        (
            "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
            ContentForm(False, True, False),
        ),
    ],
    ids=["prints lists", "fails on lists", "lists only", "either", "drops images"],
)
def test_what_a_template_takes_is_found_out_by_asking_it(source: str, form: ContentForm) -> None:
    assert capabilities_of(ChatTemplate(source), has_tools=False).user_form == form


@pytest.mark.parametrize("role", ["user", "function_call_output"])
def test_the_responses_api_takes_the_same_images_and_names_their_place_in_its_own_body(role: str) -> None:
    def item(image_url: str) -> dict[str, Any]:
        parts = [{"type": "input_text", "text": "See "}, {"type": "input_image", "image_url": image_url}]
        if role == "user":
            return {"role": "user", "content": parts}
        return {"type": "function_call_output", "call_id": "c", "output": parts}

    def respond(image_url: str, media: MediaSpec = SPEC) -> tuple[httpx.Response, list[InferenceRequest]]:
        backend = FakeBackend(served=[ServedModel("tiny", 0, 4096, (), media)])

        async def run() -> httpx.Response:
            async with in_process(application(backend)) as client:
                body = {"model": "tiny", "instructions": "Be brief.", "input": [item(image_url)]}
                return await client.post("/v1/responses", json=body)

        return asyncio.run(run()), backend.requests

    response, (request,) = respond(data_url(CAT))
    assert response.status_code == 200, response.text
    assert request.multimodal is not None
    assert [found.data for found in request.multimodal.items] == [CAT]
    assert "See <image>" in request.multimodal.prompt_text

    place = "input[0].content[1]" if role == "user" else "input[0].output[1]"
    refused = [(data_url(CAT), MediaSpec(), 400, "media_not_supported", f"{place}.type")] if role == "user" else []
    for image_url, media, status, code, param in (
        *refused,
        ("ftp://example.org/a.png", SPEC, 403, "media_scheme_not_allowed", f"{place}.image_url"),
        (data_url(b"no image"), SPEC, 400, "media_type_not_allowed", f"{place}.image_url"),
    ):
        response, requests = respond(image_url, media)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (status, code, param)
        assert not requests
