"""What a request's sampling becomes for TensorRT-LLM; every result is accepted by the fake's ``SamplingParams``."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher

from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.requests import Generate, RefusalKind, Routing, Sampling, unit_priority
from poolgrid.kernel.worker_protocol.refusal import RefusedError, UnableError, UnsupportedError
from poolgrid.plugins.trtllm.core.sampling import SamplingPlan, plan_sampling
from tests.fakes.tensorrt_llm import GuidedDecodingParams, SamplingParams

ANY_NUMBER = {"type": "json_schema", "json_schema": {"type": "number"}}


def plan(
    request_id: str = "r", stop_token_ids: tuple[int, ...] = (), backend: str | None = "xgrammar", **more: Any
) -> SamplingPlan:
    request = Generate(request_id, pack_tokens([1]), Sampling(16, **more), stop_token_ids)
    made = plan_sampling(request, {2, 9}, backend)
    SamplingParams(**made.arguments)
    return made


def test_defaults_of_openai_are_said_because_the_engines_differ() -> None:
    made = plan().arguments
    assert (made["temperature"], made["top_p"], made["max_tokens"], made["n"]) == (1.0, 1.0, 16, 1)
    assert not SamplingParams(**made)._greedy_decoding, "nothing said would mean greedy"
    assert made["detokenize"] is False
    assert "top_k" not in made


def test_every_given_parameter_arrives() -> None:
    given: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 5, "min_tokens": 3, "ignore_eos": True, "logprobs": 5,
        "prompt_logprobs": 2,
    }  # fmt: skip
    for_engine = {"min_p": 0.05, "frequency_penalty": 0.25, "presence_penalty": -0.25, "repetition_penalty": 1.1}
    made = plan(bad_token_ids=(7, 8), engine_fields={**for_engine, "n": 2}, **given)
    assert {name: made.arguments[name] for name in (*given, *for_engine)} == {**given, **for_engine}
    assert made.arguments["n"] == 1
    assert made.arguments["bad_token_ids"] == [7, 8]
    assert plan(logit_bias={5: -1.0}).logit_bias == {5: -1.0}
    assert plan(logprobs=0).arguments["logprobs"] == 1


def test_the_end_is_what_the_request_says_and_its_token_stays() -> None:
    made = plan(stop_token_ids=(5, 9, 2)).arguments
    assert (made["end_id"], made["pad_id"], made["stop_token_ids"]) == (9, 9, [5, 2])
    assert made["include_stop_str_in_output"] is True
    made = plan(stop_token_ids=(5,)).arguments
    assert (made["end_id"], made["pad_id"], made["stop_token_ids"]) == (-1, 0, [5])
    assert "stop_token_ids" not in plan().arguments


@pytest.mark.parametrize(
    ("given", "guide"),
    [
        ({"guided_json": b'{"type":"object"}'}, {"json": '{"type":"object"}'}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_grammar": "root ::= x"}, {"grammar": "root ::= x"}),
        ({"structural_tag": "{}"}, {"structural_tag": "{}"}),
        ({"guided_choice": ("a.b", "c")}, {"regex": r"(a\.b|c)"}),
    ],
)
def test_each_guide_becomes_the_engines(given: dict[str, Any], guide: dict[str, Any]) -> None:
    made = plan(**given).guide
    assert made == guide
    GuidedDecodingParams(**guide)
    with pytest.raises(UnableError, match="--guided-decoding-backend") as refused:
        plan(backend=None, **given)
    assert refused.value.kind is RefusalKind.CANNOT_DO, "another worker may have one"


def test_llguidance_gets_a_structural_tag_as_a_grammar_for_tensorrt_llm_gives_it_no_tags() -> None:
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<f>", "content": ANY_NUMBER, "end": "</f>"}}
    guide = plan(backend="llguidance", structural_tag=json.dumps(tag)).guide
    assert guide is not None
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(guide["grammar"])) == ""
    with pytest.raises(UnsupportedError, match="llguidance cannot keep to this one: a part of the structural tag is"):
        plan(backend="llguidance", structural_tag='{"format": {"type": "grammar"}}')


def test_xgrammar_gets_a_structural_tag_of_the_older_form_in_the_newer_one() -> None:
    older = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}
    guide = plan(structural_tag=json.dumps(older)).guide
    assert guide is not None
    assert json.loads(guide["structural_tag"])["format"]["type"] == "triggered_tags"
    for odd in ("[]", '{"structures": 3}', "{"):
        assert plan(structural_tag=odd).guide == {"structural_tag": odd}


def test_a_choice_matches_its_texts_and_nothing_else() -> None:
    guide = plan(guided_choice=("yes", "no (really)")).guide
    assert guide is not None
    for text, fits in (("yes", True), ("no (really)", True), ("no really", False), ("", False)):
        assert bool(re.fullmatch(guide["regex"], text)) is fits


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"guided_regex": "a", "guided_choice": ("b",)}, "2 guides"),
        ({"guided_regex": "a", "guided_json": b"{}"}, "2 guides"),
        ({"guided_choice": ()}, "0 texts"),
        ({"guided_json": b"\xff"}, "UTF-8"),
    ],
)
def test_guides_that_cannot_be_followed_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words) as refused:
        plan(**given)
    assert refused.value.kind is RefusalKind.INVALID


def test_a_guide_that_has_begun_on_another_worker_is_refused_and_may_go_on_elsewhere() -> None:
    request = Generate("r", pack_tokens([1, 2]), Sampling(16, guided_regex="a+"), routing=Routing(emitted_tokens=1))
    with pytest.raises(RefusedError, match="the output has begun on another worker") as refusal:
        plan_sampling(request, {2, 9}, "xgrammar")
    assert refusal.value.kind is RefusalKind.CANNOT_DO


def test_priorities_keep_their_order_in_the_engines_range() -> None:
    made = [unit_priority(each) for each in (-100, -1, 0, 1, 2, 10**9)]
    assert made == sorted(set(made))
    assert made[2] == 0.5
    assert 0 < made[0] < made[-1] < 1
