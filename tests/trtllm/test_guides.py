"""A guide decides the text, with each library and in disaggregated serving; tool calls and schemas rest on it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tokenizers import Tokenizer

from poolgrid.kernel.wire.hashing import unpack_tokens
from poolgrid.kernel.wire.identifiers import Role
from poolgrid.kernel.wire.requests import FinishReason
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from tests.trtllm.engines import make_request, running_engine
from tests.trtllm.test_engine_legs import decode_leg, prefilled
from tests.trtllm.test_feed import behave

EOS = 2
OBJECT = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
CONTENT = {"type": "json_schema", "json_schema": OBJECT}
TAG = {"format": {"type": "tag", "begin": "<f>", "content": CONTENT, "end": "</f>"}}
GUIDES: list[tuple[str, dict[str, Any], str]] = [
    (backend, guide, pattern)
    for backend in ("xgrammar", "llguidance")
    for guide, pattern in (
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_choice": ("yes", "no.")}, r"yes|no\."),
        ({"guided_json": json.dumps(OBJECT).encode()}, r'\{"a":(true|false)\}'),
        ({"structural_tag": json.dumps(TAG)}, r'<f>\{"a":(true|false)\}</f>'),
    )
]
GUIDES += [
    ("xgrammar", {"guided_grammar": 'root ::= "ab" | "ba"'}, "ab|ba"),
    ("llguidance", {"guided_grammar": 'start: "ab" | "ba"'}, "ab|ba"),
]
MODEL = str(TINY_MODEL_PATH)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    behave(monkeypatch, vocabulary_size=4096)
    return Tokenizer.from_file(str(TINY_MODEL_PATH / "tokenizer.json"))


def text_of(tokenizer: Tokenizer, output: bytes) -> str:
    """Return the text without white space, which a schema allows between the parts of JSON."""
    return "".join(str(tokenizer.decode([each for each in unpack_tokens(output) if each != EOS])).split())


@pytest.mark.parametrize(("backend", "guide", "pattern"), GUIDES)
async def test_text_keeps_to_the_guide(tiny: Tokenizer, backend: str, guide: dict[str, Any], pattern: str) -> None:
    async with running_engine(model_path=MODEL, guided_decoding_backend=backend) as told:
        last = await told.finish(make_request(max_tokens=64, stop_token_ids=(EOS,), **guide))

        assert last.finish_reason == FinishReason.STOP
        assert re.fullmatch(pattern, text_of(tiny, told.output("r")))


@pytest.mark.parametrize(("backend", "guide", "pattern"), GUIDES)
async def test_text_of_two_legs_is_that_of_one_worker(
    tiny: Tokenizer, backend: str, guide: dict[str, Any], pattern: str
) -> None:
    chosen: dict[str, Any] = {"model_path": MODEL, "guided_decoding_backend": backend}
    request = make_request(max_tokens=64, stop_token_ids=(EOS,), **guide)
    async with (
        running_engine(Role.PREFILL, **chosen) as prefill,
        running_engine(Role.DECODE, **chosen) as decode,
        running_engine(**chosen) as whole,
    ):
        last = await decode.finish(decode_leg(request, await prefilled(prefill, request)))
        await whole.finish(request)

        assert last.finish_reason == FinishReason.STOP
        assert decode.output("r") == whole.output("r")
        assert re.fullmatch(pattern, text_of(tiny, decode.output("r")))


async def test_guide_that_cannot_be_compiled_is_refused_and_the_engine_lives_on(tiny: Tokenizer) -> None:
    async with running_engine(model_path=MODEL) as told:
        refused = await told.finish(make_request("bad", guided_regex="("))
        assert refused.finish_reason == FinishReason.ERROR
        assert (await told.finish(make_request("good"))).finish_reason == FinishReason.LENGTH


async def test_minimum_of_tokens_holds_before_a_stop(tiny: Tokenizer) -> None:
    async with running_engine(model_path=MODEL) as told:
        await told.finish(make_request("r", max_tokens=32))
        stop = unpack_tokens(told.output("r"))[3]
        await told.finish(make_request("s", max_tokens=32, stop_token_ids=(stop,)))
        await told.finish(make_request("m", max_tokens=32, stop_token_ids=(stop,), min_tokens=10))
        assert len(told.output("s")) <= 4 * 4 < 4 * 10 <= len(told.output("m"))
