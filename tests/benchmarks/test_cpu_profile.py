from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from lab.benchmarks.cpu_profile import EVENT_FUNCTIONS, GROUPS, LINES, find_py_spy, group_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "poolgrid"


def _functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            found |= {f"{owner.name}.{each.name}" for each in owner.body if hasattr(each, "name")}
    return found


def _alternatives(pattern: str) -> list[str]:
    """Return the patterns of which one is any of, each of which is to match something by itself."""
    if pattern.startswith("(?"):
        return [pattern]  # it says what it is not
    inner = re.search(r"\(([^()]*)\)", pattern)
    if inner is not None:
        before, after = pattern[: inner.start()], pattern[inner.end() :]
        # What the group stands beside belongs to its own alternative of the whole.
        first, last = before.rpartition("|"), after.partition("|")
        found = [f"{first[2]}{each}{last[0]}" for each in inner[1].split("|")]
        return [*filter(None, first[0].split("|")), *found, *(_alternatives(last[2]) if last[2] else ())]
    return pattern.split("|")


@pytest.mark.parametrize(("path", "pattern", "group"), LINES)
def test_a_line_names_a_file_and_functions_that_exist(path: str, pattern: str, group: str) -> None:
    top = path.partition("/")[0]
    found = PACKAGE / path

    assert group in GROUPS
    assert found.exists() or (not (PACKAGE / top).is_dir() and importlib.util.find_spec(top) is not None)
    if found.is_file():
        functions = _functions(found)
        for each in _alternatives(pattern):
            assert any(re.fullmatch(each, function) for function in functions), each


@pytest.mark.parametrize("name", EVENT_FUNCTIONS)
def test_a_function_of_the_event_stream_exists(name: str) -> None:
    assert name in _functions(PACKAGE / "server" / "router" / "journal_applier.py")


def test_what_writes_an_answer_counts_for_writing() -> None:
    frames = [
        "_Exchange.answer (poolgrid/server/frontend/inference_endpoint.py:9)",
        "RequestResponseCycle.send (uvicorn/protocols/http/httptools_impl.py:9)",
    ]

    assert group_of([*frames, "write (uvloop/handles/stream.pyx:1)"]) == "write"


def test_a_missing_profiler_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(FileNotFoundError, match="no py-spy beside"):
        find_py_spy(str(tmp_path / "python"))
