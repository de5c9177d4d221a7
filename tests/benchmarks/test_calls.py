"""What ``lab.benchmarks.calls`` has a router count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.benchmarks.counting import sitecustomize as counting


def called_twice() -> int:
    return len("a word")


def test_calls_of_both_kinds_are_counted_from_one_signal_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    into = tmp_path / "calls.json"
    monkeypatch.setenv("COUNT_CALLS_INTO", str(into))

    called_twice()
    counting.begin(0, None)
    called_twice()
    called_twice()
    counting.end(0, None)
    called_twice()

    told = json.loads(into.read_text())
    assert told["python"]["test_calls.py called_twice"] == 2
    assert told["c"]["builtins len"] == 2
