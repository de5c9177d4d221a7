"""`poolgrid simulate` as scripts call it: JSON keys, exit statuses, and the same figures every time."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from poolgrid.plugins.simulation.settings import SIMULATED_POLICIES
from poolgrid.plugins.simulation.simulate_command import result_table
from poolgrid.server.cli.main import app
from tests.simulation.builders import CONVERSATION


def simulate(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def squeezed(text: str) -> str:
    """Text without colours and white space: the console wraps lines wherever they reach its edge."""
    return "".join(re.sub(r"\x1b\[[\d;]*m", "", text).split())


def report(tmp_path: Path, *arguments: str, name: str = "out.json") -> dict[str, Any]:
    done = simulate(CONVERSATION, "--out", tmp_path / name, *arguments)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads((tmp_path / name).read_text())
    return found


def test_the_json_has_the_keys_that_scripts_read(tmp_path: Path) -> None:
    found = report(tmp_path, "--requests", "60", "--workers", "3")

    assert 0.0 < found["ideal_cached_token_ratio"] < 1.0
    assert list(found["policies"]) == ["kv", "round-robin", "least-loaded"]
    for policy in found["policies"].values():
        assert set(policy) >= {
            "cached_token_ratio", "ttft_ms", "itl_ms", "busy_ratio", "worker_tokens_max_over_mean"
        }  # fmt: skip
        assert policy["requests"] == 60
        for latency in (policy["ttft_ms"], policy["itl_ms"]):
            assert set(latency) == {"mean", "p50", "p90", "p99"}
            assert 0.0 < latency["p50"] <= latency["p90"] <= latency["p99"]
        assert 0.0 < policy["busy_ratio"] <= 1.0
        assert policy["worker_tokens_max_over_mean"] >= 1.0
    assert (found["requests"], found["workers"], found["speed"], found["trace"]) == (60, 3, 1.0, CONVERSATION.name)


def test_kv_reuses_more_than_round_robin_and_answers_sooner(tmp_path: Path) -> None:
    policies = report(tmp_path, "--requests", "500", "--policy", "kv,round-robin")["policies"]

    assert policies["kv"]["cached_token_ratio"] > 1.5 * policies["round-robin"]["cached_token_ratio"]
    assert policies["kv"]["ttft_ms"]["mean"] < policies["round-robin"]["ttft_ms"]["mean"]


def test_options_reach_the_policy_and_the_engines(tmp_path: Path) -> None:
    base = ("--requests", "200", "--policy", "kv", "--speed", "4")
    plain = report(tmp_path, *base)
    slow_worker = report(tmp_path, *base, "--worker-speeds", "1,0.1")
    small = report(tmp_path, *base, "--total-kv-blocks", "2200")
    table = tmp_path / "slow.json"
    table.write_text('{"prefill": [[512, 500], [8192, 4000]], "decode": [[0, 50]]}')
    slow = report(tmp_path, *base, "--timing", str(table))
    measured = report(tmp_path, *base, "--timing", "h100-qwen3-8b")

    assert slow_worker["policies"]["kv"]["ttft_ms"]["mean"] > plain["policies"]["kv"]["ttft_ms"]["mean"]
    assert small["policies"]["kv"]["cached_token_ratio"] < plain["policies"]["kv"]["cached_token_ratio"]
    assert small["blocks_per_worker"] == 2200
    assert slow["policies"]["kv"]["itl_ms"]["p50"] >= 50.0
    assert measured["policies"]["kv"]["ttft_ms"]["mean"] != plain["policies"]["kv"]["ttft_ms"]["mean"]


def test_a_policy_of_ones_own_is_named_as_the_router_takes_it(tmp_path: Path) -> None:
    own = "poolgrid.plugins.policies.baselines:LeastLoaded"
    policies = report(tmp_path, "--requests", "50", "--policy", f"{own},least-loaded")["policies"]

    assert list(policies) == [own, "least-loaded"]
    assert policies[own] == policies["least-loaded"]


def test_the_table_names_every_policy() -> None:
    done = simulate(CONVERSATION, "--requests", "20", "--policy", ",".join(SIMULATED_POLICIES))

    assert done.exit_code == 0
    assert "an infinite shared cache would reuse" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no-such-file",), "no-such-file"),
        ((CONVERSATION, "--policy", "best"), "policy 'best' is unknown, allowed are kv, field"),
        ((CONVERSATION, "--policy", "approximate"), "policy 'approximate' is unknown"),
        ((CONVERSATION, "--policy", ""), "is unknown"),
        ((CONVERSATION, "--policy", "kv,no_such_module:Policy"), "No module named 'no_such_module'"),
        ((CONVERSATION, "--requests", "5", "--total-kv-blocks", "3"), "total_kv_blocks is 3, the longest request"),
        ((CONVERSATION, "--requests", "5", "--timing", "none.json"), "none.json"),
        (
            (CONVERSATION, "--timing", "h200"),
            "--timing h200: must be published, h100-qwen3-8b, h200-qwen3-8b or a JSON file",
        ),
        ((CONVERSATION, "--workers", "0"), "--workers"),
        ((CONVERSATION, "--speed", "0"), "--speed"),
    ],
)
def test_what_cannot_be_simulated_ends_with_status_2_and_says_why(
    arguments: Sequence[str | Path], words: str, tmp_path: Path
) -> None:
    done = simulate(*arguments, "--out", tmp_path / "out.json")

    assert done.exit_code == 2
    assert squeezed(words) in squeezed(done.stderr)
    assert not (tmp_path / "out.json").exists()


def test_a_broken_trace_names_file_and_line(tmp_path: Path) -> None:
    trace = tmp_path / "broken.jsonl"
    trace.write_text(CONVERSATION.read_text().splitlines()[0] + '\n{"timestamp": 1}\n')

    done = simulate(trace)

    assert done.exit_code == 2
    assert squeezed("broken.jsonl, line 2:") in squeezed(done.stderr)


def test_a_report_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    done = simulate(CONVERSATION, "--out", tmp_path / "missing" / "out.json")

    assert done.exit_code == 2
    assert "nothingwassimulated" in squeezed(done.output)


def test_json_goes_to_standard_output_in_place_of_the_table(tmp_path: Path) -> None:
    done = simulate(CONVERSATION, "--requests", "20", "--policy", "kv", "--json", "--out", tmp_path / "out.json")

    assert done.exit_code == 0
    assert json.loads(done.stdout) == json.loads((tmp_path / "out.json").read_text())


def test_the_table_has_a_line_per_policy_and_shows_no_share_of_nothing() -> None:
    def drawn(ideal: float, **policies: float) -> str:
        latency = {"mean": 12.0, "p50": 1.0, "p90": 2.0, "p99": 30.0}
        rows = {
            name: {
                "cached_token_ratio": cached, "ttft_ms": latency, "itl_ms": latency, "busy_ratio": 0.5,
                "worker_tokens_max_over_mean": 1.25,
            }
            for name, cached in policies.items()
        }  # fmt: skip
        out = StringIO()
        Console(file=out, width=80).print(result_table(ideal, rows))
        return out.getvalue()

    first, second = drawn(0.4, kv=0.2), drawn(0.0, random=0.0)

    assert "40.0%" in first.splitlines()[0]
    assert next(line for line in first.splitlines() if "kv" in line).split() == [
        "kv", "20.0%", "50.0%", "12", "30", "12.0", "30.0", "50%", "1.25",
    ]  # fmt: skip
    assert "–" in next(line for line in second.splitlines() if "random" in line)


MIXED = ("--agents", "4", "--mixed", "--workers", "2", "--total-kv-blocks", "2200", "--timing", "h100-qwen3-8b")


def test_mixed_traffic_is_reported_by_class_and_tenant() -> None:
    done = simulate(*MIXED, "--policy", "kv,affinity", "--json")
    assert done.exit_code == 0, done.output
    kv, affinity = json.loads(done.stdout)["policies"].values()

    assert set(kv["classes"]) == set(affinity["classes"]) == {"agent", "batch", "chat", "retrieval", "single"}
    assert set(kv["tenants"]) == {f"tenant-{number}" for number in range(4)}
    for groups in (kv["classes"], kv["tenants"]):
        assert sum(each["requests"] for each in groups.values()) == kv["requests"]
        for each in groups.values():
            assert each["p50"] <= each["p99"] <= each["max"]
    singles = [affinity["classes"][kind]["requests"] for kind in ("batch", "retrieval", "single")]
    assert singles == [kv["classes"][kind]["requests"] for kind in ("batch", "retrieval", "single")]
    turns = kv["classes"]["agent"]["requests"] + kv["classes"]["chat"]["requests"]
    assert kv["requests"] - sum(singles) == turns
    assert 0.9 < json.loads(done.stdout)["ideal_cached_token_ratio"] < 1.0


def test_mixed_traffic_comes_to_several_routers_round_robin() -> None:
    done = simulate(*MIXED, "--policy", "kv", "--routers", "2")
    assert done.exit_code == 0, done.output
    assert "retrieval" in done.stdout


@pytest.mark.parametrize("arguments", [("--mixed", CONVERSATION), (*MIXED, "--requests", "10")])
def test_mixed_traffic_that_cannot_be_played_is_refused(arguments: Sequence[str | Path]) -> None:
    done = simulate(*arguments)
    assert done.exit_code == 2
    assert "--mixed" in done.output
