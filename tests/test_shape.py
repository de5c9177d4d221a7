"""The size of the project: budgets in ``tests/shape.toml`` that only go down.

Raising a budget needs a decision record. When the project gets smaller, lower the budget in the same commit:
``python -m tests.shape`` prints today's figures.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.shape import (
    base_classes_of_other_packages,
    classes,
    complexity,
    figures,
    modules_loaded,
    modules_run_by_a_request,
    product,
    upper_pins,
)

BUDGET = tomllib.loads(Path(__file__).with_name("shape.toml").read_text())


@pytest.mark.parametrize("name", sorted(BUDGET["most"]))
def test_the_project_is_within_its_budget(name: str) -> None:
    figure, most = figures()[name], BUDGET["most"][name]

    assert figure <= most, f"{name}: {figure}, the budget in tests/shape.toml is {most}"


def test_a_budget_is_close_to_what_it_limits() -> None:
    loose = {name: (figure, BUDGET["most"][name]) for name, figure in figures().items()}

    assert not {name: pair for name, pair in loose.items() if pair[1] > pair[0] * 1.02 + 5}, "lower these budgets"


def test_no_class_is_longer_than_allowed() -> None:
    most, listed = BUDGET["class_lines"]["most"], BUDGET["class_lines"]["longer"]
    long = {name: lines for name, lines in classes().items() if lines > most}

    assert not {name: lines for name, lines in long.items() if lines > listed.get(name, most)}
    assert set(listed) <= set(long), "these are short enough now, take them off the list"


def test_no_function_is_more_complex_than_allowed() -> None:
    most, listed = BUDGET["complexity"]["most"], BUDGET["complexity"]["higher"]
    complex_functions = complexity(most)
    assert not {name: found for name, found in complex_functions.items() if found > listed.get(name, most)}
    assert set(listed) <= set(complex_functions), "these are simple enough now, take them off the list"


def test_a_router_loads_no_more_modules_than_allowed() -> None:
    loaded = modules_loaded("poolgrid.router.bootstrap")

    assert len(loaded) <= BUDGET["modules_loaded"]["router"], f"a router loads {len(loaded)} modules of ours"


def test_a_chat_request_runs_no_more_modules_than_allowed() -> None:
    run = modules_run_by_a_request()

    assert "poolgrid.router.core.selector" in run, "the request was not seen"
    assert len(run) <= BUDGET["modules_run"]["request"], f"a request runs {len(run)} modules of ours"


def test_no_class_derives_from_a_private_class_of_another_package() -> None:
    found = base_classes_of_other_packages()
    assert found <= set(BUDGET["foreign_bases"]["listed"]), found - set(BUDGET["foreign_bases"]["listed"])


def test_only_listed_dependencies_have_an_upper_pin() -> None:
    assert upper_pins() == set(BUDGET["upper_pins"]["listed"])


def test_the_product_is_found() -> None:
    assert len(product()) > 300
