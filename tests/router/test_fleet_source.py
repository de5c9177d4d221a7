"""What the fleet page is told of a router: over a real core, whose workers are records of a journal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.projection.fleet import Fleet, chat_of, media_of
from poolgrid.kernel.routing.inputs import Booked, Input, RecordsArrived
from poolgrid.kernel.routing.router_state import InputLog
from poolgrid.kernel.routing.working_set import Admission
from poolgrid.kernel.wire.card import ChatSpec, MediaSpec
from poolgrid.kernel.wire.events import RequestFinished, WorkerDraining
from poolgrid.kernel.wire.identifiers import Role, WorkerId, WorkerKey
from poolgrid.plugins.fleet_page.hub import Picture
from poolgrid.plugins.fleet_page.router_source import COLUMNS, RouterFleetSource
from poolgrid.plugins.fleet_page.router_watch import FleetWatch, ServedSeconds
from poolgrid.server.frontend.metrics import SERVED_COLUMNS
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.router.settings import RouterSettings
from tests.router.fleet_builder import make_card, worker_key
from tests.ui.large_pool import LargePool

WORKERS = 3


class Noted:
    """A log that was there before somebody looked."""

    def __init__(self) -> None:
        self.inputs: list[Input] = []

    def note(self, given: Input, came: Decision | Admission | None = None) -> None:
        self.inputs.append(given)


class Looked:
    """A pool with its source, and somebody who looks."""

    def __init__(self) -> None:
        self.pool = LargePool(WORKERS, 1.0)
        self.log = Noted()
        self.pool.state.log = self.log
        self.watch = FleetWatch(self.pool.state)
        self.totals = [0] * len(SERVED_COLUMNS)
        self.served = ServedSeconds(lambda: list(self.totals), SystemClock())
        self.source = RouterFleetSource(self.pool.settings, cast(Any, self.pool), self.watch, self.served)
        self.source.begin()

    def look(self) -> Picture:
        return asyncio.run(self.source.look())

    def rows(self, table: str) -> dict[str, dict[str, Any]]:
        found = self.look().tables[table]
        return {key: dict(zip(COLUMNS[table], row, strict=True)) for key, row in found.items()}


@pytest.fixture
def looked() -> Iterator[Looked]:
    made = Looked()
    yield made
    made.source.end()


def test_a_worker_that_drains_or_stores_blocks_is_seen_to(looked: Looked) -> None:
    key = WorkerKey(WorkerId("worker-1"))
    looked.pool.say(key, [WorkerDraining()])
    looked.pool.hold(key, [1, 2, 3, 4])

    row = looked.rows("workers")["worker-1"]

    assert (row["state"], row["held_blocks"], row["stored"], row["removed"]) == ("draining", 4, 4, 0)


def test_a_request_is_followed_from_its_choice_to_its_end(looked: Looked) -> None:
    looked.pool.request()
    row = looked.rows("requests")["r1"]
    assert (row["status"], row["request_id"]) == ("prefill", "r1")
    assert [row["conversation"]] == list(looked.rows("conversations"))
    assert row["started_ms"] is not None

    looked.pool.say(WorkerKey(WorkerId(row["worker"])), [RequestFinished("r1", "length")])

    row = looked.rows("requests")["r1"]
    assert row["status"] == "length"
    assert row["ended_ms"] >= row["started_ms"]


def test_a_request_is_explained_with_its_legs(looked: Looked) -> None:
    looked.pool.request()

    found = asyncio.run(looked.source.request("r1"))

    assert found is not None
    assert [attempt["worker"] for attempt in found["explanation"]["attempts"]] == [found["legs"][0]["worker"]]
    assert found["legs_from"] == "watched"
    assert asyncio.run(looked.source.request("nobody")) is None


def test_who_looks_on_takes_nothing_from_the_log_that_was_there_and_is_gone_afterwards() -> None:
    looked = Looked()
    before: InputLog = looked.log
    assert looked.pool.state.log is looked.watch
    looked.pool.request()
    looked.source.end()
    assert looked.pool.state.log == before

    kinds = [type(each) for each in looked.log.inputs]
    assert Booked in kinds
    assert RecordsArrived in kinds
    legs = len(looked.watch.legs)
    looked.pool.request()
    assert len(looked.watch.legs) == legs
    assert len(looked.log.inputs) == 2 * len(kinds)


def test_a_fault_of_who_looks_on_ends_the_looking_and_not_the_routing(
    looked: Looked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(looked.watch.conversations, "turn", fail)
    looked.pool.request()
    looked.pool.request()

    assert len(looked.pool.decisions) == 2
    assert [record.message for record in caplog.records] == [
        "the fleet page no longer sees requests and caches: this is a bug"
    ]


def test_latencies_tokens_and_errors_come_by_second_with_the_first_picture(looked: Looked) -> None:
    looked.totals[0] += 70
    looked.totals[SERVED_COLUMNS.index("ttft 0.25")] += 3
    looked.served.sample()

    picture = looked.look()

    [row] = picture.tables["served"].values()
    counts = dict(zip(looked.source.columns["served"], row, strict=True))
    assert {name: count for name, count in counts.items() if count} == {"output_tokens": 70, "ttft 0.25": 3}
    assert picture.values["totals"]["since_ms"] == looked.served.since_ms


def test_a_request_that_ended_unwatched_is_ended_and_one_in_flight_is_not() -> None:
    looked = Looked()
    looked.pool.request()  # watched at first
    looked.source.end()
    looked.pool.request()  # never watched
    first, second = (looked.rows("requests")[name] for name in ("r1", "r2"))
    assert (first["status"], second["status"]) == ("prefill", "")

    for name, row in (("r1", first), ("r2", second)):
        looked.pool.say(WorkerKey(WorkerId(row["worker"])), [RequestFinished(name, "stop")])

    assert {row["status"] for row in looked.rows("requests").values()} == {"ended"}
    for name in ("r1", "r2"):
        found = asyncio.run(looked.source.request(name))
        assert found is not None
        assert [leg["released"] for leg in found["legs"]] == [True], "its bar must not grow any more"
        assert found["legs_from"] == "unknown"


def test_the_heading_names_the_pool_where_pools_have_names(looked: Looked, tmp_path: Path) -> None:
    assert looked.look().values["about"]["pool"] == ""
    named = RouterSettings(names="directory", names_dir=tmp_path, namespace="chat")
    source = RouterFleetSource(named, cast(Any, looked.pool), looked.watch, looked.served)
    assert asyncio.run(source.look()).values["about"]["pool"] == "chat"


def test_models_and_roles_follow_every_change() -> None:
    fleet = Fleet()
    assert fleet.models() == {}

    b = fleet.join(worker_key("b"), 1, make_card())
    a = fleet.join(worker_key("a"), 1, make_card())
    assert fleet.models() == {"m": [a, b]}
    assert fleet.models() is fleet.models(), "sorted once per change"

    renewed = fleet.join(worker_key("b"), 2, make_card(role=Role.DECODE))
    assert fleet.models() == {"m": [a, renewed]}
    assert fleet.serving("m") == [a]
    assert fleet.serving("m", (Role.DECODE,)) == [renewed]

    fleet.drain(worker_key("a"))
    assert fleet.serving("m") == [a]
    assert a.draining

    fleet.leave(worker_key("a"))
    assert fleet.models() == {"m": [renewed]}
    assert fleet.serving("other") == []


def test_what_any_worker_was_told_of_chats_and_media_holds_for_its_model() -> None:
    fleet = Fleet()
    fleet.join(worker_key("a"), 1, make_card(chat=ChatSpec("", "hermes")))
    fleet.join(worker_key("b"), 1, make_card(chat=ChatSpec("qwen3", "", "{{ messages }}")))
    fleet.join(worker_key("c"), 1, make_card(role=Role.ENCODE, media=MediaSpec(("image",), item_bytes_max=7)))
    fleet.join(worker_key("d"), 1, make_card(media=MediaSpec(("embeddings",), "<image>")))
    (workers,) = fleet.models().values()

    assert chat_of(workers) == ChatSpec("qwen3", "hermes", "{{ messages }}")
    assert media_of(workers) == MediaSpec(("embeddings",), "<image>", item_bytes_max=7)
    assert chat_of([]) == ChatSpec()
