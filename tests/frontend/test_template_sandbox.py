"""A chat template cannot hang the router, nor fill its memory."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.frontend.chat_template import ChatTemplate, TemplateFailure
from poolgrid.frontend.models import TINY_MODEL_PATH
from poolgrid.frontend.prompt_model import ModelDirectoryError, PromptModel
from poolgrid.frontend.template_sandbox import ENTRIES_MAX, STEPS_PER_LOOK, TemplateSandbox, entries_of

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


NESTINGS = {
    "lists": ("l=[1]", "n.l = [n.l, n.l]"),
    "tuples": ("l=(1,)", "n.l = (n.l, n.l)"),
    "objects": ("l={}", "n.l = {'a': n.l, 'b': n.l}"),
    "calls of dict": ("l={}", "n.l = dict(a=n.l, b=n.l)"),
    "sums": ("l=[1]", "n.l = n.l + n.l"),
    "lists in sums": ("l=[1]", "n.l = [n.l] + [n.l]"),
    "products": ("l=[1]", "n.l = [n.l] * 2"),
    "slices of lists": ("l=[1]", "n.l = [n.l[:], n.l|list]"),
}


@pytest.mark.parametrize("nesting", sorted(NESTINGS))
@pytest.mark.parametrize("use", ["{{ n.l|tojson }}", "{{ n.l }}", "{{ n.l == n.l[:] }}"])
def test_a_value_that_is_small_in_memory_and_endless_to_print_is_never_made(nesting: str, use: str) -> None:
    """60 doublings: any look at what is inside would last for ever."""
    first, again = NESTINGS[nesting]
    source = f"{{% set n = namespace({first}) %}}{{% for i in range(60) %}}{{% set {again} %}}{{% endfor %}}{use}"

    with pytest.raises(TemplateFailure, match=f"a value has more than {ENTRIES_MAX} entries|takes too long"):
        ChatTemplate(source).render(HI, limit_ms=500)


@pytest.mark.parametrize(
    "source",
    [
        "{% set n = namespace(l=[1]) %}{% for i in range(9) %}{% set n.l = n.l|batch(5000, n.l)|list %}{% endfor %}"
        "{{ n.l }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}{% else %}{{ varargs }}{% endif %}{% endmacro %}"
        "{{ f(60, 1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1, a=kwargs, b=kwargs) }}{% else %}{{ kwargs }}{% endif %}{% endmacro %}"
        "{{ f(60, a=1) }}",
        "{% set l = [1] * 900 %}{{ ([l] * 900)|sum(start=[]) }}",
        "{% set n = namespace(l=[1]) %}{% for i in range(60) %}{% set n.l = [n.l, n.l]|sum(start=[]) %}{% endfor %}",
        "{% set n = namespace(l=[1]) %}{% for i in range(9) %}"
        "{% set n.l = range(999)|map(attribute='none', default=n.l)|list %}{% endfor %}{{ n.l }}",
        "{% set n = namespace(l=[1]) %}{% for i in range(9) %}{% set n.l = [1]|slice(999, n.l)|list %}{% endfor %}"
        "{{ n.l }}",
        "{% set n = namespace(l=[{'a': 1}]) %}{% for i in range(9) %}"
        "{% set n.l = (n.l * 99)|groupby('b', default=n.l) %}{% endfor %}{{ n.l }}",
        "{% set l = range(99999)|list %}{{ l|reject('in', l)|list }}",
        "{% set l = range(99999)|list %}{{ l|map(attribute='real')|selectattr('real', 'in', l)|list }}",
        "{% set l = [[1] * 9999] * 99 %}{{ (l * 999)|select('equalto', l[0])|list|length }}",
        "{{ ('a ' * 9000000).split() }}",
        "{{ ('a ' * 9000000).rsplit(' ') }}",
        "{{ ('a\n' * 9000000).splitlines() }}",
        "{{ ('a' * 9000000)|list }}",
        "{{ ('www.a.b ' * 900000)|urlize }}",
    ],
)
def test_other_ways_to_make_much_of_little_end_too(source: str) -> None:
    with pytest.raises(TemplateFailure, match=r"limit|allowed"):
        ChatTemplate(source).render(HI, limit_ms=500)


def test_a_text_that_is_searched_for_each_item_of_a_list_meets_the_clock() -> None:
    now = itertools.count()
    environment = TemplateSandbox(monotonic=lambda: float(next(now)))
    template = environment.from_string("{{ ['b', 'c', 'd', 'e', 'f']|select('in', text)|list }}")
    environment.begin(100_000, 3)
    with pytest.raises(Exception, match="takes too long"):
        template.render(text="a" * 5000)


def test_namespaces_in_each_other_are_not_printed() -> None:
    nested = "{% set n = namespace(l=1) %}{% for i in range(60) %}{% set n.l = namespace(a=n.l, b=n.l) %}{% endfor %}"

    assert render(nested + "{{ n.l }}") == "<Namespace>"


@given(
    st.recursive(
        st.integers(0, 9) | st.text("ab", max_size=3),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("xyz", max_size=2), inner, max_size=4),
    )
)
def test_the_entries_that_a_value_is_said_to_have_are_those_that_a_walk_finds(value: Any) -> None:
    def walk(here: Any) -> int:
        if isinstance(here, dict):
            here = list(here.values())
        return len(here) + sum(map(walk, here)) if isinstance(here, list) else 0

    environment = TemplateSandbox()
    template = environment.from_string("{{ seen([value, value] + [[value]] * 2, {'a': value}) }}")
    seen: list[int] = []
    environment.begin(10_000, 60)
    template.render(value=value, seen=lambda *built: seen.extend(map(entries_of, built)))

    assert seen == [2 + 2 * walk(value) + 2 * (2 + walk(value)), 1 + walk(value)]


def test_the_clock_is_read_beside_every_large_operation() -> None:
    """With a clock that says so, a rendering ends at once, not some steps later."""
    now = 0.0
    environment = TemplateSandbox(monotonic=lambda: now)
    template = environment.from_string("{% set x = 'a' * 5000 %}{{ late() }}{{ x|upper }}{{ not_late_enough() }}")
    late: list[str] = []

    def be_late() -> str:
        nonlocal now
        now = 99.0
        return ""

    environment.begin(100_000, 1)
    with pytest.raises(Exception, match="takes too long"):
        template.render(late=be_late, not_late_enough=lambda: late.append("went on"))
    assert not late


def test_steps_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poolgrid.frontend.template_sandbox.STEPS_MAX", 1000)
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
