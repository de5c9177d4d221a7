"""Modules of ours are called by the name that is installed: ``poolgrid.server.router``, never ``router``.

Where tests run, the directory ``router`` can be imported as ``router`` too. That gives a second copy of each module,
with classes and state of its own, and where poolgrid is installed it gives nothing at all.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTALLED = {path.name for path in (ROOT / "src" / "poolgrid" / "server").iterdir() if path.is_symlink()}
SEARCHED = sorted({path.parent.name for path in ROOT.glob("*/__init__.py")})

PROGRAM_LINE = re.compile(r"^\s*(?:from ([\w.]+) import .+|import ([\w.]+)(?: as \w+)?)$", re.MULTILINE)
"""An import in a text: programs that tests hand to another interpreter."""


def _is_module(*parts: str) -> bool:
    path = ROOT.joinpath(*parts)
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _names(source: str) -> Iterator[tuple[int, str]]:
    """Everything in a source that could name a module, with its line: imports, and texts that are given to
    ``monkeypatch``, ``importlib``, ``python -m`` or ``python -c``.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            whole = node.value.partition(":")[0]
            if re.fullmatch(r"\w+(\.\w+)+", whole) and _is_module(*whole.split(".")[:2]):
                yield node.lineno, node.value
            if "import " in node.value:
                yield from ((node.lineno, found[1] or found[2]) for found in PROGRAM_LINE.finditer(node.value))


def misnamed(source: str) -> list[tuple[int, str]]:
    """What a source calls by the name of its directory, with the line."""
    return [(line, name) for line, name in _names(source) if name.partition(".")[0] in INSTALLED]


@pytest.mark.parametrize("directory", SEARCHED)
def test_modules_are_called_by_the_name_that_is_installed(directory: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}, use poolgrid.server.{name}"
        for path in sorted((ROOT / directory).rglob("*.py"))
        # The rules of imports name packages as their directories.
        if path != ROOT / "tests" / "test_architecture.py"
        for line, name in misnamed(path.read_text())
    ]

    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import X", ["X"]),
        ("import X.metrics as codec", ["X.metrics"]),
        ("from X import metrics, events", ["X"]),
        ("def f():\n    from X.metrics import decode", ["X.metrics"]),
        ("patch('X.metrics.LIMIT', 1)", ["X.metrics.LIMIT"]),
        ("run('X.metrics:main')", ["X.metrics:main"]),
        ("program = 'import sys\\nfrom X.metrics import decode'", ["X.metrics"]),
        ("'X.toml', 'X', 'the X.metrics in a sentence', 'from X to Y', 'tests.X.metrics'", []),
        ("from poolgrid.server.X import metrics\nimport poolgrid.server.X.metrics", []),
        ("patch('poolgrid.server.X.metrics.LIMIT', 1)", []),
    ],
)
def test_a_module_called_by_another_name_is_found(source: str, names: list[str]) -> None:
    assert [name for _, name in misnamed(source.replace("X", "router"))] == [
        name.replace("X", "router") for name in names
    ]
