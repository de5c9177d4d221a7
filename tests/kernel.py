"""Which tests are the kernel's own: those that import nothing else of poolgrid. ``make kernel`` runs them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

KERNEL = "poolgrid.kernel"

HELPERS = (
    "poolgrid.server.global_router.document",
    "poolgrid.server.router.policy_loading",
    "poolgrid.server.workers.timing",
    "poolgrid.plugins.simulated.core",
)
"""What such tests make their inputs with: grids from documents, policies by name, step times, a pure engine."""


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file(module: str) -> Path | None:
    """The file of a module of the repository, or of the module that has this name in it."""
    for name in (module, module.rpartition(".")[0]):
        path = ROOT.joinpath(*name.split("."))
        for found in (path.with_suffix(".py"), path / "__init__.py"):
            if name and found.is_file():
                return found
    return None


@cache
def product_imports(path: Path) -> frozenset[str]:
    """Return what a test imports of poolgrid, by itself and through other modules of tests and lab."""
    found, waiting, seen = set[str](), [path], {path}
    while waiting:
        for name in _imports(waiting.pop()):
            if name.startswith("poolgrid."):
                found.add(name)
            elif name.startswith(("tests.", "lab.")) and (file := _file(name)) is not None and file not in seen:
                seen.add(file)
                waiting.append(file)
    return frozenset(found)


def kernel_tests() -> list[Path]:
    """Return the files of the kernel's own tests."""
    return [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if any(name.startswith(KERNEL) for name in product_imports(path))
        and all(name.startswith((KERNEL, *HELPERS)) for name in product_imports(path))
    ]


if __name__ == "__main__":
    sys.stdout.writelines(f"{path.relative_to(ROOT)}\n" for path in kernel_tests())
