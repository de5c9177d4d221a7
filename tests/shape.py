"""What ``test_shape.py`` limits, measured: ``python -m tests.shape`` prints it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lab.website.configuration_page import SECTIONS
from tests.exported_metrics import exported

ROOT = Path(__file__).parents[1]
PRODUCT = ("router", "global_router", "workers")


@cache
def product() -> dict[str, str]:
    """Return the source of each installed module by its path."""
    own = (path for path in (ROOT / "src").rglob("*.py") if not path.is_symlink())
    linked = (path for name in PRODUCT for path in (ROOT / name).rglob("*.py"))
    paths = {path.resolve() for path in (*own, *linked)}
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(paths)}


FEATURES = {"sessions": "session", "tenants": "tenant", "media": "media"}
"""Features that are spread over the product: a plug-in would be named by its own files."""

TWIN = re.compile(r"(?P<slow>\w+?)(?:_of_few|_few|_of_one|_one|_only)")
"""The name of a fast way beside a slow one, which must give the same to the bit."""


class Shape(NamedTuple):
    """What is counted of a module."""

    classes: tuple[str, ...]
    functions: frozenset[str]
    callables_of_constructors: int
    """Arguments of ``__init__`` that are functions: objects that call each other back."""
    foreign_bases: tuple[str, ...]
    """Classes whose base is from another package and private there by its own name or its module's, or uvicorn's."""


@cache
def shapes() -> dict[str, Shape]:
    """Return the shape of each installed module by its path."""
    return {path: shape_of(tuple(ast.walk(ast.parse(source)))) for path, source in product().items()}


def shape_of(nodes: Sequence[ast.AST]) -> Shape:
    """Return what is counted of a module, of which these are all nodes."""
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    arguments = [each for node in functions if node.name == "__init__" for each in ast.walk(node.args)]
    given = [each.annotation for each in arguments if isinstance(each, ast.arg) and each.annotation is not None]
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("poolgrid")
        for alias in node.names
    }
    bases = [
        (node.name, imported.get(ast.unparse(base).partition(".")[0], "")) for node in classes for base in node.bases
    ]
    return Shape(
        tuple(node.name for node in classes),
        frozenset(node.name for node in functions),
        sum("Callable" in ast.unparse(annotation) for annotation in given),
        tuple(f"{name}({base})" for name, base in bases if is_private(base) or base.startswith("uvicorn.")),
    )


def is_private(name: str) -> bool:
    """Tell whether a dotted name has a private part."""
    return any(part.startswith("_") and part != "__future__" for part in name.split("."))


def files_that_name(word: str) -> int:
    """Return how many files of the product have a word in them."""
    return sum(word in source.lower() for source in product().values())


def twins() -> set[str]:
    """Return each function of kernel and server that does for few what another one of its module does for many."""
    found = set()
    for path, (_, functions, *_) in shapes().items():
        if "/plugins/" not in path:
            pairs = ((name, TWIN.fullmatch(name)) for name in functions)
            found |= {f"{path}:{name}" for name, match in pairs if match is not None and match["slow"] in functions}
    return found


@cache
def figures() -> dict[str, int]:
    """Return what has a budget, by its name there."""
    names = Counter(name for shape in shapes().values() for name in shape.classes)
    return {
        "settings": len({name for section in SECTIONS for model in section.models for name in model.model_fields}),
        "metrics": len({each.family.name for each in exported()}),
        "class_names_used_twice": sum(1 for name, count in names.items() if count > 1 and not name.startswith("_")),
        "callables_of_constructors": sum(shape.callables_of_constructors for shape in shapes().values()),
        **{f"files_that_name_{feature}": files_that_name(word) for feature, word in FEATURES.items()},
    }


def complexity(most: int) -> dict[str, int]:
    """Return each function whose cyclomatic complexity is above a limit, by ``path:name``, as ruff counts it."""
    command = [sys.executable, "-m", "ruff", "check", "--select", "C901", "--output-format", "concise", "--no-cache"]
    limit = ["--config", f"lint.mccabe.max-complexity={most}", "src", *PRODUCT]
    done = subprocess.run([*command, *limit], cwd=ROOT, capture_output=True, text=True, check=False)
    rows = re.findall(r"^(\S+?):\d+:\d+: C901 `(\w+)` is too complex \((\d+) >", done.stdout, re.MULTILINE)
    return {f"{path}:{name}": int(figure) for path, name, figure in rows}


def base_classes_of_other_packages() -> set[str]:
    """Return base classes from another package whose own name or module is private there, or all of uvicorn's."""
    return {f"{path}:{found}" for path, shape in shapes().items() for found in shape.foreign_bases}


def upper_pins() -> set[str]:
    """Return the required dependencies that have an upper bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {re.split(r"[^\w.-]", line)[0] for line in project["dependencies"] if "<" in line.partition(";")[0]}


def top_level() -> set[str]:
    """Return the names at the top of the repository: of what git keeps, or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {path.partition("/")[0] for path in done.stdout.split("\0") if path and (ROOT / path).exists()}


if __name__ == "__main__":
    for name, figure in figures().items():
        sys.stdout.write(f"{name} = {figure}\n")
    for name, figure in complexity(25).items():
        sys.stdout.write(f'"{name}" = {figure}\n')
    sys.stdout.write(f"foreign bases: {sorted(base_classes_of_other_packages())}\n")
    sys.stdout.write(f"twins: {sorted(twins())}\n")
    sys.stdout.write(f"upper pins: {sorted(upper_pins())}\n")
