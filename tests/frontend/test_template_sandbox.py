"""A chat template cannot hang the router, nor fill its memory."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path

import pytest

from poolgrid.frontend.chat_template import STEPS_PER_LOOK, ChatTemplate, TemplateFailure, TemplateSandbox
from poolgrid.frontend.models import TINY_MODEL_PATH
from poolgrid.frontend.prompt_model import ModelDirectoryError, PromptModel

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
    monkeypatch.setattr("poolgrid.frontend.chat_template.STEPS_MAX", 1000)
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
