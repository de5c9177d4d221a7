"""TensorRT-LLM over several nodes: what it is started with, and what the loss of a rank does to the engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from poolgrid.cli.main import app
from poolgrid.workers.engines.lifecycle.health import EngineBrokenError
from poolgrid.workers.engines.registry import engine_definition
from poolgrid.workers.engines.trtllm.settings import TrtllmWorkerSettings
from poolgrid.workers.engines.trtllm.spanning import arguments_of
from poolgrid.workers.ranks.task import TASK_VARIABLE, RankTask, task_of, written
from tests.trtllm.engines import make_request, running_engine

SPAN = ("worker", "--engine", "trtllm", "--model-path", "m", "--nodes", "2", "--tensor-parallel-size", "4")


def settings(**given: Any) -> TrtllmWorkerSettings:
    return TrtllmWorkerSettings(model_path="m", **given)


def test_an_engine_on_nodes_knows_how_many_gpus_each_has() -> None:
    assert arguments_of(settings(nodes=2, tensor_parallel_size=16)).values["gpus_per_node"] == 8
    assert (
        arguments_of(settings(nodes=2, tensor_parallel_size=16, override_engine_args='{"gpus_per_node": 4}')).values[
            "gpus_per_node"
        ]
        == 4
    )
    assert "gpus_per_node" not in arguments_of(settings(tensor_parallel_size=16)).values
    with pytest.raises(ValueError, match=r"nodes is 3 and the engine has 4 GPUs \(TP 4 x PP 1\)"):
        arguments_of(settings(nodes=3, tensor_parallel_size=4))


def test_the_span_says_how_many_processes_and_by_which_launcher() -> None:
    definition = engine_definition("trtllm")
    assert definition.span(settings(tensor_parallel_size=4)) is None
    span = definition.span(settings(nodes=2, tensor_parallel_size=4, rank_launcher="numactl -m 0 launch"))
    assert span is not None
    assert (span.ranks, span.launcher) == (4, ("numactl", "-m", "0", "launch"))
    assert definition.shortest_timeout_ms(settings(nodes=2)) == 5_000


@pytest.mark.parametrize(
    ("environment", "options", "said"),
    [
        ({}, (), "none of OMPI_COMM_WORLD_RANK, SLURM_PROCID, PMI_RANK is set"),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
            (),
            "it has 4 ranks (TP 4 x PP 1), and 2 processes were started (SLURM_PROCID says so): start one for each "
            "rank, 2 on each node",
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, (), "PMI_RANK does not tell where rank 0 is: set leader_host"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, ("--leader-host", "tcp://h"), "--leader-host is 'tcp://h'"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_before_anything_starts(
    environment: dict[str, str], options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    monkeypatch.delenv(TASK_VARIABLE, raising=False)
    answer = CliRunner().invoke(app, [*SPAN, *options], env=environment)
    assert answer.exit_code == 2
    assert said in " ".join(answer.output.replace("│", " ").split())


def test_the_workers_command_travels_whole_in_one_variable() -> None:
    task = RankTask("17.0", ["worker", "--override-engine-args", '{"a": "b c"}'])
    assert task_of({TASK_VARIABLE: written(task)}) == task
    assert task_of({}) is None
    with pytest.raises(ValueError, match=TASK_VARIABLE):
        task_of({TASK_VARIABLE: "[]"})


class Ranks:
    """What the engine sees of the watch over its ranks."""

    def describe(self) -> dict[str, object]:
        return {"expected": 2, "alive": 1, "missing": [1]}


async def test_an_engine_that_hangs_because_a_rank_is_lost_ends_with_the_ranks_name() -> None:
    async with running_engine() as told:
        lose: Callable[[str], None] = told.engine.follow_ranks(Ranks())  # type: ignore[arg-type]
        told.executor.lose_rank(RuntimeError("nobody asks"), stuck=True)
        told.engine.submit(make_request("r"))
        assert told.engine.describe()["ranks"] == {"expected": 2, "alive": 1, "missing": [1]}
        before = told.engine.unhealthy_reason
        assert not before
        lose("rank 1 on host h1 was lost: it was silent")
        assert told.engine.unhealthy_reason == "rank 1 on host h1 was lost: it was silent"
        assert told.running is not None
        with pytest.raises(EngineBrokenError, match=r"^rank 1 on host h1 was lost: it was silent$"):
            await told.running
        lose("another")
        told.executor.release_ranks()
