"""A task goes to the worker of its kind with the fewest requests, and to no other."""

from __future__ import annotations

import pytest

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.decision.stage_plan import TASK_LEGS
from poolgrid.kernel.requests.inference import InferenceRequest, StreamDelta
from poolgrid.kernel.requests.legs import AvoidWorker, EndRequest, LegEvent, PlaceNext, RecordFailure
from poolgrid.kernel.requests.request_machine import RequestMachine
from poolgrid.kernel.requests.token_delivery import TokenDelivery
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.kernel.routing.selector import NoWorker, Selector
from poolgrid.kernel.wire.events import RequestFinished, RequestStarted
from poolgrid.kernel.wire.identifiers import Role, Stage, WorkerId, WorkerKey
from poolgrid.kernel.wire.requests import FinishReason, RefusalKind, Sampling, TokenDelta
from poolgrid.kernel.wire.tasks import EmbeddingTask, Task, TaskResult, VisualTask, stage_of
from tests.router.fleet_builder import Pool, decided, make_card

CAT = VisualTask("a cat")
WORKER = WorkerKey(WorkerId("w"))


def task(stage: Stage, name: str = "r") -> WorkerWanted:
    leg = TASK_LEGS[stage]
    return WorkerWanted(RoutingRequest(name, "m", 0, 16, 0, stage=stage), [], 0.0, 0, roles=leg.roles)


def choose(selector: Selector, stage: Stage, name: str = "r") -> Decision:
    decision = decided(selector.select(task(stage, name)))
    selector.book(decision, [], 0.0)
    return decision


@pytest.mark.parametrize(
    ("asked", "stage"),
    [(EmbeddingTask(("a",)), Stage.EMBEDDING), (CAT, Stage.IMAGE), (VisualTask("a", video=True), Stage.VIDEO)],
)
def test_a_task_is_for_workers_of_its_kind(asked: Task, stage: Stage) -> None:
    assert stage_of(asked) is stage
    assert [role.name for role in TASK_LEGS[stage].roles] == [stage.name]


def test_tasks_go_to_the_worker_with_the_fewest_requests_of_their_kind() -> None:
    pool = Pool()
    pool.join("chat", card=make_card())
    pool.join("a", "b", card=make_card(role=Role.IMAGE, max_batch_size=2))
    pool.join("films", card=make_card(role=Role.VIDEO, max_batch_size=1))
    selector = pool.selector(KvAware())

    chosen = [str(choose(selector, Stage.IMAGE, f"r{number}").worker) for number in range(4)]

    assert sorted(chosen[:2]) == sorted(chosen[2:]) == ["a", "b"], "each in turn"
    assert str(choose(selector, Stage.VIDEO, "v").worker) == "films"
    assert choose(selector, Stage.VIDEO, "w").policy == "fewest-requests"


def test_what_workers_report_counts_for_the_next_choice() -> None:
    pool = Pool()
    a, b = pool.join("a", "b", card=make_card(role=Role.EMBEDDING, max_batch_size=8))
    pool.say(a, RequestStarted("x", 0, 0, 0), RequestStarted("y", 0, 0, 0))
    pool.say(b, RequestStarted("z", 0, 0, 0))
    assert choose(pool.selector(KvAware()), Stage.EMBEDDING).worker == b

    pool.say(a, RequestFinished("x", "stop"), RequestFinished("y", "stop"))
    assert choose(pool.selector(KvAware()), Stage.EMBEDDING, "s").worker == a


def test_a_kind_that_nobody_serves_has_no_worker_and_a_full_one_is_waited_for() -> None:
    pool = Pool()
    pool.join("a", card=make_card(role=Role.IMAGE, max_batch_size=1))
    selector = pool.selector(KvAware())
    for number in range(2):  # twice as many as run at a time
        choose(selector, Stage.IMAGE, f"r{number}")

    nowhere, full = selector.select(task(Stage.VIDEO)), selector.select(task(Stage.IMAGE))

    assert isinstance(nowhere, NoWorker)
    assert isinstance(full, NoWorker)
    assert (bool(nowhere.busy), bool(full.busy)) == (False, True)


# -- on its worker -----------------------------------------------------------------------------------------------------


def running() -> RequestMachine:
    request = InferenceRequest("r", "m", b"", Sampling(1), task=CAT)
    machine = RequestMachine(request, TokenDelivery("r", lambda delivery: None), migration_limit=2)
    assert machine.begin(WORKER, "e", Stage.IMAGE).task == CAT
    return machine


def delivered(machine: RequestMachine) -> list[StreamDelta]:
    return machine.delivery._deltas


def test_progress_and_the_result_reach_the_client_and_end_the_request() -> None:
    machine = running()
    result = TaskResult((b"png",), "image/png")

    machine.on_delta(TokenDelta("r", 0, b"", progress=30))
    effects = machine.on_delta(TokenDelta("r", 0, b"", FinishReason.STOP, result=result))

    assert [(each.progress, each.result) for each in delivered(machine)] == [(30, None), (None, result)]
    assert any(isinstance(effect, EndRequest) for effect in effects)


@pytest.mark.parametrize(
    "delta",
    [
        TokenDelta("r", 0, b"", FinishReason.STOP),
        TokenDelta("r", 0, b"", result=TaskResult((b"x",))),
        TokenDelta("r", 0, b"", FinishReason.LENGTH),
        TokenDelta("r", 0, b"\1\0\0\0"),
    ],
)
def test_an_answer_that_is_none_of_a_task_moves_it_and_blames_its_worker(delta: TokenDelta) -> None:
    effects = running().on_delta(delta)

    assert [type(effect) for effect in effects if isinstance(effect, AvoidWorker | RecordFailure | PlaceNext)] == [
        AvoidWorker,
        RecordFailure,
        PlaceNext,
    ]


def test_a_task_of_a_lost_worker_begins_again_on_another_one() -> None:
    machine = running()
    machine.on_delta(TokenDelta("r", 0, b"", progress=90))

    effects = machine.on_lost("r", LegEvent.LOST, "its worker is lost")

    assert any(isinstance(effect, PlaceNext) and effect.moved for effect in effects)
    again = machine.begin(WorkerKey(WorkerId("other")), "f", Stage.IMAGE)
    assert (again.request_id, again.task) != ("r", None)
    assert again.task == CAT


def test_a_task_that_no_worker_can_do_ends_with_the_refusal() -> None:
    machine = running()
    refusal = TokenDelta("r", 0, b"", FinishReason.ERROR, error="no webp here", refusal=RefusalKind.CANNOT_DO)
    machine.on_delta(refusal)

    machine.end(LegEvent.NOWHERE, "no worker")

    last = delivered(machine)[-1]
    assert (last.error, last.unsupported) == ("no webp here", True)
