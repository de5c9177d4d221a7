"""A body that asks for nothing unusual takes a shorter way, and means the same on it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.requests.inference import ServedModel
from poolgrid.server.frontend.parsed_answers import encoder_of
from poolgrid.server.frontend.preparation import Preparation
from poolgrid.server.frontend.prepared_request import PreparedRequest
from poolgrid.server.frontend.prompts import tokenize
from poolgrid.server.frontend.schema import USUAL, ChatBody, CompletionBody, Message, is_plain
from poolgrid.server.frontend.sequences import sequences_of
from poolgrid.server.frontend.settings import FrontendSettings
from tests.examples import examples
from tests.frontend.fake_backend import TINY, FakeBackend
from tests.frontend.inference_requests import fields_of

PREPARATION = Preparation(
    FakeBackend(served=[ServedModel("tiny", 0, 4096)]),
    {"tiny": TINY},
    FrontendSettings(),
)

USUAL_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "stream": st.none() | st.booleans(),
        "stream_options": st.just({"include_usage": True}),
        "max_tokens": st.none() | st.integers(1, 4000),
        "temperature": st.none() | st.floats(0, 2),
        "seed": st.none() | st.integers(-(2**31), 2**31),
        "ignore_eos": st.none() | st.booleans(),
    },
)


def asked(job: PreparedRequest, names: list[str]) -> dict[str, Any]:
    prompts = tokenize(job)
    requests = [fields_of(request) for request in sequences_of(job, prompts, names)]
    answer = encoder_of(job, prompts, (), names, 0)
    return {
        "requests": requests,
        "counts": job.counts_in_chunks,
        "begins": answer.begin(),
        "end": answer.end({"prompt_tokens": 1}),
    }


@settings(max_examples=examples(20))
@given(USUAL_FIELDS, st.text(min_size=1, max_size=40), st.booleans())
def test_a_plain_body_and_one_that_says_a_default_are_one_request(
    fields: dict[str, Any], text: str, chat: bool
) -> None:
    said = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    prepare = PREPARATION.chat if chat else PREPARATION.completion

    plain = prepare(json.dumps({"model": "tiny", **said, **fields}).encode())
    long = prepare(json.dumps({"model": "tiny", **said, **fields, "n": 1}).encode())

    assert (plain.is_plain, long.is_plain) == (True, False)
    assert asked(plain, ["r"]) == asked(long, ["r"])


def bodies() -> dict[type, ChatBody | CompletionBody]:
    return {
        ChatBody: ChatBody(model="tiny", messages=[Message(role="user", content="x")]),
        CompletionBody: CompletionBody(model="tiny", prompt="x"),
    }


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in (ChatBody, CompletionBody) for name in kind.__struct_fields__ if name not in USUAL],
)
def test_every_other_field_makes_a_body_that_is_not_plain(kind: type, name: str) -> None:
    body = bodies()[kind]
    assert is_plain(body)

    setattr(body, name, False)

    assert not is_plain(body)
