"""What may be compiled (``compiled_modules.toml``), and that classes are in both forms what their sources say.

The first half looks at sources, in every run. The second looks at classes: in CI at interpreted ones, in
``make compiled`` at compiled ones, which is where it could fail.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from poolgrid.router.core.selector import NoWorker
from poolgrid.router.core.stage_plan import Leg
from poolgrid.wire.identifiers import Stage

ROOT = Path(__file__).parents[1]
TABLE = tomllib.loads((ROOT / "compiled_modules.toml").read_text())
COMPILED: list[str] = TABLE["compiled"]
INTERPRETED: dict[str, str] = TABLE["interpreted"]
DIRECTORIES: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]

WITH_VALUES_OF_THEIR_OWN = {"Enum", "IntEnum", "StrEnum", "NamedTuple", "Protocol", "Struct", "ABC"}
"""Bases of classes whose assignments are no defaults of native attributes, or are taken as they stand."""


SWITCHES = ("frozen", "eq", "order", "array_like", "gc", "omit_defaults", "forbid_unknown_fields")
"""Arguments of structs that can be asked for afterwards."""


def source_of(module: str) -> Path:
    _, package, *rest = module.split(".")
    return ROOT.joinpath(DIRECTORIES[f"poolgrid.{package}"], *rest).with_suffix(".py")


def classes_of(source: str) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))


def losses(source: str) -> list[str]:
    """Return what mypyc would do otherwise than Python in a module, without an error."""
    found = [
        f"{ast.unparse(call)}: what ** holds is passed as one argument"
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("super()")
        if any(keyword.arg is None for keyword in call.keywords)
    ]
    for node in ast.walk(ast.parse(source)):
        last = node.finalbody if isinstance(node, ast.Try) else [node] if isinstance(node, ast.AsyncWith) else []
        inside = [type(each) for line in last for each in ast.walk(line)]
        if isinstance(node, ast.Try) and ast.Await in inside:
            found.append("await in finally: what was raised before it may be lost, a cancellation too")
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            found += [
                f"{ast.unparse(each)} in a comprehension: what it reads of itself is what it was before"
                for each in ast.walk(node)
                if isinstance(each, ast.NamedExpr)
            ]
        if isinstance(node, ast.AsyncWith) and ast.Return in inside:
            found.append("return in async with: what is raised there may be lost, a cancellation too")
    for each in classes_of(source):
        names = [keyword.arg for keyword in each.keywords if keyword.arg != "metaclass"]
        if names:
            found.append(f"class {each.name}: its arguments {', '.join(map(str, names))} are dropped")
        bases = {base.value if isinstance(base, ast.Subscript) else base for base in each.bases}
        if each.decorator_list or {ast.unparse(base).rpartition(".")[2] for base in bases} & WITH_VALUES_OF_THEIR_OWN:
            continue
        for line in each.body:
            if isinstance(line, ast.Assign) or (isinstance(line, ast.AnnAssign) and line.value is not None):
                said = ast.unparse(line.annotation) if isinstance(line, ast.AnnAssign) else ""
                value = line.value
                if not said.startswith(("ClassVar", "Final")) and not isinstance(value, ast.Constant | ast.Tuple):
                    found.append(f"class {each.name}: {ast.unparse(line)} is not set; make it a ClassVar")
    return found


@pytest.mark.parametrize("module", [*COMPILED, *INTERPRETED])
def test_every_module_of_the_table_exists(module: str) -> None:
    assert source_of(module).is_file()


def test_the_table_names_no_module_twice_and_a_reason_for_each_that_is_left_out() -> None:
    names = [*COMPILED, *INTERPRETED]

    assert len(names) == len(set(names))
    assert sorted(COMPILED) == COMPILED
    assert all(INTERPRETED.values())


@pytest.mark.parametrize("module", COMPILED)
def test_compiling_leaves_nothing_out_of_a_modules_classes(module: str) -> None:
    assert losses(source_of(module).read_text()) == []


@pytest.mark.parametrize(
    ("source", "lost"),
    [
        ("class End(msgspec.Struct, frozen=True): ...", ["class End: its arguments frozen are dropped"]),
        ("class End(Base, tag='end', gc=False): ...", ["class End: its arguments tag, gc are dropped"]),
        ("class End(metaclass=ABCMeta): ...", []),
        (
            "async def f():\n    try:\n        return await g()\n    finally:\n        await h()",
            ["await in finally: what was raised before it may be lost, a cancellation too"],
        ),
        (
            "async def f():\n    async with lock:\n        return 1",
            ["return in async with: what is raised there may be lost, a cancellation too"],
        ),
        (
            "sums = [(total := total + each) for each in numbers]",
            ["(total := (total + each)) in a comprehension: what it reads of itself is what it was before"],
        ),
        ("super().__init__(1, **more)", ["super().__init__(1, **more): what ** holds is passed as one argument"]),
        (
            "class Gate:\n    bytes_max = 64 * 1024",
            ["class Gate: bytes_max = 64 * 1024 is not set; make it a ClassVar"],
        ),
        ("class Gate:\n    bytes_max: ClassVar[int] = 64 * 1024", []),
        ("class Tags(Extension):\n    tags = {'a'}", ["class Tags: tags = {'a'} is not set; make it a ClassVar"]),
        ("class Kind(Enum):\n    A = auto()", []),
        ("@dataclass\nclass Counters:\n    all: list[int] = field(default_factory=list)", []),
    ],
)
def test_what_would_be_left_out_is_found(source: str, lost: list[str]) -> None:
    assert losses(source) == lost


def classes_as_written(module: str) -> Iterator[tuple[ast.ClassDef, type]]:
    found = importlib.import_module(module)
    for written in ast.parse(source_of(module).read_text()).body:
        if isinstance(written, ast.ClassDef):
            yield written, getattr(found, written.name)


@pytest.mark.parametrize("module", [*COMPILED, *INTERPRETED])
def test_classes_are_what_their_sources_say(module: str) -> None:
    for written, made in classes_as_written(module):
        if issubclass(made, msgspec.Struct):
            config: Any = made.__struct_config__
            for keyword in written.keywords:
                if keyword.arg in SWITCHES and isinstance(keyword.value, ast.Constant):
                    assert getattr(config, keyword.arg) == keyword.value.value, (made, keyword.arg)
        for decorator in written.decorator_list:
            if dataclasses.is_dataclass(made) and isinstance(decorator, ast.Call):
                said = {keyword.arg: keyword.value.value for keyword in decorator.keywords}  # type: ignore[attr-defined]
                if said.get("frozen"):
                    assert made.__setattr__ is not object.__setattr__, made
                if said.get("slots"):
                    assert made.__dictoffset__ == 0, made


PUT_BY_TESTS = {
    "poolgrid.frontend.inference_endpoint": ["LOOK_UP_RENDERING_MS"],
    "poolgrid.router.catching_up": ["RESYNC_MS"],
    "poolgrid.router.core.prefix_index": ["RUN_BLOCKS_MAX", "EVICTION_SLICE_BLOCKS", "SECOND_CHANCES"],
    "poolgrid.router.core.selector": ["FEW_HOLDERS", "FEW_CANDIDATES"],
    "poolgrid.router.sharded_map": ["SPLIT_EVERY_ENTRIES", "DEPTH_MAX"],
}
"""Constants in whose place tests put other values, in both forms."""


def looked_up(source: str) -> list[str]:
    """Return the constants of a compiled module that each use looks up in a dict, because they are not ``Final``.

    Of tuples mypyc 2.4.1 may lose the value where they are.
    """
    return [
        node.targets[0].id
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if node.targets[0].id.isupper() and not isinstance(node.value, ast.Tuple)
        if not ast.unparse(node.value).startswith(("TypeVar(", "Annotated["))
    ]


def test_what_is_looked_up_is_seen() -> None:
    source = "T = TypeVar('T')\nA = 1\n_B = {}\nC = (1, 2)\nD: Final = 1\nKey = tuple[int]\nlog = logger()"
    assert looked_up(source) == ["A", "_B"]


@pytest.mark.parametrize("module", COMPILED)
def test_constants_are_final(module: str) -> None:
    assert looked_up(source_of(module).read_text()) == PUT_BY_TESTS.get(module, [])


FROZEN = [
    (Leg(Stage.WHOLE, (), "aggregated"), "reason"),
    (NoWorker("m", {}), "model"),
]


@pytest.mark.parametrize(("frozen", "field"), FROZEN)
def test_what_is_frozen_is_frozen(frozen: object, field: str) -> None:
    with pytest.raises(AttributeError):
        setattr(frozen, field, None)


def built(what: str, copy: Path, asked: str) -> subprocess.CompletedProcess[str]:
    """Ask the build backend for something, with ``POOLGRID_COMPILE``."""
    program = f"from setuptools import build_meta; print(build_meta.{what})"
    environment = {**os.environ, "POOLGRID_COMPILE": asked}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("copy")
    for needed in DIRECTORIES.values():
        shutil.copytree(ROOT / needed, directory / needed, ignore=shutil.ignore_patterns("__pycache__"))
    for needed in ("pyproject.toml", "setup.py", "compiled_modules.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / needed, directory)
    return directory


@pytest.mark.parametrize(("asked", "compiler"), [("", False), ("0", False), ("1", True)])
def test_the_compiler_is_only_asked_for_by_who_compiles(copy: Path, asked: str, compiler: bool) -> None:
    told = built("get_requires_for_build_wheel()", copy, asked).stdout

    assert any(requirement in told for requirement in TABLE["requires"]) is compiler
    assert ("mypy" in told) is compiler


@pytest.mark.parametrize(
    ("what", "asked", "said"),
    [
        ("build_wheel('dist')", "yes", "POOLGRID_COMPILE is 'yes', allowed are 1"),
        ("build_editable('dist')", "1", "an editable installation has none"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_a_word(copy: Path, what: str, asked: str, said: str) -> None:
    done = built(what, copy, asked)

    assert done.returncode != 0
    assert said in done.stderr
    assert not list(copy.rglob("*.so"))
