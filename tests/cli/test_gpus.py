"""Which GPUs there are, and which worker gets which."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from poolgrid.server.cli.launch_plan import GpusMissing, Need, assign, present_gpus, usable_gpus

EIGHT = tuple(str(at) for at in range(8))


@pytest.mark.parametrize(
    ("named", "environment", "present", "usable"),
    [
        ("", {}, ("0", "1", "GPU-a", "GPU-b"), ("0", "1")),
        ("", {"CUDA_VISIBLE_DEVICES": "2,3"}, ("0", "1", "2", "3"), ("2", "3")),
        ("", {"CUDA_VISIBLE_DEVICES": "GPU-b"}, ("0", "1", "GPU-a", "GPU-b"), ("GPU-b",)),
        ("", {"CUDA_VISIBLE_DEVICES": "MIG-7"}, ("0", "GPU-a"), ("MIG-7",)),
        ("", {"CUDA_VISIBLE_DEVICES": ""}, ("0", "1"), ()),
        ("", {"CUDA_VISIBLE_DEVICES": "-1"}, ("0", "1"), ()),
        ("1, 0", {}, ("0", "1"), ("1", "0")),
        ("1", {"CUDA_VISIBLE_DEVICES": "0,1"}, ("0", "1"), ("1",)),
        ("0,1,2", {}, None, ("0", "1", "2")),
    ],
)
def test_what_may_be_used_is_what_is_named_visible_and_there(
    named: str, environment: dict[str, str], present: tuple[str, ...] | None, usable: tuple[str, ...]
) -> None:
    assert usable_gpus(named, environment, present) == usable


@pytest.mark.parametrize(
    ("named", "environment", "present", "words"),
    [
        ("4", {}, ("0", "1"), "gpus names GPU 4, which is not there: 0, 1 are"),
        ("", {"CUDA_VISIBLE_DEVICES": "0,9"}, ("0", "1"), "CUDA_VISIBLE_DEVICES names GPU 9, which is not there"),
        ("0", {"CUDA_VISIBLE_DEVICES": "1"}, ("0", "1"), "gpus names GPU 0, CUDA_VISIBLE_DEVICES allows 1"),
        ("", {}, None, "name them with --gpus"),
    ],
)
def test_a_gpu_that_is_not_there_is_named(
    named: str, environment: dict[str, str], present: tuple[str, ...] | None, words: str
) -> None:
    with pytest.raises(GpusMissing, match=words):
        usable_gpus(named, environment, present)


def test_workers_get_gpus_in_order_and_named_ones_first() -> None:
    needs = [Need("a", 2, "TP 2 x PP 1"), Need("b", 1, "TP 1 x PP 1", ("0",)), Need("c", 1, "TP 1 x PP 1")]
    assert assign(needs, EIGHT[:4]) == {"a": ("1", "2"), "b": ("0",), "c": ("3",)}


@pytest.mark.parametrize(
    ("needs", "usable", "words"),
    [
        (
            [Need("a", 4, "TP 2 x PP 2"), Need("b", 1, "TP 1 x PP 1")],
            EIGHT[:4],
            "5 GPUs are needed .a: 4 = TP 2 x PP 2, b",
        ),
        ([Need("a", 1, "TP 1 x PP 1")], (), "1 GPU is needed .* and 0 are free .none"),
        ([Need("a", 2, "TP 2 x PP 1", ("0",))], EIGHT, "a is to have 1 GPU .0. and needs 2 .TP 2 x PP 1"),
        ([Need("a", 1, "TP 1 x PP 1", ("7",))], EIGHT[:2], "a is to have GPU 7, usable are 0,1"),
    ],
)
def test_too_few_gpus_are_said_with_what_needs_them(needs: list[Need], usable: tuple[str, ...], words: str) -> None:
    with pytest.raises(GpusMissing, match=words):
        assign(needs, usable)


def driver(count: int, works: bool = True) -> Any:
    """NVIDIA's library, as far as it is asked."""

    class NVMLError(Exception):
        pass

    def init() -> None:
        if not works:
            raise NVMLError

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda at: at,
        nvmlDeviceGetUUID=lambda at: f"GPU-{at}".encode(),
    )


def test_the_driver_says_which_gpus_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(2))
    assert present_gpus() == ("0", "1", "GPU-0", "GPU-1")
    monkeypatch.setitem(sys.modules, "pynvml", driver(2, works=False))
    assert present_gpus() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert present_gpus() is None
