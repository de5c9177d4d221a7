"""A chat template cannot hang the router, nor fill its memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from frontend.chat_template import ChatTemplate, TemplateFailure
from frontend.models import TINY_MODEL_PATH
from frontend.prompt_model import ModelDirectoryError, PromptModel
from frontend.template_sandbox import STEPS_PER_LOOK, TemplateSandbox

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
        ("{{ 'a' * 999999999999 }}", "characters"),
        ("{{ 999999999999 * 'a' }}", "characters"),
        ("{{ [1] * 999999999999 }}", "characters"),
        ("{{ 10 ** (10 ** 5) }}", r"\*\*"),
        ("{{ 'a'|center(999999999) }}", "number"),
        ("{{ 'a'.ljust(999999999) }}", "number"),
        ("{{ 'a'|indent(999999999) }}", "number"),
        ("{{ {}|tojson(indent=999999999) }}", "number"),
        ("{{ [1]|batch(999999999, 0)|list }}", "number"),
        ("{{ '%999999999d' % 1 }}", "width"),
        ("{{ '%*d' % (999999999, 1) }}", "number"),
        ("{{ '%999999999d'|format(1) }}", "width"),
        ("{{ '{:999999999}'.format(1) }}", "width"),
        ("{{ '{:{}}'.format(1, 999999999) }}", "number"),
        ("{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "characters"),
        ("{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}", "characters"),
        (
            "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x|replace('a', n.x) %}{% endfor %}",
            "cha",
        ),
        (
            "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
            "cha",
        ),
        ("{% set x = 'a' * 50000 %}{{ range(99999)|join(x) }}", "characters"),
        ("{% set x = 'a' * 50000 %}{{ x.join(['b'] * 9000) }}", "characters"),
        ("{% set x = 'a' * 50000 %}{% set y %}{% for i in range(99) %}{{ x }}{% endfor %}{% endset %}", "characters"),
        ("{% for i in range(99999) %}{{ 'a' * 10 }}{% endfor %}", "100000 characters"),
        ("{{ lipsum(999999) }}", "undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_would_hang_or_swell_is_stopped(source: str, why: str) -> None:
    with pytest.raises(TemplateFailure, match=why):
        render(source, limit_ms=200 if "long" in why else 60_000)


def test_steps_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.template_sandbox.STEPS_MAX", 1000)
    assert len(render("{% for i in range(999) %}a{% endfor %}")) == 999
    with pytest.raises(TemplateFailure, match="more than 1000 steps"):
        render("{% for i in range(999) %}{{ i|string }}{% endfor %}")


def test_time_is_limited() -> None:
    ticks = itertools.count()
    environment = TemplateSandbox(monotonic=lambda: float(next(ticks)))
    template = environment.from_string("{% for i in range(1000) %}{{ i }}{% endfor %}")
    environment.begin(10_000, 3)
    with pytest.raises(Exception, match="takes too long"):
        template.render()
    environment.begin(10_000, 1000 / STEPS_PER_LOOK + 1)
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
