"""`poolgrid what-if` on recorded traffic, and the settings file of a router."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from poolgrid.plugins.simulation.what_if_command import unlike_measured
from poolgrid.server.cli.command_line import command
from poolgrid.server.cli.main import app
from poolgrid.server.cli.options import with_settings
from poolgrid.server.router.settings import RouterSettings
from tests.router.recorded_router import NAMES, RecordedRouter

TRACE = Path(__file__).parents[1] / "data" / "conversation_1000.jsonl"


def recorded(directory: Path, simulated_speedup: float = 0.0) -> Path:
    """A data_dir with some hundred recorded requests."""

    async def record() -> RecordedRouter:
        router = RecordedRouter(seed=21, policy="field")
        router.simulated_speedup = simulated_speedup
        for name in NAMES:
            router.join(name)
        for _ in range(250):
            router.step()
        await router.recorder.stop()
        return router

    return asyncio.run(record()).save(directory)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("recording"))


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.stderr


def test_what_if_compares_variants_with_what_was_recorded_by_the_keys_of_simulate(
    recording: Path, tmp_path: Path
) -> None:
    table = run("what-if", recording, "--policy", "kv,round-robin", "--out",
                tmp_path / "out.json")  # fmt: skip
    report = json.loads((tmp_path / "out.json").read_text())
    run("simulate", TRACE, "--requests", 5, "--policy", "kv", "--out", tmp_path / "simulated.json")
    simulated = json.loads((tmp_path / "simulated.json").read_text())

    assert list(report["policies"]) == ["recorded", "kv", "round-robin"]
    assert set(simulated) <= set(report)
    assert set(simulated["policies"]["kv"]) <= set(report["policies"]["recorded"])
    assert report["policies"]["recorded"]["settings"] == {"policy": "field"}
    assert report["workers"] == len(NAMES)
    assert report["requests"] == report["policies"]["recorded"]["requests"] > 50
    ratio = {name: each["cached_token_ratio"] for name, each in report["policies"].items()}
    assert ratio["recorded"] > ratio["round-robin"]
    assert report["measured"]["requests"] == report["requests"]
    assert "recorded" in table


@pytest.mark.parametrize(
    ("reused", "ttft_ms", "is_like"), [(0.42, 80.0, True), (0.52, 80.0, False), (0.42, 1249.0, False)]
)
def test_a_simulation_unlike_what_was_measured_is_named_so(reused: float, ttft_ms: float, is_like: bool) -> None:
    def figures(reused: float, ttft_ms: float) -> dict[str, object]:
        times = {"mean": ttft_ms, "p99": ttft_ms}
        return {"cached_token_ratio": reused, "ttft_ms": times, "itl_ms": times, "worker_tokens_max_over_mean": 1.0}

    said = unlike_measured(figures(0.4244, 76.0), figures(reused, ttft_ms))

    assert (said == "") == is_like
    assert is_like or "does not reproduce what was measured: 42.44 % reused and TTFT 76.00 ms, simulated" in said


def test_simulated_engines_are_played_as_fast_as_they_were_when_they_were_recorded(
    recording: Path, tmp_path: Path
) -> None:
    def ttft_ms(directory: Path, *options: str, said: str) -> float:
        result = CliRunner().invoke(app, ["what-if", str(directory), *options, "--out", str(tmp_path / "out.json")])
        assert result.exit_code == 0, result.output
        assert said in result.stderr
        assert ("times as fast" in result.stderr) is bool(said)
        report = json.loads((tmp_path / "out.json").read_text())
        return float(report["policies"]["recorded"]["ttft_ms"]["mean"])

    fast = recorded(tmp_path / "fast", simulated_speedup=20)

    real = ttft_ms(recording, said="")
    assert ttft_ms(fast, said="20 times as fast as real ones; so are these") < real / 10
    assert ttft_ms(fast, "--speedup", "1", said="and these are 1 times as fast") > real / 2
    assert ttft_ms(recording, "--speedup", "20", said="") < real / 10


def test_what_if_is_a_function_of_its_arguments(recording: Path, tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        run("what-if", recording, "--policy", "random", "--out", tmp_path / name)

    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "clever"], "'clever' is unknown"),
        (["--out", "/nowhere/x"], "cannot be written"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_anything_runs(recording: Path, options: list[str], words: str) -> None:
    assert words in run("what-if", recording, *options, status=2)


def test_a_directory_without_decisions_is_refused(recording: Path, tmp_path: Path) -> None:
    for segment in recording.glob("*.segment"):
        (tmp_path / segment.name).write_bytes(segment.read_bytes())

    assert "no decisions in" in run("what-if", tmp_path, status=2)
    assert "no decisions in" in run("replay", tmp_path, status=2)


# -- the settings file -------------------------------------------------------------------------------------------------


def router_settings(*arguments: str, env: dict[str, str] | None = None, status: int = 0) -> RouterSettings:
    """What a router would run with."""
    seen: list[RouterSettings] = []

    @command()
    @with_settings(RouterSettings, from_file=True)
    def one(settings: RouterSettings) -> None:
        """Keep the settings."""
        seen.append(settings)

    result = CliRunner().invoke(one, list(arguments), env=env)
    assert result.exit_code == status, result.output
    if status:
        raise ValueError(result.stderr)
    return seen[0]


def test_a_settings_file_gives_way_to_the_environment_and_that_to_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text("worker_queue_factor = 1.5\nindex_budget_bytes = 2000\nselect_port = 7\n")

    found = router_settings(
        "--settings-file", str(file), "--index-budget-bytes", "3000", env={"POOLGRID_SELECT_PORT": "8"}
    )

    assert (found.worker_queue_factor, found.index_budget_bytes, found.select_port) == (1.5, 3000, 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("que_weight = 1", "'que_weight' is no setting of this command"),
        ("worker_queue_factor = ", "is not TOML"),
        ("worker_queue_factor = " + "[" * 50_000, "is not TOML that can be read: it is nested too deeply"),
        ("worker_queue_factor = 5000", "--worker-queue-factor 5000: must be less than or equal to 1000"),
    ],
)
def test_a_settings_file_that_is_wrong_says_where(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "router.toml"
    file.write_text(text)

    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        router_settings("--settings-file", str(file), status=2)
    with pytest.raises(ValueError, match="cannot be read"):
        router_settings("--settings-file", str(tmp_path / "absent"), status=2)
