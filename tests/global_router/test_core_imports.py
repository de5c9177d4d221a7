"""The core is pure: it imports itself, the contract, pydantic, numpy, and harmless parts of the library."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.global_router.documents import ROOT

CORE = sorted((ROOT / "global_router" / "core").rglob("*.py"))
ALLOWED = {
    "__future__", "collections", "dataclasses", "difflib", "enum", "functools", "itertools", "json", "math", "numpy",
    "poolgrid", "pydantic", "re", "statistics", "types", "typing",
}  # fmt: skip


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_of_the_core_has_no_sockets_clock_or_randomness(path: Path) -> None:
    names = imported(path)

    assert {name.split(".")[0] for name in names} <= ALLOWED
    ours = {name for name in names if name.startswith("poolgrid")}
    assert all(f"{name}.".startswith(("poolgrid.global_router.core.", "poolgrid.wire.")) for name in ours)
