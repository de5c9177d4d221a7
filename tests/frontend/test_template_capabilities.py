"""What templates take is found out from them, and messages are written accordingly."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import re
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.server.frontend.chat_template import STEPS_PER_LOOK, ChatTemplate, TemplateFailure, TemplateSandbox
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.message_adaptation import adapt, adapt_tools
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.frontend.preparation import Preparation
from poolgrid.server.frontend.prompt_model import ModelDirectoryError, PromptModel
from poolgrid.server.frontend.prompts import look_up
from poolgrid.server.frontend.schema import ChatBody, Function, Message, ToolCall
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.frontend.template_capabilities import (
    Arguments,
    ContentForm,
    EmptyContent,
    TemplateCapabilities,
    TextWithCalls,
)
from poolgrid.server.frontend.template_probes import TIME_LIMIT_MS, capabilities_of, probe
from tests.frontend.fake_backend import TINY, FakeBackend
from tests.frontend.server import application, in_process

EACH = "{% for m in messages %}"
END = "{% endfor %}"
TURN = "<{{ m.role }}>{{ m.content or '' }}"
CALLS = "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
GENERIC = EACH + TURN + CALLS + END


def conversation(*messages: Mapping[str, Any]) -> list[Message]:
    return msgspec.convert(list(messages), list[Message])


def said(role: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(arguments: Any, call_id: str = "c1", name: str = "f") -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


def prompt(source: str, *messages: Mapping[str, Any], has_tools: bool = True) -> str:
    template = ChatTemplate(source)
    adapted = adapt(conversation(*messages), probe(template, has_tools))
    return template.render(adapted, tools=[] if has_tools else None)


CALLING = said("assistant", None, tool_calls=[call('{"a":1}')])
CALLED = (said("user", "u"), CALLING, said("tool", "r", tool_call_id="c1"))
ITEMS = (
    EACH + TURN + "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}[{{ k }}={{ v }}]{% endfor %}{% endfor %}" + END
)
JOINED = EACH + TURN + "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}" + END
ABSENT = "{% if m.content is defined %}<{{ m.role }}>{{ m.content + '!' }}{% else %}" + CALLS + "{% endif %}"
ALTERNATE = "{% if (m.role == 'user') != loop.index is odd %}{{ raise_exception('alternate') }}{% endif %}"
AFTER_TOOL = "{% if (loop.previtem or {}).role == 'tool' and m.role == 'user' %}{{ raise_exception('no') }}{% endif %}"
ONE_CALL = "{% if m.tool_calls and m.tool_calls|length > 1 %}{{ raise_exception('one') }}{% endif %}"
EXCLUSIVE = "{% if m.thinking and m.content and m.tool_calls %}{{ raise_exception('both') }}{% endif %}{{ m.thinking }}"


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        # content
        (EACH + "<{{ m.role }}>{{ m.content + '' }}" + CALLS + END, CALLED, "<user>u<assistant>(f {\"a\": 1})<tool>r"),
        (EACH + "{% if m.content is none %}" + CALLS + "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}" + END,
         [said("user", "u"), said("assistant", "t", tool_calls=[call('{"a":1}')])],
         "<user>u<assistant>t(f {\"a\": 1})"),
        (EACH + "<{{ m.role }}>{{ m.content }}" + CALLS + END, CALLED, "<user>u<assistant>(f {\"a\": 1})<tool>r"),
        (EACH + ABSENT + END,
         CALLED, "<user>u!(f {\"a\": 1})<tool>r!"),
        (EACH + "{{ m.content[0].text }}" + END, [said("user", [{"type": "text", "text": "a"}] * 2)], "aa"),
        (EACH + "{{ m.content }}" + END, [said("user", [{"type": "text", "text": "a"}] * 2)], "aa"),
        # arguments
        (JOINED,
         CALLED, "<user>u<assistant>f{\"a\":1}<tool>r"),
        (ITEMS, CALLED, "<user>u<assistant>f[a=1]<tool>r"),
        (ITEMS,
         [said("user", "u"), said("assistant", None, tool_calls=[call('{"a":')])],
         "<user>u<assistant>f[INVALID_JSON={\"a\":]"),
        # roles
        (GENERIC, [said("developer", "d"), said("user", "u")], "<system>d<user>u"),
        (GENERIC + "{# 'developer' #}", [said("developer", "d"), said("user", "u")], "<developer>d<user>u"),
        (EACH + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}" + TURN + END,
         [said("system", "s"), said("developer", "d"), said("user", "u"), said("system", "l")],
         "<system>s\n\nd<user>u<user>l"),
        (EACH + "{% if m.role in ('user', 'assistant') %}" + TURN + "{% endif %}" + END,
         [said("system", "s"), said("user", "u"), said("tool", "r")],
         "<user>s\n\nu<user><tool_response>\nr\n</tool_response>"),
        # order
        (EACH + ALTERNATE + TURN + END,
         [said("system", "s"), said("user", "u"), said("user", "v"), said("assistant", "a"), said("assistant", "b")],
         "<user>s\n\nu\n\nv<assistant>a\n\nb"),
        (EACH + AFTER_TOOL + TURN + CALLS + END,
         [*CALLED, said("user", "v")], "<user>u<assistant>(f {\"a\": 1})<tool>r\n\nv"),
        # calls
        (EACH + ONE_CALL + TURN + CALLS + END,
         [said("user", "u"), said("assistant", "t", tool_calls=[call({"a": 1}), call({"b": 2}, "c2")]),
          said("tool", "r2", tool_call_id="c2"), said("tool", "r1", tool_call_id="c1")],
         "<user>u<assistant>t(f {\"b\": 2})<tool>r2<assistant>(f {\"a\": 1})<tool>r1"),
        (EACH + "{% if m.role == 'tool' and m.tool_call_id|length != 9 %}{{ raise_exception('9') }}{% endif %}" + TURN
         + CALLS + END, CALLED, "<user>u<assistant>(f {\"a\": 1})<tool>r"),
        (EACH + TURN + CALLS + "{% if m.role == 'tool' %}{{ ' of ' + m.name }}{% endif %}" + END, CALLED,
         "<user>u<assistant>(f {\"a\": 1})<tool>r of f"),
        (EACH + TURN + END, [said("user", "u"), said("assistant", "t", tool_calls=[call('{"a":1}')])],
         '<user>u<assistant>t\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
        # reasoning
        (EACH + "{{ m.thinking or '' }}|" + TURN + CALLS + END,
         [said("user", "u"), said("assistant", "t", reasoning="because")], "|<user>ubecause|<assistant>t"),
        (EACH + "{{ m.reasoning or '' }}|" + TURN + CALLS + END,
         [said("user", "u"), said("assistant", "t", thinking="because")], "|<user>ubecause|<assistant>t"),
        (EACH + EXCLUSIVE + TURN + CALLS + END,
         [said("user", "u"), said("assistant", "t", reasoning_content="because", tool_calls=[call({"a": 1})])],
         "<user>u<assistant>tbecause<assistant>(f {\"a\": 1})"),
    ],
)  # fmt: skip
def test_messages_are_written_as_the_template_takes_them(source: str, messages: Any, text: str) -> None:
    assert prompt(source, *messages) == text


def test_a_template_that_writes_another_history_without_tools_is_asked_for_both() -> None:
    source = EACH + TURN + "{% if tools is not none %}" + CALLS + "{% endif %}" + END
    template = ChatTemplate(source)

    assert capabilities_of(template, True).calls
    assert not capabilities_of(template, False).calls
    assert '{"a": 1}' in prompt(source, *CALLED, has_tools=False)


def test_tools_are_an_empty_list_where_a_template_fails_on_null() -> None:
    template = ChatTemplate("{% for t in tools %}{{ t }}{% endfor %}" + GENERIC)

    assert not capabilities_of(template, False).null_tools
    assert capabilities_of(ChatTemplate(GENERIC), False).null_tools


def test_tools_are_completed_where_a_template_fails_without_description_or_parameters() -> None:
    source = (
        "{% for t in tools %}{{ t.function.name + t.function.description }}"
        "{% for p in t.function.parameters.properties %}{{ p }}{% endfor %}{% endfor %}" + GENERIC
    )
    bare = [{"type": "function", "function": {"name": "f", "parameters": None}}]
    takes = capabilities_of(ChatTemplate(source), True)

    assert ChatTemplate(source).render([], tools=adapt_tools(bare, takes)) == "f"
    assert adapt_tools(bare, capabilities_of(ChatTemplate("{{ tools | tojson }}" + GENERIC), True)) is bare


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('never') }}",
        "hello",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ ('a' * 999999)|replace('a', 'b' * 999999) }}",
    ],
)
def test_a_template_that_shows_nothing_gets_messages_by_the_conventions(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poolgrid.server.frontend.chat_template.STEPS_MAX", 10_000)
    ticks = itertools.count()
    found = probe(ChatTemplate(source), has_tools=True, monotonic=lambda: next(ticks) * TIME_LIMIT_MS / 1000 / 500)

    assert found in (TemplateCapabilities(), TemplateCapabilities(developer=False))
    assert next(ticks) < 502


def test_probes_end_at_their_time_limit_and_keep_what_they_found(caplog: pytest.LogCaptureFixture) -> None:
    ticks = itertools.count()
    source = EACH + "{{ m.content[0].text }}" + END

    found = probe(ChatTemplate(source), has_tools=False, monotonic=lambda: next(ticks) * TIME_LIMIT_MS / 1000 / 6)

    assert found == TemplateCapabilities(user_form=ContentForm(strings=False))
    assert "took more than" in caplog.text


ONE_SYSTEM = (
    EACH + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}" + TURN + END
)


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (
            "chat/completions",
            {"messages": [said("system", "s"), said("developer", "d"), said("user", "u"), said("developer", "l")]},
            "<system>s\n\nd<user>u<user>l",
        ),
        (
            "responses",
            {"instructions": "s", "input": [said("developer", "d"), said("user", "u"), said("system", "l")]},
            "<system>s\n\nd<user>u<user>l",
        ),
        ("messages", {"system": "s", "messages": [said("user", "u")], "max_tokens": 4}, "<system>s<user>u"),
    ],
)
async def test_the_messages_of_every_api_are_adapted(path: str, body: dict[str, Any], text: str) -> None:
    backend = FakeBackend()
    model = dataclasses.replace(TINY, template=ChatTemplate(ONE_SYSTEM), encoder=None)

    async with in_process(application(backend, models={"tiny": model})) as client:
        response = await client.post(f"/v1/{path}", json={"model": "tiny", **body})
        assert response.status_code == 200, response.text
    assert TINY.decode(backend.requests[0].token_ids) == text


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([said("system", "s"), said("developer", "d"), said("user")], "messages[2].content"),
        ([said("system", "s"), said("system"), said("user", "u")], "messages[1].content"),
        ([said("system", "s"), said("system", "t"), said("user", [{"type": "text"}])], "messages[2].content[0].text"),
    ],
)
def test_errors_name_the_place_in_the_request_where_messages_are_joined(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        prompt(ONE_SYSTEM, *messages)
    assert caught.value.param == param


def test_arguments_that_are_nested_too_deeply_are_refused() -> None:
    depth = 100_000
    arguments: Any = {}
    for _ in range(depth):
        arguments = {"a": arguments}
    message = Message("assistant", tool_calls=[ToolCall(Function("f", arguments))])
    model = dataclasses.replace(TINY, template=ChatTemplate(JOINED), encoder=None)
    preparation = Preparation(FakeBackend(), {"tiny": model}, FrontendSettings())
    job = preparation.chat_job(ChatBody(model="tiny", messages=[message]))

    with pytest.raises(RequestError, match="nested too deeply"):
        look_up(job, 60_000)


NUMBERS = itertools.count()


def word() -> str:
    return f"w{next(NUMBERS)}."


CONTENT = st.one_of(
    st.builds(word),
    st.builds(lambda: [{"type": "text", "text": word()}, {"type": "text", "text": word()}]),
)


@st.composite
def messages(draw: st.DrawFn) -> list[dict[str, Any]]:
    drawn: list[dict[str, Any]] = []
    for role in draw(st.lists(st.sampled_from(["system", "developer", "user", "assistant", "call"]), min_size=1)):
        if role != "call":
            drawn.append(said(role, draw(CONTENT)))
            continue
        calls = [call({"k": word()}, f"call{next(NUMBERS)}") for _ in range(draw(st.integers(1, 3)))]
        drawn.append(said("assistant", draw(st.one_of(st.none(), st.just(""), CONTENT)), tool_calls=calls))
        drawn += [said("tool", draw(CONTENT), tool_call_id=each["id"]) for each in draw(st.permutations(calls))]
    return drawn


FORMS = [ContentForm(), ContentForm(False, True), ContentForm(True, True, True), ContentForm(False)]
CAPABILITIES = st.builds(
    TemplateCapabilities,
    **{name: st.sampled_from(FORMS) for name in ("user_form", "system_form", "assistant_form", "tool_form")},
    **{name: st.booleans() for name in (
        "system", "system_before_result", "developer", "function", "several_system", "late_system", "lone_late_system",
        "consecutive_user", "consecutive_assistant", "user_after_tool", "calls", "parallel_calls", "results",
        "results_without_name", "long_call_ids", "null_content",
    )},
    arguments=st.sampled_from(Arguments),
    empty_content=st.sampled_from(EmptyContent),
    text_with_calls=st.sampled_from(TextWithCalls),
)  # fmt: skip


@given(messages(), CAPABILITIES)
def test_no_text_is_lost_whatever_a_template_takes(drawn: list[dict[str, Any]], takes: TemplateCapabilities) -> None:
    adapted = adapt(conversation(*drawn), takes)

    words = re.findall(r"w[0-9]+\\.", json.dumps(drawn))
    written = re.findall(r"w[0-9]+\\.", json.dumps(adapted))
    if takes.text_with_calls is TextWithCalls.TOOL_PLAN:  # says the text twice
        assert set(written) == set(words)
    else:
        assert sorted(written) == sorted(words)
    if not takes.consecutive_user:
        roles = [message["role"] for message in adapted]
        assert ("user", "user") not in list(itertools.pairwise(roles))
    if not takes.late_system:
        systems = [at for at, message in enumerate(adapted) if message["role"] in ("system", "developer")]
        assert systems == list(range(len(systems))) or len(systems) == 1


@given(messages(), CAPABILITIES)
def test_a_later_turn_begins_with_the_same_messages(drawn: list[dict[str, Any]], takes: TemplateCapabilities) -> None:
    """A conversation that goes on with an answer and a question changes nothing before them."""
    if takes.text_with_calls is TextWithCalls.CONTENT_UNTIL_ANSWER or not takes.system_before_result:
        return  # these templates leave out earlier text themselves, so their prompts change with each turn
    if drawn[-1]["role"] not in ("user", "tool"):
        return
    alone = sum(message["role"] in ("system", "developer") for message in drawn) == 1
    before = adapt(conversation(*drawn), takes)
    after = adapt(conversation(*drawn, said("assistant", "answer"), said("user", "question")), takes)

    assert after[: len(before)] == before
    assert alone or len(after) == len(before) + 2


def test_many_messages_of_one_role_are_joined_in_time_that_grows_with_their_text() -> None:
    takes = TemplateCapabilities(system=False, consecutive_user=False, parallel_calls=False)
    calls = [call({}, f"c{at}") for at in range(20_000)]
    drawn = [said("system", "s" * 10)] * 20_000 + [said("user", "u" * 10)] * 20_000
    drawn += [said("assistant", None, tool_calls=calls)]
    drawn += [said("tool", "r", tool_call_id=f"c{at}") for at in reversed(range(20_000))]

    adapted = adapt(conversation(*drawn), takes)

    assert len(adapted) == 1 + 2 * 20_000
    assert len(adapted[0]["content"]) == 40_000 * 12 - 2


def test_time_that_other_processes_have_the_cpu_is_no_time_of_the_probes(caplog: pytest.LogCaptureFixture) -> None:
    waits = [1.2 * TIME_LIMIT_MS / 1000]

    class Waiting(ChatTemplate):
        def render(self, *arguments: Any, **named: Any) -> str:
            while waits:
                threading.Event().wait(waits.pop())
            return super().render(*arguments, **named)

    probe(Waiting("{% for message in messages %}{{ message.content }}{% endfor %}"), has_tools=False)

    assert "probing a chat template" not in caplog.text


HI = [{"role": "user", "content": "hi"}]


def render(source: str, limit_ms: float = 60_000) -> str:
    return ChatTemplate(source).render(HI, max_chars=100_000, limit_ms=limit_ms)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "steps|takes too long"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "steps|takes too long",
        ),
        ("{% for i in range(99999) %}{{ 'a' * 10 }}{% endfor %}", "100000 characters"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_would_hang_or_swell_is_stopped(source: str, why: str) -> None:
    with pytest.raises(TemplateFailure, match=why):
        render(source, limit_ms=200 if "long" in why else 60_000)


def test_steps_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poolgrid.server.frontend.chat_template.STEPS_MAX", 1000)
    assert len(render("{% for i in range(999) %}a{% endfor %}")) == 999
    with pytest.raises(TemplateFailure, match="more than 1000 steps"):
        render("{% for i in range(999) %}{{ messages[0].items() }}{% endfor %}")


def test_time_is_limited() -> None:
    ticks = itertools.count()
    environment = TemplateSandbox(monotonic=lambda: float(next(ticks)))
    template = environment.from_string("{% for i in range(1000) %}{{ i }}{% endfor %}")
    environment.begin(3)
    with pytest.raises(Exception, match="takes too long"):
        template.render()
    environment.begin(1000 / STEPS_PER_LOOK + 1)
    assert template.render().endswith("999")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.content }}{{ loop.last }}{% endfor %}",
            "1/1hiTrue",
        ),
        ("{% for m in messages if m.role == 'x' %}{% else %}none{% endfor %}", "none"),
        ("{% for m in nothing %}{% else %}none{% endfor %}", "none"),
        ("{{ 'a' ~ 1 ~ messages[0].content ~ nothing }}", "a1hi"),
        ("{{ ['a', 'b']|join(', ') }}{{ messages|join('', attribute='role') }}", "a, buser"),
        ("{{ 'abab'|replace('a', 'c', 1) }}{{ 'abab'.replace('a', '') }}", "cbabbb"),
        ("{{ '%s-%d' % ('a', 3) }}{{ '{:>3}'.format(1) }}{{ 1 + 2 }}{{ 2 ** 3 }}{{ 'a' * 3 }}", "a-3  138aaa"),
        ("{{ messages|map(attribute='content')|list|tojson }}{{ 'a\nb'|indent(2) }}", '["hi"]a\n  b'),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) ~ f('b') }}", "[1][b]"),
        ("{% for a in [[1, [2]], [3]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}", "123"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        (
            "{% for m in messages %}{% set said = m.content.split('i') %}{{ said }}{{ 'a b'.rsplit(' ', 1)[-1] }}"
            "{% endfor %}",
            "['h', '']b",
        ),
        (
            "{% block b %}{% set s = 1 %}{{ 'a b'.split()[0] }}{{ 'a-b'.split(sep='-', maxsplit=1) }}{% endblock %}",
            "a['a', 'b']",
        ),
        (
            "{% macro f() %}{{ varargs }}{{ kwargs }}{% endmacro %}"
            "{% for m in messages %}{% set x = [1] %}{{ f(x, a={'b': x}) }}{% endfor %}",
            "([1],){'a': {'b': [1]}}",
        ),
        ("{% for m in messages %}{% set x = 1 %}{{ dict(a=x) }}{% endfor %}", "{'a': 1}"),
        ("{{ {'type': 1, 'enum': 2, 'title': 3}|reject('in', ['type', 'title'])|list }}", "['enum']"),
        ("{{ messages|selectattr('role', 'in', ['user', 'tool'])|map(attribute='content')|list }}", "['hi']"),
        ("{{ messages|rejectattr('role', 'in', ['user'])|list }}", "[]"),
        ("{{ [[1], [2, 3]]|sum(start=[]) }}{{ [{'a': [1]}]|sum('a', []) }}{{ [1, 2.5]|sum }}", "[1, 2, 3][1]3.5"),
        ("{{ messages|map(attribute='tool_calls', default=[])|list }}{{ [1]|batch(2, [])|list }}", "[[]][[1, []]]"),
        ("{{ 1700000000 if true }}{{ ['b', 'a']|sort|first }}{% filter upper %}x{% endfilter %}", "1700000000aX"),
    ],
)
def test_what_templates_do_every_day_works(source: str, text: str) -> None:
    assert render(source) == text


def test_a_file_can_replace_the_models_own_template(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("mine: {{ messages[0].content }}")
    model = PromptModel.load(TINY_MODEL_PATH, chat_template=file)
    assert model.template is not None
    assert model.template.render(HI) == "mine: hi"
    with pytest.raises(ModelDirectoryError, match="not a file"):
        PromptModel.load(TINY_MODEL_PATH, chat_template=tmp_path / "none")
    file.write_text("{% if %}")
    with pytest.raises(ModelDirectoryError, match="compiling"):
        PromptModel.load(TINY_MODEL_PATH, chat_template=file)


@pytest.mark.parametrize(
    "source",
    [
        "{% for message in messages %}{{ raise_exception('no') }}{% endfor %}",
        "{% set l = messages * 2 %}{% for _ in range(26) %}{% set l = [l, l] %}{{ l }}{% endfor %}{{ 1 / 0 }}",
        "{% macro show(m) %}{{ m + 1 }}{% endmacro %}{% for message in messages %}{{ show(message) }}{% endfor %}",
    ],
)
def test_nothing_of_a_rendering_that_failed_waits_for_the_collector(source: str) -> None:
    class Message(dict[str, str]):
        pass

    message = Message(role="user", content="hi")
    seen = weakref.ref(message)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(TemplateFailure):
            ChatTemplate(source).render([message])
        del message
        assert seen() is None
    finally:
        gc.enable()
