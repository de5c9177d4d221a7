"""``poolgrid bench`` as a whole: exit codes, the table, the JSON keys that scripts rely on, and Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace
from pydantic import ValidationError
from rich.console import Console

from poolgrid.plugins.bench.command import measure_one, plan, run_bench
from poolgrid.plugins.bench.prompt import PlannedRequest
from poolgrid.plugins.bench.settings import BenchSettings
from poolgrid.plugins.bench.table import report_table
from poolgrid.plugins.bench.trace import TraceError
from tests.bench.fake_endpoint import FakeEndpoint, serving

CONVERSATION = Path(__file__).parents[1] / "data" / "conversation_1000.jsonl"
DOCS = Path(__file__).parents[2] / "docs"
BENCH_PAGE = (DOCS / "measuring.md").read_text()


def test_a_replay_reports_the_keys_that_scripts_rely_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poolgrid.plugins.bench.command.IN_FLIGHT_MAX", 1)
    monkeypatch.setattr("poolgrid.plugins.bench.command.PROGRESS_LINE_MS", 0.0)
    out = tmp_path / "out.json"
    settings = {"trace": CONVERSATION, "requests": 120, "speed": 1000, "length_scale": 1 / 32, "osl": 3}

    with serving(FakeEndpoint()) as endpoint:
        code = run_bench(BenchSettings(url=endpoint.url, out=out, **settings))

    found = json.loads(out.read_text())
    assert code == 0
    assert (found["requests"], found["errors"], found["model"]) == (120, 0, "fake-model")
    assert set(found["ttft_ms"]) == set(found["itl_ms"]) == {"mean", "p50", "p90", "p99"}
    assert found["prompt_tokens"] == sum(len(body["prompt"]) for body in endpoint.bodies)
    # One request at a time and in order, an endless cache of the same block size: whole blocks reach the ideal.
    assert found["cached_token_ratio"] == found["cached_tokens"] / found["prompt_tokens"]
    assert found["cached_token_ratio"] == pytest.approx(found["ideal_cached_token_ratio"], abs=0.002)
    assert found["ideal_cached_token_ratio"] > 0.03
    assert {name: share["requests"] for name, share in found["per_worker"].items()} == {"w0": 60, "w1": 60}
    assert sum(share["prompt_tokens"] for share in found["per_worker"].values()) == found["prompt_tokens"]
    captured = capsys.readouterr()
    assert "TTFT" in captured.out
    assert "ideal cached token ratio" in captured.out
    assert "replay: 60 of 120 requests, 0 errors" in captured.err, "there is no terminal"


def test_reuse_above_the_ideal_names_its_cause() -> None:
    with serving(FakeEndpoint()) as endpoint:
        measured = measure_one(BenchSettings(url=endpoint.url, requests=2, concurrency=1, turns=2))
    known = replace(measured, cached_token_ratio=0.615, ideal_cached_token_ratio=0.578)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report_table(known))

    assert "57.8%: it has seen these prompts before; take another --seed" in console.export_text()


def test_a_refused_connection_is_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeEndpoint()) as endpoint:
        pass

    assert run_bench(BenchSettings(url=endpoint.url, start_timeout_ms=0)) == 1
    assert run_bench(BenchSettings(url=endpoint.url, start_timeout_ms=100, model="named")) == 1

    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"asking {endpoint.url}/ready for 0 s" in captured.err
    assert "is the endpoint running" in captured.err


def test_a_trace_that_cannot_be_read_is_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(BenchSettings(trace=Path("none.jsonl"))) == 1
    assert "reading the trace none.jsonl" in capsys.readouterr().err


def test_a_run_in_which_nothing_succeeds_fails_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeEndpoint(fault=lambda _: "busy")) as endpoint:
        code = run_bench(BenchSettings(url=endpoint.url, requests=3))

    assert code == 1
    assert "http-429" in capsys.readouterr().out


def test_ctrl_c_prints_what_was_measured_so_far(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    endpoint = FakeEndpoint(fault=lambda number: "hold" if number >= 5 else None)

    def press() -> None:
        assert endpoint.holding.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    fingers = threading.Thread(target=press)
    with serving(endpoint):
        fingers.start()
        code = run_bench(BenchSettings(url=endpoint.url, requests=50, concurrency=(1,), out=out))
        fingers.join(10)

    found = json.loads(out.read_text())
    assert code == 0
    assert (found["requests"], found["interrupted"], found["cancelled"]) == (5, True, 1)
    assert "interrupted" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_is_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeEndpoint()) as endpoint:
        before = run_bench(BenchSettings(url=endpoint.url, requests=1, out=Path("/nowhere/out.json")))
        refused = capsys.readouterr()
        after = run_bench(BenchSettings(url=endpoint.url, requests=1, out=Path("/dev/full")))

    assert before == 2
    assert "--out: /nowhere cannot be written to; nothing was sent" in refused.err
    assert refused.out == ""
    captured = capsys.readouterr()
    assert after == 1
    assert "writing /dev/full" in captured.err
    assert "TTFT" in captured.out, "the measurement is not lost"


def test_json_goes_to_standard_output_in_place_of_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeEndpoint()) as endpoint:
        assert run_bench(BenchSettings(url=endpoint.url, requests=2, isl=8, osl=2, as_json=True)) == 0

    assert json.loads(capsys.readouterr().out)["requests"] == 2


def test_an_endpoint_that_is_not_ready_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeEndpoint(unready=2)) as waited, serving(FakeEndpoint(unready=9)) as given_up:
        assert run_bench(BenchSettings(url=waited.url, requests=1)) == 0
        assert run_bench(BenchSettings(url=given_up.url, requests=1, start_timeout_ms=0)) == 1

    assert waited.unready == -1
    assert "status 503" in capsys.readouterr().err
    assert not given_up.bodies


def test_a_sweep_is_a_row_for_each_concurrency_each_with_prompts_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"

    with serving(FakeEndpoint(ttft_s=0.05)) as endpoint:
        settings = BenchSettings(url=endpoint.url, requests=6, isl=20, osl=2, concurrency=(1, 3), out=out)
        code = run_bench(settings)

    found = json.loads(out.read_text())
    assert (code, endpoint.running_max) == (0, 3)
    assert [(point["concurrency"], point["report"]["requests"]) for point in found["points"]] == [(1, 6), (3, 6)]
    assert [point["ratios"] for point in found["points"]] == [None, None]
    assert len({tuple(body["prompt"]) for body in endpoint.bodies}) == 12
    table = capsys.readouterr().out
    assert f" at {endpoint.url}, 1 round" in table
    assert [line.split()[0] for line in table.splitlines()[3:]] == ["1", "3"]
    assert "ratios" not in table


def test_endpoints_are_compared_in_turns_on_the_same_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"

    with serving(FakeEndpoint()) as first, serving(FakeEndpoint(ttft_s=0.02)) as second:
        settings = BenchSettings(url=(first.url, second.url), requests=3, isl=20, osl=2, rounds=2, out=out)
        code = run_bench(settings)

    found = json.loads(out.read_text())["points"]
    assert code == 0
    assert [body["prompt"] for body in first.bodies] == [body["prompt"] for body in second.bodies]
    assert len({tuple(body["prompt"]) for body in first.bodies}) == 6, "two rounds of three"
    assert [(point["name"], point["report"]["requests"]) for point in found] == [(first.url, 6), (second.url, 6)]
    assert [len(point["rounds"]) for point in found] == [2, 2]
    times = [[each["ttft_ms"]["mean"] for each in point["rounds"]] for point in found]
    ratios = [theirs / ours for ours, theirs in zip(*times, strict=True)]
    assert found[1]["ratios"]["ttft_ms.mean"]["low"] == pytest.approx(min(ratios))
    assert f"ratios to {first.url}, median of 2 rounds" in capsys.readouterr().out.replace("\n", " ")


def test_conversations_report_what_could_be_reused(tmp_path: Path) -> None:
    out = tmp_path / "out.json"

    with serving(FakeEndpoint(overhead_tokens=3)) as endpoint:
        settings = BenchSettings(url=endpoint.url, turns=3, shared_prefix=40, isl=20, osl=4, requests=7, out=out)
        code = run_bench(settings)

    report = json.loads(out.read_text())
    assert (code, report["requests"]) == (0, 9), "whole conversations"
    assert 0.5 < report["ideal_cached_token_ratio"] < 1


@pytest.mark.parametrize("options", ["--port 1", "--workers many", "--colour red", '"', "--workers 0", "--workers"])
def test_options_that_pools_cannot_have_start_nothing(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(BenchSettings(policies=("kv",), pool_options=options)) == 1
    assert "--pool-options" in capsys.readouterr().err


class TestPlan:
    def test_a_replay_ends_with_its_duration(self) -> None:
        settings = BenchSettings(trace=CONVERSATION, speed=10, duration_s=1)

        planned, count = plan(settings)

        times = [request.at_ms for request in planned if isinstance(request, PlannedRequest)]
        assert count == len(times) > 0
        assert all(at_ms is not None and at_ms < 1000 for at_ms in times)

    def test_a_scale_that_cannot_tell_ids_apart_is_refused(self) -> None:
        with pytest.raises(TraceError, match="cannot distinguish"):
            plan(BenchSettings(trace=CONVERSATION, length_scale=1 / 512))

    @pytest.mark.parametrize(("options", "count"), [({}, 100), ({"requests": 7}, 7), ({"duration_s": 1.0}, None)])
    def test_how_many_requests_are_sent(self, options: dict[str, float], count: int | None) -> None:
        assert plan(BenchSettings(**options))[1] == count


class TestSettings:
    @pytest.mark.parametrize(
        "options",
        [
            {"concurrency": 0},
            {"concurrency": ()},
            {"concurrency": "1,x"},
            {"concurrency": "1,4", "trace": "t"},
            {"turns": 2, "endpoint": "completions"},
            {"turns": 2, "trace": "t"},
            {"shared_prefix": 9, "trace": "t"},
            {"policies": "kv", "url": "http://h"},
            {"pool_options": "--workers 2"},
            {"speed": 0},
            {"speed": float("inf")},
            {"endpoint": "embeddings"},
            {"colour": "red"},
        ],
    )
    def test_what_is_out_of_range_is_refused(self, options: dict[str, object]) -> None:
        with pytest.raises(ValidationError):
            BenchSettings(**options)

    @pytest.mark.parametrize("name", BenchSettings.model_fields)
    def test_every_setting_is_described_and_documented(self, name: str) -> None:
        flag = {"as_json": "--json"}.get(name, "--" + name.replace("_", "-"))

        assert BenchSettings.model_fields[name].description
        assert f"`{flag}" in (DOCS / "configuration.md").read_text()


def test_every_json_key_is_documented() -> None:
    from poolgrid.plugins.bench.statistics import Report

    assert [key for key in Report.__struct_fields__ if f"`{key}`" not in BENCH_PAGE] == []
