"""What the project may not grow without a decision: ``tests/shape.toml``. Lines and modules are not counted.

``python -m tests.shape`` prints today's figures.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.shape import (
    base_classes_of_other_packages,
    complexity,
    figures,
    product,
    top_level,
    twins,
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


def test_no_function_is_more_complex_than_allowed() -> None:
    most, listed = BUDGET["complexity"]["most"], BUDGET["complexity"]["higher"]
    complex_functions = complexity(most)
    assert not {name: found for name, found in complex_functions.items() if found > listed.get(name, most)}
    assert set(listed) <= set(complex_functions), "these are simple enough now, take them off the list"


def test_no_class_derives_from_a_private_class_of_another_package() -> None:
    found = base_classes_of_other_packages()
    assert found <= set(BUDGET["foreign_bases"]["listed"]), found - set(BUDGET["foreign_bases"]["listed"])


def test_the_list_of_fast_ways_beside_slow_ones_only_shrinks() -> None:
    listed = set(BUDGET["twins"]["listed"])

    assert twins() == listed, "one way for each thing: remove the other, and its line in tests/shape.toml"


def test_only_listed_dependencies_have_an_upper_pin() -> None:
    assert upper_pins() == set(BUDGET["upper_pins"]["listed"])


def test_the_repository_has_no_unknown_entry_at_its_top() -> None:
    assert top_level() == set(BUDGET["top_level"]["listed"])


def test_the_product_is_found() -> None:
    assert len(product()) > 300
