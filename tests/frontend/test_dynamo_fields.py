"""Fields that Dynamo's documents add to a request: served, refused by name, or a hint without effect on the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.frontend.prompt_model import PromptModel
from tests.frontend.fake_backend import FakeBackend
from tests.frontend.server import post_to_shared
from tests.frontend.test_inference import CHAT, COMPLETIONS, post

SERVED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"nvext": {"ignore_eos": True}}, {"ignore_eos": True}),
    ({"nvext": {"top_k": 7}}, {"top_k": 7}),
    ({"nvext": {"repetition_penalty": 1.5}}, {"repetition_penalty": 1.5}),
    ({"nvext": {"guided_regex": "a+"}}, {"guided_regex": "a+"}),
    ({"nvext": {"guided_decoding": {"regex": "a+"}}}, {"guided_regex": "a+"}),
]

HINTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"extra_args": {"ttft_target": 100, "itl_target": 20}}, {"ttft_target": 100, "itl_target": 20}),
    ({"extra_args": {"itl_target": 20}, "nvext": {"router": {"ttft_target": 5}}}, {"ttft_target": 5, "itl_target": 20}),
    ({"extra_args": {"ttft_target": 100}, "nvext": {"router": {"ttft_target": 5}}}, {"ttft_target": 5}),
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"nvext": {"greed_sampling": True}}, "nvext.greed_sampling"),
    ({"nvext": {"use_raw_prompt": True}}, "nvext.use_raw_prompt"),
    ({"nvext": {"annotations": ["query_instance_id:"]}}, "nvext.annotations"),
    ({"nvext": {"backend_instance_id": 1}}, "nvext.backend_instance_id"),
    ({"nvext": {"token_data": [1]}}, "nvext.token_data"),
    ({"nvext": {"max_thinking_tokens": 9}}, "nvext.max_thinking_tokens"),
    ({"nvext": {"extra_fields": ["worker_id", "timing"]}}, "nvext.extra_fields"),
    ({"nvext": {"metadata_upload": {"url": "s3://b"}}}, "nvext.metadata_upload"),
    ({"nvext": {"prefill_worker_id": 1}}, "nvext.prefill_worker_id"),
    ({"nvext": {"decode_worker_id": 1}}, "nvext.decode_worker_id"),
    ({"nvext": {"dp_rank": 0}}, "nvext.dp_rank"),
    ({"nvext": {"prefill_dp_rank": 0}}, "nvext.prefill_dp_rank"),
    ({"nvext": {"guided_decoding_backend": "outlines"}}, "nvext.guided_decoding_backend"),
    ({"nvext": {"guided_whitespace_pattern": " "}}, "nvext.guided_whitespace_pattern"),
    ({"nvext": {"ignore_eos": True}, "ignore_eos": False}, "nvext.ignore_eos"),
    ({"extra_args": {"ttft_target": -1}}, "extra_args.ttft_target"),
    ({"extra_args": {"ttft_target": "soon"}}, "extra_args.ttft_target"),
    ({"extra_args": {"temperature": 1}}, "extra_args"),
    ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
]

ONLY_HINTS = [
    {"annotations": ["request_id"]},
    {"extra_fields": []},
    {"request_timestamp_ms": 5.0},
    {"session_control": {"session_id": "s", "action": "open"}},
    {"agent_context": {"session_id": "s"}},
    {"cache_control": {"type": "ephemeral", "ttl": "5m"}},
    {"agent_hints": {"strict_priority": 2, "speculative_prefill": True, "latency_sensitivity": 0.5}},
]


@pytest.mark.parametrize(("fields", "sampling"), SERVED)
def test_a_field_by_dynamos_name_reaches_the_worker(fields: dict[str, Any], sampling: dict[str, Any]) -> None:
    backend = FakeBackend()
    for path, prompt in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": [{"role": "user", "content": "hi"}]})):
        assert post(backend, path, **prompt, **fields).status_code == 200
    for request in backend.requests:
        assert {name: request.sampling.value_of(name) for name in sampling} == sampling


@pytest.mark.parametrize(("fields", "router"), HINTS)
def test_latency_targets_of_extra_args_reach_the_router(fields: dict[str, Any], router: dict[str, Any]) -> None:
    backend = FakeBackend()
    assert post(backend, COMPLETIONS, prompt="hi", **fields).status_code == 200
    assert backend.requests[0].hints["nvext"]["router"] == router


@pytest.mark.parametrize(
    ("header", "fields", "priority"),
    [("50", {}, 50), ("50", {"nvext": {"agent_hints": {"priority": 7}}}, 50), ("soon", {}, 0)],
)
def test_priority_header_reaches_the_router(header: str, fields: dict[str, Any], priority: int) -> None:
    backend = FakeBackend()
    headers = {"X-Dynamo-Request-Priority": header}
    body = {"model": "tiny", "prompt": "hi", **fields}
    assert post_to_shared(backend, COMPLETIONS, headers=headers, json=body).status_code == 200
    assert backend.requests[0].priority == priority


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_a_field_that_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    answer = post(FakeBackend(), COMPLETIONS, prompt="hi", **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert param in answer.json()["error"]["message"]


@pytest.mark.parametrize("nvext", ONLY_HINTS)
def test_a_hint_that_is_not_used_leaves_the_request_as_it_is(nvext: dict[str, Any]) -> None:
    with_hint, without = FakeBackend(), FakeBackend()
    given: tuple[tuple[FakeBackend, dict[str, Any]], ...] = ((with_hint, {"nvext": nvext}), (without, {}))
    for backend, fields in given:
        assert post(backend, COMPLETIONS, prompt="hi", **fields).status_code == 200
    assert with_hint.requests[0].sampling == without.requests[0].sampling
    assert with_hint.requests[0].token_ids == without.requests[0].token_ids


def test_chat_template_args_are_chat_template_kwargs(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ reasoning_effort }}")
    models = {"tiny": PromptModel.load(TINY_MODEL_PATH, chat_template=template)}

    def count(**fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        return post_to_shared(FakeBackend(), "/tokenize", {"models": models}, json=body)

    effort = {"reasoning_effort": "low"}
    assert count(chat_template_args=effort).json() == count(chat_template_kwargs=effort).json()
    assert count(chat_template_args=effort).json() == count(reasoning_effort="low").json()
    assert count(chat_template_args=effort).json() != count(chat_template_args={}).json()
    both = count(chat_template_args=effort, chat_template_kwargs={"reasoning_effort": "high"})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "chat_template_args")
