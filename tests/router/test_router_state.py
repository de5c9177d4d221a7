"""A router's state is what its inputs made of it, and the log of them makes another one like it."""

from __future__ import annotations

import ast
import asyncio
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.projection import projection as projection_module
from poolgrid.kernel.projection.load_ledger import ENTRY_BYTES
from poolgrid.kernel.routing import router_state, working_set
from poolgrid.kernel.routing.inputs import (
    Booked,
    Expired,
    Input,
    Overcommitted,
    PromptComputed,
    SnapshotArrived,
    TurnOffered,
    WorkerWanted,
)
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.working_set import Admission
from poolgrid.kernel.wire.events import AnyEvent, RequestStarted
from poolgrid.server.consolidator.journal.posix_disk import ReadOnlyDirectory
from poolgrid.server.router.decision_journal import recorder
from poolgrid.server.router.decision_journal.entries import (
    INPUTS_VERSION,
    OLDEST_INPUTS_VERSION,
    Checkpoint,
    Decided,
    InputReader,
    InputWriter,
    PrefillEnded,
    RouterSettingsNoted,
    TurnJudged,
    decode,
    encoder,
    kept,
)
from poolgrid.server.router.decision_journal.opening import policy_of
from poolgrid.server.router.decision_journal.reader import decision_directories, stored_entries
from poolgrid.server.router.decision_journal.recorder import DecisionSegments
from poolgrid.server.router.decision_journal.replay import DecisionReplay
from poolgrid.server.router.policy_loading import make_state
from tests.consolidator.journal_builder import FakeDisk
from tests.examples import examples
from tests.router.fleet_builder import worker_key
from tests.router.recorded_router import BLOCKS_MAX, NAMES, RecordedRouter, written

ROOT = Path(__file__).parents[2]
BEFORE_INPUTS = ROOT / "tests/data/recording_before_inputs"


class Log(list[tuple[Input, Decision | Admission | None]]):
    """Keeps inputs as they are, with what came of them."""

    def note(self, given: Input, came: Decision | Admission | None = None) -> None:
        self.append((given, came))


def crowd(router: RecordedRouter, number: int) -> None:
    """Now and then a worker refuses a dispatch, because others were quicker."""
    if number % 7 == 3 and router.joined:
        worker = sorted(router.joined)[number % len(router.joined)]
        router.state.apply(Overcommitted(worker, f"crowded-{number}", 500 + number, router.clock.monotonic_ms()))


def see_an_answer(router: RecordedRouter, number: int) -> None:
    """Now and then the first of an answer passes by, which no worker has told of."""
    if number % 7 == 5 and router.open:
        router.state.apply(PromptComputed(*router.open[number % len(router.open)], is_held=number % 2 == 0))


def played(seed: int, steps: int, **given: object) -> tuple[RecordedRouter, Log]:
    """A router after many steps, and the log of its inputs."""

    async def run() -> tuple[RecordedRouter, Log]:
        router = RecordedRouter(seed=seed, **given)  # type: ignore[arg-type]  # settings by name
        router.state.log = log = Log()
        for name in NAMES:
            router.join(name)
        for number in range(steps):
            router.step()
            crowd(router, number)
            see_an_answer(router, number)
        await router.recorder.stop()
        return router, log

    return asyncio.run(run())


def recorded(steps: int, **given: Any) -> RecordedRouter:
    """Return a router after many steps, of which some segments are written."""

    async def run() -> RecordedRouter:
        router = RecordedRouter(**given)
        for name in NAMES:
            router.join(name)
        for number in range(steps):
            router.step()
            if number % 10 == 0:
                await written(router)
        await router.recorder.stop()
        return router

    return asyncio.run(run())


def fresh(router: RecordedRouter) -> RouterState:
    """An empty state by the same settings."""
    return make_state(router.settings)


def told(state: RouterState) -> dict[str, Any]:
    """All that can be said of a state."""
    projection = state.projection
    return {
        "offset": projection.next_offset,
        "fleet": projection.fleet.workers,
        "ledger": {key: (e.prefill_tokens, e.active_blocks, e.confirmed, e.due_ms)
                   for key, e in projection.ledger.entries().items()},
        "late starts": list(projection.ledger.late_starts),
        "blocks": {name: projection.index.held_blocks(worker_key(name)) for name in NAMES},
        "untrusted": projection.trust.untrusted,
        "windows": projection.trust.windows(),
        "awaited": [(each[0], each[1], list(each[2]), *each[3:]) for each in projection.trust.open_choices()],
        "observers": {observer.name: observer.checkpoint() for observer in projection.observers},
        "depths": [projection.index.find([1000 * talk + block for block in range(30)]) for talk in range(4)],
    }  # fmt: skip


@settings(max_examples=examples(20))
@given(
    st.integers(0, 10_000),
    st.integers(1, 250),
    st.sampled_from(("kv", "approximate", "round-robin", "random", "least-loaded")),
)
@example(1368, 91, "kv")  # leases were over by an offer that changed nothing else
def test_a_state_that_is_given_the_log_of_another_is_like_it_and_decides_alike(
    seed: int, steps: int, policy: str
) -> None:
    learning = {"scale": 20} if seed % 3 == 0 else {}
    router, log = played(seed, steps, policy=policy, starts_late=seed % 5 == 0, **learning)
    again = fresh(router)

    came_to = [again.apply(each) for each, _ in log]

    for (each, decision), result in zip(log, came_to, strict=True):
        if isinstance(decision, Admission):
            assert result == decision
        elif decision is not None:
            assert isinstance(each, WorkerWanted)
            assert isinstance(result, Decision)
            assert result.explanation() == decision.explanation()
    assert told(again) == told(router.state)


def test_a_prompt_that_counts_as_held_is_in_the_log_once_and_in_recordings_of_before_in_none() -> None:
    router, log = played(seed=1, steps=40)
    trust = router.projection.trust
    trust.computed.clear()
    log.clear()
    worker, dispatch_id, *_ = trust.open_choices()[-1]

    assert router.state.apply(PromptComputed(worker, dispatch_id, is_held=True)) is True
    assert router.state.apply(PromptComputed(worker, dispatch_id, is_held=True)) is False

    assert [each for each, _ in log] == [PromptComputed(worker, dispatch_id, is_held=True)]
    assert decode(encoder.encode(["PrefillEnded", 0, "d"])) == PrefillEnded(0, "d", is_held=False)


def test_every_kind_of_input_is_written_and_read_back_as_it_was() -> None:
    router, log = played(seed=4, steps=200)
    writer, reader = InputWriter(), InputReader(router.pool_disk, BLOCKS_MAX)
    disk = FakeDisk()
    segments = DecisionSegments(disk, 1 << 30, 10**12)
    segments.begin([], 0)
    projection = router.projection
    load = projection.begin_load(0, [], [])
    payloads: list[bytes] = []
    writer.write(kept(SnapshotArrived(load, 3.0), None), payloads)
    for each, decision in log:
        writer.write(kept(each, decision), payloads)
    segments.append(payloads)
    segments.close()
    seen: Counter[type] = Counter()
    again = fresh(router)

    expected = iter([(SnapshotArrived(load, 3.0), None), *log])
    for stored in stored_entries(disk):
        read = reader.input_of(stored.entry, stored.workers, again.projection)
        if read is None:
            continue
        wrote, decision = next(expected)
        seen[type(read)] += 1
        result = again.apply(read)
        if isinstance(read, SnapshotArrived):
            assert (read.load.next_offset, read.now_ms) == (0, 3.0)
        elif isinstance(read, WorkerWanted):
            assert isinstance(wrote, WorkerWanted)
            assert decision is not None
            assert isinstance(result, Decision)
            reader.decided = Decided(read, result)
            assert msgspec.structs.replace(read, path=list(read.path)) == wrote
        elif isinstance(read, TurnOffered):
            assert isinstance(wrote, TurnOffered)
            assert msgspec.structs.replace(read, path=list(read.path)) == wrote
            assert result == decision, "the admission"
        elif isinstance(read, Booked):
            assert isinstance(wrote, Booked)
            assert read.decision.explanation() == wrote.decision.explanation()
            assert (list(read.path), read.dispatch_id, read.now_ms, read.lease_ms) == (
                wrote.path, wrote.dispatch_id, wrote.now_ms, wrote.lease_ms
            )  # fmt: skip
        elif isinstance(read, Expired):
            assert isinstance(wrote, Expired)
            assert (read.now_ms, sorted(read.held)) == (wrote.now_ms, sorted(wrote.held))
        else:
            assert read == wrote

    assert next(expected, None) is None
    assert set(seen) == set(Input.__args__), "a kind of input that this test never saw"


def test_a_router_whose_ledger_was_full_is_replayed_with_a_ledger_as_small() -> None:
    async def run() -> RecordedRouter:
        # As small as the setting allows, and other routers' requests take most of it.
        router = RecordedRouter(seed=3, churn=0.0, ledger_budget_bytes=2**16, worker_queue_factor=1000)
        for name in NAMES:
            router.join(name)
        others = [RequestStarted(f"other-{number}", 100, 0, 4) for number in range(2**16 // ENTRY_BYTES - 3)]
        router.say(worker_key("a"), *others)
        for _ in range(300):
            router.step()
        await router.recorder.stop()
        return router

    router = asyncio.run(run())
    assert router.projection.ledger.refused_entries > 0

    outcome = router.replay()

    assert outcome.difference is None
    assert outcome.identical == router.made > 50


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_admission_of_a_session_is_derived_again_also_from_a_checkpoint(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(working_set, "RUNNING_SHARE", 1e4)  # caches as small as here are computed again at once

    router = recorded(600, seed=seed, kv_blocks=12, churn=0.5, segment_bytes=30_000, worker_queue_factor=100)
    assert min(router.admissions.values()) > 0, "some were admitted and some were not"
    entries = [each.entry for each in stored_entries(router.decisions_disk)]
    judged = sum(isinstance(each, TurnJudged) for each in entries)
    assert sum(isinstance(each, Checkpoint) and bool(each.observers.get("sessions")) for each in entries)

    outcome = router.replay()
    assert (outcome.difference, outcome.identical_admissions, outcome.identical) == (None, judged, router.made)

    later = FakeDisk()
    later.files = dict(sorted(router.decisions_disk.files.items())[-2:])
    again = router.replay(decisions=later)
    assert again.difference is None
    assert again.identical_admissions > 0


def test_a_recording_from_before_the_first_release_is_refused_with_its_version() -> None:
    (decisions,) = decision_directories(BEFORE_INPUTS)

    outcome = DecisionReplay(
        ReadOnlyDirectory(BEFORE_INPUTS), ReadOnlyDirectory(decisions), policy_of, BLOCKS_MAX
    ).run()

    (cause,) = outcome.causes
    assert f"which knows versions {OLDEST_INPUTS_VERSION} to {INPUTS_VERSION}: replay it with the one that" in cause
    assert (outcome.identical, outcome.difference) == (0, None)


def test_inputs_of_a_later_version_are_not_replayed_and_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "INPUTS_VERSION", INPUTS_VERSION + 1)

    router = recorded(100, seed=3, segment_bytes=20_000)
    noted = [e for e in stored_entries(router.decisions_disk) if isinstance(e.entry, RouterSettingsNoted)]
    assert len(noted) > 1, "a later segment's checkpoint must not begin a replay either"

    outcome = router.replay()

    assert outcome.difference is None
    assert (outcome.identical, outcome.not_derivable) == (0, router.made)
    (cause,) = outcome.causes
    assert f"inputs are of version {INPUTS_VERSION + 1}, written by poolgrid test" in cause
    assert f"knows versions {OLDEST_INPUTS_VERSION} to {INPUTS_VERSION}" in cause


CHANGES = {
    "apply", "adopt", "load_snapshot", "book", "reserve", "renew", "release", "expire", "crowded", "started",
    "prefill_completed", "progressed", "finished", "drop", "move", "clear", "restore", "chosen", "note_streams",
    "forget", "record", "store", "remove", "join", "leave", "drain",
}  # fmt: skip
"""Methods that change a part of the state."""

PARTS = {"projection", "ledger", "selector", "trust", "index", "approximate", "predictions", "fleet"}

DOORS = ("router/decision_journal/checkpoints.py",)
"""Where they may be called outside the kernel: where a checkpoint is put back."""


def changed_parts(source: str) -> list[str]:
    """The calls in a module that change a part of a router's state beside ``RouterState.apply``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            owner = node.func.value
            name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            if name.strip("_") in PARTS:
                found.append(f"{ast.unparse(node.func)} in line {node.lineno}")
    return found


def test_nothing_in_the_router_changes_its_state_but_through_apply() -> None:
    modules = [
        path
        for folder in ("router", "src/poolgrid/plugins/endpoint_picker")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(path.relative_to(ROOT).as_posix().startswith(door) for door in DOORS)
    ]
    assert len(modules) > 10

    beside = {path.name: changed_parts(path.read_text()) for path in modules}

    assert {name: calls for name, calls in beside.items() if calls} == {}


@pytest.mark.parametrize(
    "line", ["self.projection.ledger.finished(w, 'r')", "state.selector.book(d, p, 0.0)", "projection.apply(r, 0.0)"]
)
def test_a_call_beside_apply_would_be_seen(line: str) -> None:
    assert changed_parts(line)


def test_every_kind_of_event_and_input_has_its_effect() -> None:
    assert set(projection_module._EFFECTS) == set(get_args(AnyEvent))
    assert set(router_state._EFFECTS) == set(get_args(Input))
