"""Our logits processors inside TensorRT-LLM's: stream, beams, failures."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.plugins.trtllm.logits import engine_processor, reason_refused
from poolgrid.plugins.trtllm.logits_registry import FailureReporter, LogitsRow
from tests.fakes import install_tensorrt_llm


class Tensor:
    """The part of ``torch.Tensor`` that is needed, over numpy: indexing gives views."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.array[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.array[index] = value.array if isinstance(value, Tensor) else value

    def clone(self) -> Tensor:
        return Tensor(self.array.copy())

    def copy_(self, other: Tensor) -> None:
        self.array[...] = other.array


class Failures(FailureReporter):
    """Failures that were reported."""

    def __init__(self) -> None:
        super().__init__("")
        self.names: list[str] = []

    def report(self, name: str) -> None:
        self.names.append(name)


@pytest.fixture(autouse=True)
def _tensorrt_llm() -> None:
    install_tensorrt_llm()


def add_ten(token_ids: Sequence[int], logits: LogitsRow) -> None:
    logits[token_ids[-1]] = 10.0


def break_midway(token_ids: Sequence[int], logits: LogitsRow) -> None:
    logits[:] = -1.0
    raise RuntimeError("midway")


@pytest.mark.parametrize("shape", [(2, 4), (1, 2, 4)])
def test_every_beam_is_processed_with_its_own_tokens(shape: tuple[int, ...]) -> None:
    logits = Tensor(np.zeros(shape))
    engine_processor([("add", add_ten)], Failures())(7, logits, [[0, 1], [0, 3]], None, None)
    assert logits.array.reshape(2, 4).argmax(axis=1).tolist() == [1, 3]


def test_an_error_leaves_the_logits_unchanged_and_is_reported_and_the_others_go_on() -> None:
    logits = Tensor(np.ones((1, 4)))
    failures = Failures()
    engine_processor([("bad", break_midway), ("add", add_ten), ("bad", break_midway)], failures)(
        7, logits, [[2]], None, None
    )
    assert logits.array.tolist() == [[1.0, 1.0, 10.0, 1.0]]
    assert failures.names == ["bad", "bad"]


def test_the_engines_base_class_knows_ours() -> None:
    from tensorrt_llm.sampling_params import LogitsProcessor

    assert isinstance(engine_processor([], Failures()), LogitsProcessor)


def test_everything_happens_on_the_engines_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    @contextlib.contextmanager
    def stream(external: str) -> Iterator[None]:
        happened.append(f"enter {external}")
        yield
        happened.append("leave")

    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        stream=stream, ExternalStream=lambda pointer: f"stream {pointer}"
    )
    monkeypatch.setitem(sys.modules, "torch", torch)

    def note(token_ids: Sequence[int], logits: LogitsRow) -> None:
        happened.append("process")

    engine_processor([("note", note)], Failures())(7, Tensor(np.ones((1, 4))), [[2]], 4711, None)
    assert happened == ["enter stream 4711", "process", "leave"]


@pytest.mark.parametrize(
    ("stage", "mode", "arguments", "refused"),
    [
        (Stage.WHOLE, "prefill_and_decode", {}, None),
        (Stage.WHOLE, "prefill_and_decode", {"speculative_config": None}, None),
        (Stage.PREFILL, "prefill_and_decode", {}, "disaggregated"),
        (Stage.DECODE, "decode", {}, "disaggregated"),
        (Stage.WHOLE, "decode", {}, "disaggregated"),
        (Stage.WHOLE, "prefill_and_decode", {"speculative_config": {"decoding_type": "MTP"}}, "MTP"),
        (Stage.WHOLE, "prefill_and_decode", {"speculative_config": {"decoding_type": "Eagle"}}, "Eagle"),
    ],
)
def test_where_tensorrt_llm_cannot_run_them_a_request_is_told_so(
    stage: Stage, mode: str, arguments: dict[str, Any], refused: str | None
) -> None:
    reason = reason_refused(stage, mode, arguments)
    assert (reason is None) if refused is None else (reason is not None and refused in reason)
