from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from lab.benchmarks.cpu_profile import GROUPS, LINES, find_py_spy

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "poolgrid"


def _functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            found |= {f"{owner.name}.{each.name}" for each in owner.body if hasattr(each, "name")}
    return found


@pytest.mark.parametrize(("path", "pattern", "group"), LINES)
def test_a_line_names_a_file_and_functions_that_exist(path: str, pattern: str, group: str) -> None:
    top = path.partition("/")[0]
    found = PACKAGE / path

    assert group in GROUPS
    assert found.exists() or (not (PACKAGE / top).is_dir() and importlib.util.find_spec(top) is not None)
    if found.is_file():
        assert any(re.fullmatch(pattern, function) for function in _functions(found)), pattern


def test_a_missing_profiler_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(FileNotFoundError, match="no py-spy beside"):
        find_py_spy(str(tmp_path / "python"))
