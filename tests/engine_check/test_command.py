"""``poolgrid engine-check`` against a server: sockets, exit status, table, JSON and records."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from poolgrid.plugins.engine_check.command import AREAS, run_engine_check
from poolgrid.plugins.engine_check.core.finding import Kind
from poolgrid.plugins.engine_check.settings import EngineCheckSettings
from poolgrid.server.cli.main import app
from tests.engine_check.engine_server import Habits, engine_server
from tests.engine_check.test_transfer_rules import METRICS
from tests.fakes.engine_server.cache import Drafting
from tests.fakes.engine_server.sglang import SglangServer
from tests.fakes.engine_server.threaded import servers_in_thread
from tests.fakes.engine_server.vllm import Options, VllmServer


def squeezed(text: str) -> str:
    """A text without what depends on the width that whoever runs the tests has set."""
    return "".join(text.split())


def check(url: str, capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[int, str, str]:
    settings = EngineCheckSettings(url=url, **options)
    status = run_engine_check(settings)
    said = capsys.readouterr()
    return status, said.out, said.err


def test_a_good_server_passes_and_its_record_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.json"
    with engine_server(Habits()) as server:
        status, text, _ = check(server.url, capsys, as_json=True, out=record)
    found = json.loads(text)

    assert (status, found["ok"], found["findings"]) == (0, True, [])
    assert found["server"].pop("events_option").startswith("--kv-events-config")
    assert found["server"] == {
        "kind": "vllm", "model": "m", "version": "0.33.0", "block_size": 8, "ranks": 1, "publishes": True,
    }  # fmt: skip
    assert found["blocks_expected"] == found["blocks_in_index"] == 19
    assert found["probes_compared"] == found["probes_as_predicted"] == len(found["probes"]) == 8

    again = run_engine_check(EngineCheckSettings(recorded=record, as_json=True))
    assert again == 0
    told_again = json.loads(capsys.readouterr().out)
    told_again["server"].pop("events_option")
    assert told_again == found


def test_a_check_in_another_thread_says_why_it_failed() -> None:
    """Signals reach the main thread alone; click's runner shows no exception."""
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(CliRunner().invoke, app, ["engine-check", "--url", "http://127.0.0.1:1"]).result()

    assert done.exit_code == 2
    assert done.output.startswith("checking an engine: ")


@pytest.mark.parametrize(
    ("habits", "kind"),
    [
        (Habits(connects=True), "publisher connects"),
        (Habits(publishes=False), "events off"),
        (Habits(publishes=False, lists_sources=False), "events off"),
        (Habits(swapped=True), "no publisher"),
        (Habits(says_block_size=32), "block size"),
    ],
    ids=["it connects", "it says that it publishes nothing", "it says nothing", "the replay's port", "block size"],
)
def test_a_server_that_is_set_up_wrong_is_told_what_to_set(
    habits: Habits, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine_server(habits) as server:
        status, text, _ = check(server.url, capsys)

    assert status == 1
    assert squeezed(f"fault: {kind} (") in squeezed(text)
    assert squeezed("To set: ") in squeezed(text)


FORMS: dict[str, tuple[Options, Callable[[Any, Options], VllmServer]]] = {
    "vllm ahead": (Options(drafting=Drafting(looks_ahead=1)), VllmServer),
    "vllm drops": (Options(drafting=Drafting(drops=True)), VllmServer),
    "sglang": (Options(), SglangServer),
    "sglang pairs": (Options(), partial(SglangServer, draws_pairs=True)),
    "sglang attention": (Options(ranks=2), partial(SglangServer, attention_dp=True)),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_newest_forms_of_servers_are_no_faults(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    options, make = FORMS[form]
    with servers_in_thread(replace(options, block_size=16, blocks=4096), make=make) as running:
        status, text, _ = check(running.servers[0].url, capsys, as_json=True)
    found = json.loads(text)
    assert (status, found["ok"]) == (0, True), found["findings"]
    assert (found["verdict"], found["findings"]) == ("agrees", [])


def test_a_server_of_one_leg_is_not_probed_and_the_reason_is_its_partner(capsys: pytest.CaptureFixture[str]) -> None:
    def server_of_a_leg(context: Any, options: Options) -> VllmServer:
        return SglangServer(context, options, "prefill")

    with servers_in_thread(Options(block_size=16), make=server_of_a_leg) as running:
        status, _, errors = check(running.servers[0].url, capsys)

    assert status == 2
    assert squeezed("was started for prefill: it takes no request without its partner") in squeezed(errors)
    assert not running.servers[0].bodies


def test_slow_transfers_of_kv_are_a_warning_with_their_speed(capsys: pytest.CaptureFixture[str]) -> None:
    with engine_server(Habits(transfers=METRICS)) as server:
        status, text, _ = check(server.url, capsys)

    assert status == 0
    assert squeezed("KV moves at 6.8 GB/s, as over TCP: 1,100 MB take 162 ms") in squeezed(text)
    assert squeezed("663 transfers of 1,100 MB at 6.8 GB/s") in squeezed(text)


def test_without_a_replay_and_cached_tokens_it_passes_with_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    with engine_server(Habits(replays=False, says_cached_tokens=False)) as server:
        status, text, _ = check(server.url, capsys)

    assert status == 0
    assert squeezed("warning: replay missing (") in squeezed(text)
    assert squeezed("verdict: reuse-unreported: ") in squeezed(text)
    assert squeezed("--enable-prompt-tokens-details") in squeezed(text)


def test_endpoints_that_are_given_win_over_those_that_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with engine_server(Habits(swapped=True)) as server:
        [publisher] = server.publishers
        given = {"kv_events_endpoint": (publisher.endpoint,), "kv_events_replay_endpoint": (publisher.replay_endpoint,)}
        status, _, _ = check(server.url, capsys, **given)

    assert status == 0


def test_what_cannot_be_checked_ends_with_status_2_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check("http://127.0.0.1:9", capsys)[0] == 2
    assert run_engine_check(EngineCheckSettings(recorded=tmp_path / "none.json")) == 2
    assert "none.json" in squeezed(capsys.readouterr().err)
    status, _, errors = check("http://127.0.0.1:9", capsys, out=tmp_path / "no" / "where.json")
    assert status == 2
    assert "--out" in squeezed(errors)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "url is not given"),
        (
            {"url": "http://h", "kv_events_replay_endpoint": ("tcp://h:1",)},
            "kv_events_replay_endpoint is given 1 times",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineCheckSettings(**options)


def test_every_kind_of_finding_has_its_row() -> None:
    assert {kind.area for kind in Kind} == set(AREAS) - {"reuse"}, "reuse has a verdict"
