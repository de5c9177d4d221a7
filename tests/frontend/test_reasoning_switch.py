"""Clients say in many ways whether and how much a model is to reason; its template knows one of them, or none."""

from __future__ import annotations

from functools import cache
from typing import Any

import httpx
import pytest

from poolgrid.server.frontend.chat_template import ChatTemplate
from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.frontend.reasoning_switch import EFFORTS, switch_of
from tests.frontend.answers import PATHS, body_for
from tests.frontend.fake_backend import TINY, FakeBackend, speak
from tests.frontend.server import post_to_shared, prompt_of
from tests.installed import needs_parsers

HEAD = "{% for m in messages %}{{ m.content }}\n{% endfor %}assistant\n"
THINKS, ANSWERS = "<think>\n", "<think>\n\n</think>\n\n"


def either(condition: str) -> str:
    """Return a template that reasons where a condition holds."""
    return f"{HEAD}{{% if {condition} %}}{THINKS}{{% else %}}{ANSWERS}{{% endif %}}"


QWEN = either("enable_thinking is not defined or enable_thinking is not false")
TEMPLATES = {
    "on by default": QWEN,
    "off by default": either("enable_thinking is defined and enable_thinking"),
    "thinking": either("thinking is defined and thinking"),
    "reasoning": either("reasoning is undefined or reasoning"),
    "thinking_mode": either("thinking_mode is not defined or thinking_mode != 'disabled'"),
    "thinking_budget": either("thinking_budget is not defined or thinking_budget != 0"),
    "effort none": either("reasoning_effort is not defined or reasoning_effort != 'none'"),
    "effort no_think": "{% if reasoning_effort is defined and reasoning_effort not in ['no_think', 'low', 'high'] %}"
    "{{ raise_exception('reasoning_effort ' ~ reasoning_effort) }}{% endif %}"
    + either("reasoning_effort is defined and reasoning_effort != 'no_think'"),
}
RESTRICTED = (
    "{% set effort = reasoning_effort | default('xhigh') %}{% if effort not in ['low', 'medium', 'xhigh'] %}"
    "{{ raise_exception('Supported types are xhigh, medium, and low.') }}{% endif %}effort {{ effort }}\n" + QWEN
)
ALWAYS = f"{HEAD}{THINKS}{{# </think> #}}"
PLAIN = HEAD
MAYBE = f"{HEAD}{{# </think> #}}"

OFF: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"think": False},
    {"thinking": {"type": "disabled"}},
    {"thinking": False},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"effort": "none"}},
    {"reasoning_effort": "none"},
    {"chat_template_kwargs": {"enable_thinking": False}},
]
ON: list[dict[str, Any]] = [
    {"enable_thinking": True},
    {"think": True},
    {"think": "high"},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "adaptive"}},
    {"reasoning": {"enabled": True}},
    {"reasoning": {"effort": "high"}},
    {"reasoning_effort": "high"},
]


@cache
def model_of(source: str) -> PromptModel:
    return PromptModel(
        name="tiny",
        tokenizer=TINY.tokenizer,
        vocab_size=TINY.vocab_size,
        max_position_embeddings=4096,
        template=ChatTemplate(source),
        byte_table=TINY.byte_table,
    )


def ask(source: str, api: str = "chat", **fields: Any) -> tuple[httpx.Response, str]:
    """Return the response to a request, and the prompt that a worker got for it."""
    backend = FakeBackend(lambda _: speak("Six."))
    response = post_to_shared(backend, PATHS[api], {"models": {"tiny": model_of(source)}}, json=body_for(api, **fields))
    return response, prompt_of(backend) if backend.requests else ""


def prompt(source: str, api: str = "chat", **fields: Any) -> str:
    response, text = ask(source, api, **fields)
    assert response.status_code == 200, response.text
    assert "x-poolgrid-not-applied" not in response.headers
    return text


@pytest.mark.parametrize("fields", OFF[:-1], ids=str)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_way_to_ask_for_no_reasoning_switches_it_off_in_every_template(
    template: str, fields: dict[str, Any]
) -> None:
    assert prompt(TEMPLATES[template], **fields).endswith(ANSWERS)


@pytest.mark.parametrize("fields", ON, ids=str)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_way_to_ask_for_reasoning_switches_it_on_in_every_template(template: str, fields: dict[str, Any]) -> None:
    assert prompt(TEMPLATES[template], **fields).endswith(THINKS)


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("messages", {"thinking": {"type": "disabled"}}),
        ("messages", {"enable_thinking": False}),
        ("responses", {"reasoning": {"effort": "none"}}),
        ("responses", {"reasoning": {"enabled": False}}),
        ("responses", {"thinking": {"type": "disabled"}}),
        ("responses", {"enable_thinking": False}),
        ("responses", {"think": False}),
    ],
    ids=str,
)
def test_other_apis_switch_reasoning_off_too(api: str, fields: dict[str, Any]) -> None:
    assert prompt(QWEN, api, **fields).endswith(ANSWERS)


def test_tokenize_counts_the_prompt_of_the_same_switch() -> None:
    models = {"models": {"tiny": model_of(QWEN)}}
    for fields in OFF:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        response = post_to_shared(FakeBackend(), "/tokenize", models, json=body)
        assert TINY.tokenizer.decode(response.json()["tokens"], skip_special_tokens=False).endswith(ANSWERS), fields


def test_without_a_field_the_template_decides() -> None:
    assert prompt(QWEN).endswith(THINKS)
    assert prompt(TEMPLATES["off by default"]).endswith(ANSWERS)


def test_variables_of_the_template_win_over_switches() -> None:
    assert prompt(QWEN, chat_template_kwargs={"enable_thinking": True}, reasoning_effort="none").endswith(THINKS)
    assert prompt(QWEN, chat_template_kwargs={"enable_thinking": False}, think=True).endswith(ANSWERS)


def test_a_switch_wins_over_an_effort() -> None:
    assert prompt(QWEN, enable_thinking=False, reasoning_effort="high").endswith(ANSWERS)
    assert prompt(QWEN, enable_thinking=True, reasoning_effort="none").endswith(THINKS)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("minimal", "low"),
        ("low", "low"),
        ("medium", "medium"),
        ("high", "xhigh"),
        ("xhigh", "xhigh"),
        ("max", "xhigh"),
    ],
)
def test_effort_that_a_template_refuses_becomes_the_nearest_that_it_takes(asked: str, given: str) -> None:
    assert f"effort {given}\n" in prompt(RESTRICTED, reasoning_effort=asked)
    assert f"effort {given}\n" in prompt(RESTRICTED, "responses", reasoning={"effort": asked})
    assert f"effort {given}\n" in prompt(RESTRICTED, "messages", output_config={"effort": asked})


def test_effort_none_is_not_given_to_a_template_that_has_another_switch() -> None:
    assert prompt(RESTRICTED, reasoning_effort="none").endswith(f"{ANSWERS}")


def test_effort_of_no_known_scale_reaches_the_template_and_its_refusal_the_client() -> None:
    response, _ = ask(RESTRICTED, reasoning_effort="extreme")
    assert response.status_code == 400
    assert "Supported types are xhigh" in response.json()["error"]["message"]


def test_gpt_oss_gets_one_of_its_three_efforts() -> None:
    source = f"{HEAD}Reasoning: {{{{ reasoning_effort | default('medium') }}}}{{# <|channel|> #}}"
    found = {each: prompt(source, reasoning_effort=each).rpartition("Reasoning: ")[2] for each in EFFORTS}
    assert found == {
        "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high",
    }  # fmt: skip


@needs_parsers
@pytest.mark.parametrize("fields", OFF[:-1], ids=str)
def test_reasoning_that_cannot_be_switched_off_is_refused_by_the_name_of_the_field(fields: dict[str, Any]) -> None:
    response, _ = ask(ALWAYS, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    [name] = fields
    assert error["param"].partition(".")[0] == name
    assert "always reasons" in error["message"]


@needs_parsers
def test_agents_of_messages_are_served_by_a_model_that_always_reasons_and_the_field_is_named() -> None:
    response, text = ask(ALWAYS, "messages", thinking={"type": "disabled"})
    assert response.status_code == 200
    assert response.headers["x-poolgrid-not-applied"] == "thinking"
    assert text.endswith(THINKS)


@needs_parsers
def test_model_that_may_reason_without_a_switch_is_asked_and_the_field_is_named() -> None:
    response, _ = ask(MAYBE, enable_thinking=False)
    assert response.status_code == 200
    assert response.headers["x-poolgrid-not-applied"] == "enable_thinking"


def test_model_that_does_not_reason_is_asked_for_none_in_every_way() -> None:
    for fields in (*OFF, *ON):
        assert prompt(PLAIN, **fields) == prompt(PLAIN)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"enable_thinking": True, "think": False}, "think"),
        ({"thinking": {"type": "disabled"}, "reasoning": {"enabled": True}}, "reasoning.enabled"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"thinking": {"type": "off"}}, "thinking.type"),
        ({"thinking": "off"}, "thinking"),
    ],
    ids=str,
)
def test_switches_that_contradict_each_other_or_say_nothing_are_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    response, _ = ask(QWEN, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}{{ enable_thinking }}{{ reasoning_effort }}",
        "{% for _ in range(100000000) %}x{% endfor %}{{ enable_thinking }}",
        "{{ enable_thinking.x.y }}",
        "{# enable_thinking thinking reasoning_effort 'none' #}",
    ],
)
def test_templates_that_fail_or_only_mention_a_switch_have_none(source: str) -> None:
    found = switch_of(ChatTemplate(source))
    assert (found.on, found.off) == ({}, {})
    assert found.efforts == (EFFORTS if source.startswith("{#") else ())
