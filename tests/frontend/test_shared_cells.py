"""Limits of tenants that several processes share: one process's arithmetic, whoever asks, dies or starts again."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.frontend.access import shared_cells
from poolgrid.frontend.access.key_file import KeyDocument, Tenant
from poolgrid.frontend.access.meter import Bucket, Meter, OwnCell, Rate, Verdict
from poolgrid.frontend.access.shared_cells import FILE_NAME, RECORDS, SharedCells
from poolgrid.frontend.access.tenants import Caller, Tenants
from poolgrid.inference.ports import Refused
from poolgrid.process.clock import SystemClock

NOW_MS = 1e9
SECRET = "5" * 64
LIMITED = Tenant(requests_per_minute=100, tokens_per_minute=1000, concurrent_requests=5)

CHILD = """
import sys
from pathlib import Path
from poolgrid.frontend.access import shared_cells
from poolgrid.frontend.access.key_file import Tenant
from poolgrid.frontend.access.meter import Meter
from poolgrid.frontend.access.shared_cells import SharedCells
from poolgrid.process.clock import SystemClock

shared_cells.LOCK_PATIENCE_MS = 60_000.0
directory, index, size, mode = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
cells = SharedCells(directory, index, size, SystemClock())
meter = Meter(cells.cell("acme"))
rules = Tenant(requests_per_minute=3000, concurrent_requests=None if mode == "rate" else 7)
meter.use(rules, 1e9)
print("ready", flush=True)
sys.stdin.readline()
granted = 0
while mode == "forever":
    # Requests that end at once, tenants that come and go: every kind of store is under way when it is killed.
    for number in range(50):
        other = Meter(cells.cell(f"other-{number}"))
        if other.begin(rules, 1e9).wait_s == 0.0:
            other.end(rules, 0, 1e9)
    if meter.begin(rules, 1e9).in_flight < 7:
        meter.end(rules, 0, 1e9)
while True:
    verdict = meter.begin(rules, 1e9)
    if verdict.wait_s > 0 or (mode == "flight" and verdict.in_flight >= 7):
        break
    granted += 1
print(granted, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for every lock: on a busy machine its holder may get no turn for longer than a server waits for it."""
    monkeypatch.setattr(shared_cells, "LOCK_PATIENCE_MS", 60_000.0)


@contextmanager
def child(directory: Path, index: int, size: int, mode: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CHILD, str(directory), str(index), str(size), mode]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def count_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def cells(directory: Path, index: int = 0, size: int = 2) -> SharedCells:
    return SharedCells(directory, index, size, SystemClock())


def meters(directory: Path, size: int = 2, tenant: str = "acme", rules: Tenant = LIMITED) -> list[Meter]:
    made = [Meter(cells(directory, index, size).cell(tenant)) for index in range(size)]
    for meter in made:
        meter.use(rules, NOW_MS)
    return made


@pytest.mark.parametrize(("mode", "allowed"), [("rate", 3000), ("flight", 7)])
def test_processes_that_ask_at_the_same_time_are_granted_exactly_the_limit(
    tmp_path: Path, mode: str, allowed: int
) -> None:
    with child(tmp_path, 0, 3, mode) as first, child(tmp_path, 1, 3, mode) as second, child(tmp_path, 2, 3, mode) as it:
        for process in (first, second, it):
            tell(process)

        assert sum(count_of(process) for process in (first, second, it)) == allowed


@pytest.mark.usefixtures("patient")
def test_a_process_that_is_killed_amid_its_stores_leaves_sound_figures_behind(tmp_path: Path) -> None:
    generous = Tenant(requests_per_minute=1_000_000, concurrent_requests=5)
    table = cells(tmp_path, 0)
    for _ in range(4):
        with child(tmp_path, 1, 2, "forever") as victim:
            tell(victim)
            for number in range(300):  # the other one is at it, and so is this one, each with tenants that are new
                meter = Meter(table.cell(f"mine-{number}"))
                meter.use(generous, NOW_MS)
                assert meter.begin(generous, NOW_MS) == Verdict(0, 0.0)
                meter.end(generous, 0, NOW_MS)
            victim.send_signal(signal.SIGKILL)
            victim.wait()
    for name in ("acme", *(f"other-{number}" for number in range(50))):
        cell = table.cell(name)
        cell.lock(NOW_MS)
        assert 0 <= cell.bucket(Rate.REQUESTS).used(NOW_MS) <= 3001, name
        assert cell.elsewhere() <= 1, "what it had in flight counts until its place is taken again"
        cell.unlock()
    cells(tmp_path, 1)
    for name in ("acme", *(f"other-{number}" for number in range(50))):
        cell = table.cell(name)
        cell.lock(NOW_MS)
        assert cell.elsewhere() == 0, "and then no more"
        cell.unlock()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "end", "tokens", "back", "faster", "slower", "free", "wait"]),
            st.integers(0, 2),
            st.integers(1, 700),
        ),
        max_size=60,
    )
)
def test_several_processes_judge_as_one_would(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    shared = meters(tmp_path_factory.mktemp("cells"), size=3)
    alone = Meter(OwnCell())
    alone.use(LIMITED, NOW_MS)
    rules, now_ms = LIMITED, NOW_MS
    for kind, index, amount in steps:
        meter = shared[index]
        if kind == "begin":
            found, expected = meter.begin(rules, now_ms), alone.begin(rules, now_ms)
            assert found.wait_s == expected.wait_s
            if rules.concurrent_requests is not None:
                assert found.in_flight == expected.in_flight
        elif kind == "end" and meter.in_flight:
            meter.end(rules, amount, now_ms)
            alone.end(rules, amount, now_ms)
        elif kind == "tokens":
            assert meter.take_tokens(rules, amount, now_ms) == alone.take_tokens(rules, amount, now_ms)
        elif kind == "back":
            meter.give_back_tokens(rules, amount, now_ms)
            alone.give_back_tokens(rules, amount, now_ms)
        elif kind == "wait":
            now_ms += 10 * amount
        else:
            factor = {"faster": 3, "free": 0}.get(kind, 1)
            rules = Tenant((), 1.0, 100 * factor, 1000 * factor, 5 * factor) if factor else Tenant()
            for each in (*shared, alone):
                each.use(rules, now_ms)
    assert sum(meter.in_flight for meter in shared) == alone.in_flight


def test_what_was_used_in_one_process_counts_in_another_that_has_other_rules_still(tmp_path: Path) -> None:
    first, second = meters(tmp_path)
    assert [first.begin(LIMITED, NOW_MS).wait_s for _ in range(5)] == [0.0] * 5
    more = Tenant(requests_per_minute=6, concurrent_requests=9)
    second.use(more, NOW_MS)

    assert second.begin(more, NOW_MS) == Verdict(5, 0.0)
    assert second.begin(more, NOW_MS).wait_s == pytest.approx(10.0)
    assert first.begin(LIMITED, NOW_MS).in_flight == 6, "which it sees, and refuses by its own rules"


def test_a_tenant_without_limits_takes_no_record_and_no_lock(tmp_path: Path) -> None:
    meter = Meter(cells(tmp_path).cell("acme"))
    meter.use(Tenant(), NOW_MS)
    before = (tmp_path / FILE_NAME).read_bytes()

    assert meter.begin(Tenant(), NOW_MS) == Verdict(0, 0.0)
    assert meter.take_tokens(Tenant(), 10**9, NOW_MS) == 0.0
    meter.end(Tenant(), 10**9, NOW_MS)

    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_a_limit_that_comes_later_counts_what_is_in_flight_everywhere(tmp_path: Path) -> None:
    first, second = meters(tmp_path, rules=Tenant())
    for _ in range(4):
        first.begin(Tenant(), NOW_MS)
    for meter in (first, second):
        meter.use(LIMITED, NOW_MS)

    assert second.begin(LIMITED, NOW_MS).in_flight == 4
    assert second.begin(LIMITED, NOW_MS).in_flight == 5, "which is one too many"
    first.use(Tenant(), NOW_MS)
    assert second.begin(LIMITED, NOW_MS).in_flight == 1, "a process without the limit tells nobody"


def test_a_tenant_that_left_and_came_back_still_has_what_is_in_flight() -> None:
    def document(*names: str) -> KeyDocument:
        return KeyDocument(1, SECRET, {name: Tenant(concurrent_requests=1) for name in names})

    tenants = Tenants(document("acme"), NOW_MS)
    first = Caller(tenants.accounts["acme"])
    first.begin(NOW_MS)
    tenants.use(document("other"), NOW_MS)
    tenants.use(document("acme", "other"), NOW_MS)

    with pytest.raises(Refused, match="has 1 requests in flight, allowed are 1"):
        Caller(tenants.accounts["acme"]).begin(NOW_MS)
    first.end(NOW_MS)
    Caller(tenants.accounts["acme"]).begin(NOW_MS)


def test_the_record_of_a_tenant_that_is_quiet_is_free_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_cells, "RECORDS", 4)
    monkeypatch.setattr(shared_cells, "COLUMNS_OFFSET", 4 * shared_cells.RECORD_BYTES)
    monkeypatch.setattr(shared_cells, "TABLE_LOCK", 4)
    table = cells(tmp_path)

    def begin(name: str, now_ms: float, rules: Tenant = LIMITED) -> Meter:
        meter = Meter(table.cell(name))
        meter.use(rules, now_ms)
        assert meter.begin(rules, now_ms).wait_s == 0.0
        return meter

    held = [begin(f"t{number}", NOW_MS) for number in range(4)]
    alone = begin("one-too-many", NOW_MS)
    assert "all 4 records are in use; tenant one-too-many is limited in each process alone" in caplog.text
    assert [alone.begin(LIMITED, NOW_MS).in_flight for _ in range(5)] == [1, 2, 3, 4, 5], "its limits hold all the same"
    for meter in held:
        meter.end(LIMITED, 0, NOW_MS)
    later_ms = NOW_MS + 60_001
    begin("next", later_ms)
    first_again = Meter(table.cell("t0"))
    first_again.use(LIMITED, later_ms)
    assert first_again.begin(LIMITED, later_ms).in_flight == 0
    assert held[0].begin(LIMITED, later_ms).in_flight <= 1, "whoever lost its record finds another"


def test_every_tenant_has_figures_of_its_own(tmp_path: Path) -> None:
    table, other = cells(tmp_path, 0), cells(tmp_path, 1)
    for number in range(1000):
        rules = Tenant(requests_per_minute=number + 1)
        Meter(table.cell(f"tenant-{number}")).begin(rules, NOW_MS)
    for number in range(1000):
        rules = Tenant(requests_per_minute=number + 1)
        wait_s = Meter(other.cell(f"tenant-{number}")).begin(rules, NOW_MS).wait_s
        assert wait_s == (pytest.approx(60.0) if number == 0 else 0.0)
    assert os.path.getsize(tmp_path / FILE_NAME) == RECORDS * (shared_cells.RECORD_BYTES + 2 * 4)


@pytest.mark.parametrize(("before", "after"), [(60.0, 600.0), (600.0, 60.0)])
def test_a_store_that_stops_half_way_never_gives_more(tmp_path: Path, before: float, after: float) -> None:
    old = Bucket().resized(before, NOW_MS).charged(before / 2, NOW_MS)
    new = old.resized(after, NOW_MS)

    class Stops:
        """Takes one store, as of a process that is killed before the second."""

        def __init__(self) -> None:
            self.words = [0.0, 0.0, *old, 0.0, 0.0]
            self.left = 1

        def __getitem__(self, place: int) -> float:
            return self.words[place]

        def __setitem__(self, place: int, value: float) -> None:
            if self.left:
                self.words[place] = value
            self.left -= 1

    table = cells(tmp_path)
    table._words = Stops()  # type: ignore[assignment]
    table.store(0, Rate.REQUESTS, new)

    assert table.bucket(0, Rate.REQUESTS).used(NOW_MS) >= new.used(NOW_MS) - 1e-6


def test_a_lock_whose_holder_stands_still_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter(cells(tmp_path).cell("acme"))
    meter.use(LIMITED, NOW_MS)
    meter.begin(LIMITED, NOW_MS)
    holder = os.fork()
    if holder == 0:
        file = os.open(tmp_path / FILE_NAME, os.O_RDWR)
        fcntl.lockf(file, fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        os.waitpid(holder, os.WUNTRACED)

        assert [meter.begin(LIMITED, NOW_MS).in_flight for _ in range(3)] == [1, 2, 3]
        assert caplog.text.count("holds a lock and stands still") == 1, "it is waited for once"
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    assert meter.begin(LIMITED, NOW_MS).in_flight == 4
