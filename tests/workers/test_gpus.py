"""The GPUs beside serving: which are the engine's, what is told of them, and that nothing waits for a driver.

The driver is a stand-in (``fake_nvml``); ``python -m poolgrid.workers.gpus`` reads a real one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import ValidationError

from poolgrid.workers.engines.simulated.settings import SimulatedWorkerSettings
from poolgrid.workers.gpus.metrics import GpuCollector
from poolgrid.workers.gpus.nvml import GpusUnavailable, NvmlReader, library_installed
from poolgrid.workers.gpus.reading import GpuReading, visible
from poolgrid.workers.gpus.watch import STALE_INTERVALS, GpuWatch, Seen
from poolgrid.workers.settings import WorkerProcessSettings
from tests.workers.fake_nvml import FakeGpu, FakeNvml

A, B, C = "GPU-aaaa", "GPU-bbbb", "GPU-cccc"
PART = "MIG-1"


# -- which GPUs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        (None, [A, B, C]),
        ("0,2", [A, C]),
        ("2, 0", [C, A]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,-1,0", [B]),
        ("0,7,1", [A]),
        ("0,0", [A]),
        (f"{B},GPU-c", [B, C]),
        ("GPU-", []),
        (f"{PART},1", [PART, B]),
    ],
)
def test_the_gpus_of_a_process_are_those_that_cuda_would_give_it(named: str | None, meant: list[str]) -> None:
    assert visible(named, [A, B, C]) == meant


def _read(nvml: FakeNvml, named: str | None = None) -> list[GpuReading]:
    reader = NvmlReader(nvml, {} if named is None else {"CUDA_VISIBLE_DEVICES": named})
    try:
        return reader.read()
    finally:
        reader.close()


def test_only_the_engines_gpus_are_read_and_they_keep_the_drivers_numbers() -> None:
    gpus = [FakeGpu(A), FakeGpu(B), FakeGpu(C)]
    readings = _read(FakeNvml(*gpus), "2,0")
    assert [(each.gpu.index, each.gpu.uuid) for each in readings] == [("2", C), ("0", A)]
    assert not gpus[1].asked


def test_a_part_of_a_gpu_has_its_own_memory_and_the_rest_of_its_gpu() -> None:
    whole = FakeGpu(A)
    part = FakeGpu(PART, whole=whole)
    [reading] = _read(FakeNvml(whole, parts=(part,)), PART)
    assert (reading.gpu.index, reading.gpu.uuid, reading.memory_used_bytes) == ("0", PART, 10)
    assert reading.power_watts == 612.5


@pytest.mark.parametrize(
    ("library", "environment", "why"),
    [
        (None, {}, "nvidia-ml-py is not installed"),
        (FakeNvml(broken=FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED), {}, "driver cannot be asked"),
        (FakeNvml(), {}, "has no GPU"),
        (FakeNvml(FakeGpu(A)), {"CUDA_VISIBLE_DEVICES": "-1"}, "has no GPU"),
        (FakeNvml(FakeGpu(A)), {"CUDA_VISIBLE_DEVICES": PART}, "does not tell its GPUs"),
    ],
)
def test_where_there_is_nothing_to_read_it_says_why_and_leaves_the_driver_alone(
    library: FakeNvml | None, environment: dict[str, str], why: str
) -> None:
    with pytest.raises(GpusUnavailable, match=why):
        NvmlReader(library, environment)
    assert library is None or library.opened == 0


# -- what is told of them --------------------------------------------------------------------------------------------


def _shown(*readings: GpuReading) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(GpuCollector(lambda: Seen("575.1", list(readings), 0.0, 12.0)))
    lines = generate_latest(registry).decode().splitlines()
    return {key: float(value) for key, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def test_all_that_a_gpu_tells_is_shown_in_base_units() -> None:
    gpu = f'gpu="0",uuid="{A}"'
    assert _shown(*_read(FakeNvml(FakeGpu(A)))) == {
        f'poolgrid_worker_gpu_present{{driver="575.1",gpu="0",name="NVIDIA H200",uuid="{A}"}}': 1,
        "poolgrid_worker_gpu_reading_seconds": 0.012,
        f"poolgrid_worker_gpu_lost{{{gpu}}}": 0,
        f"poolgrid_worker_gpu_utilization_ratio{{{gpu}}}": 0.87,
        f"poolgrid_worker_gpu_memory_utilization_ratio{{{gpu}}}": 0.41,
        f"poolgrid_worker_gpu_memory_used_bytes{{{gpu}}}": 100,
        f"poolgrid_worker_gpu_memory_total_bytes{{{gpu}}}": 150,
        f"poolgrid_worker_gpu_power_watts{{{gpu}}}": 612.5,
        f"poolgrid_worker_gpu_power_limit_watts{{{gpu}}}": 700,
        f"poolgrid_worker_gpu_energy_joules_total{{{gpu}}}": 12,
        f'poolgrid_worker_gpu_temperature_celsius{{gpu="0",sensor="core",uuid="{A}"}}': 64,
        f'poolgrid_worker_gpu_temperature_celsius{{gpu="0",sensor="memory",uuid="{A}"}}': 71,
        f'poolgrid_worker_gpu_clock_hertz{{domain="sm",{gpu}}}': 1.98e9,
        f'poolgrid_worker_gpu_clock_hertz{{domain="memory",{gpu}}}': 3.201e9,
        **{
            f'poolgrid_worker_gpu_throttled{{gpu="0",reason="{reason}",uuid="{A}"}}': held
            for reason, held in {
                "idle": 0,
                "application_clocks": 0,
                "power_cap": 1,
                "hardware_slowdown": 0,
                "sync_boost": 0,
                "thermal": 0,
                "hardware_thermal": 1,
                "power_brake": 0,
                "display_clocks": 0,
            }.items()
        },
        f'poolgrid_worker_gpu_ecc_errors_total{{gpu="0",kind="corrected",uuid="{A}"}}': 3,
        f'poolgrid_worker_gpu_ecc_errors_total{{gpu="0",kind="uncorrected",uuid="{A}"}}': 1,
        f'poolgrid_worker_gpu_row_remap{{gpu="0",state="pending",uuid="{A}"}}': 1,
        f'poolgrid_worker_gpu_row_remap{{gpu="0",state="failure",uuid="{A}"}}': 0,
        f'poolgrid_worker_gpu_nvlinks{{gpu="0",state="active",uuid="{A}"}}': 2,
        f'poolgrid_worker_gpu_nvlinks{{gpu="0",state="inactive",uuid="{A}"}}': 1,
        f'poolgrid_worker_gpu_nvlink_bytes_total{{direction="transmit",{gpu}}}': 2048,
        f'poolgrid_worker_gpu_nvlink_bytes_total{{direction="receive",{gpu}}}': 5120,
        f'poolgrid_worker_gpu_nvlink_errors_total{{gpu="0",kind="crc",uuid="{A}"}}': 7,
    }


def test_what_a_gpu_does_not_support_is_left_out_and_not_asked_again() -> None:
    gpu = FakeGpu(A, fails={"power": FakeNvml.NVML_ERROR_NOT_SUPPORTED, "ecc": FakeNvml.NVML_ERROR_TIMEOUT})
    reader = NvmlReader(FakeNvml(gpu), {})
    for _ in range(2):
        [reading] = reader.read()
        assert reading.power_watts is None
        assert reading.ecc_errors == {}
        assert reading.utilization_ratio == 0.87
    assert gpu.asked.count("power") == 1
    assert gpu.asked.count("ecc") == 4, "what only failed is asked for again"


def test_an_older_package_lacks_functions_and_the_rest_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCurrentClocksEventReasons")
    [reading] = _read(FakeNvml(FakeGpu(A)))
    assert reading.throttled == {}
    assert reading.power_watts == 612.5


@pytest.mark.parametrize("error", [FakeNvml.NVML_ERROR_GPU_IS_LOST, FakeNvml.NVML_ERROR_RESET_REQUIRED])
def test_a_lost_gpu_is_said_to_be_lost_and_the_others_are_read(error: int) -> None:
    shown = _shown(*_read(FakeNvml(FakeGpu(A, fails={"clock": error}), FakeGpu(B))))
    assert shown[f'poolgrid_worker_gpu_lost{{gpu="0",uuid="{A}"}}'] == 1
    assert not [name for name in shown if A in name and "_lost" not in name and "_present" not in name]
    assert shown[f'poolgrid_worker_gpu_power_watts{{gpu="1",uuid="{B}"}}'] == 612.5


def test_the_package_that_is_installed_has_all_that_is_asked_for() -> None:
    """Each name of the stand-in is one of the real package, with the same value."""
    real: Any = library_installed()
    if real is None:
        pytest.skip("nvidia-ml-py is not installed")
    for name in (each for each in vars(FakeNvml) if each.startswith(("NVML", "nvml"))):
        assert hasattr(real, name), name
        if name.isupper():
            assert getattr(real, name) == getattr(FakeNvml, name), name


# -- reading again and again -----------------------------------------------------------------------------------------


class Reader:
    """GPUs that are read when a test lets them."""

    driver = "575.1"

    def __init__(self, fails: bool = False) -> None:
        self.asked = threading.Semaphore(0)
        self.let = threading.Semaphore(0)
        self.closed = threading.Event()
        self.fails = fails

    def read(self) -> list[GpuReading]:
        self.asked.release()
        assert self.let.acquire(timeout=60)
        if self.fails:
            raise OSError("the driver is being replaced")
        return []

    def close(self) -> None:
        self.closed.set()


class Clock:
    now_ms = 0.0

    def monotonic_ms(self) -> float:
        return self.now_ms

    def wall_ms(self) -> int:
        return 0


def _wait_until(true: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(6000):
        if true():
            return
        waited.wait(0.01)
    raise AssertionError("it did not happen within a minute")


def test_a_reading_is_shown_until_it_is_old_and_nobody_waits_for_a_driver_that_hangs() -> None:
    reader, clock = Reader(), Clock()
    watch = GpuWatch(lambda: reader, 100, clock)
    watch.start()
    assert reader.asked.acquire(timeout=60)
    assert watch.seen() is None, "the driver has not answered yet"
    reader.let.release()
    _wait_until(lambda: watch.seen() is not None)

    assert reader.asked.acquire(timeout=60), "it is read again"
    clock.now_ms = watch.stale_ms
    assert watch.seen() is not None
    clock.now_ms += 1
    assert watch.seen() is None, "the driver hangs, and what it said is old"
    assert watch.stale_ms >= STALE_INTERVALS * 100

    reader.let.release()
    watch.stop()
    assert reader.closed.is_set()


def test_a_reading_that_fails_is_tried_again_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader(fails=True)
    watch = GpuWatch(lambda: reader, 100, Clock())
    watch.start()
    for _ in range(2):
        assert reader.asked.acquire(timeout=60)
        reader.let.release()
    reader.let.release(5)
    watch.stop()
    assert "reading the GPUs failed, it is tried again: OSError('the driver is being replaced')" in caplog.messages


@pytest.mark.parametrize(
    ("error", "level"), [(GpusUnavailable("there is no driver"), logging.INFO), (OSError("version"), logging.WARNING)]
)
def test_without_gpus_the_log_says_so_once_and_there_are_no_series(
    caplog: pytest.LogCaptureFixture, error: Exception, level: int
) -> None:
    def open_reader() -> Reader:
        raise error

    caplog.set_level(logging.INFO)
    watch = GpuWatch(open_reader, 100, Clock())
    watch.start()
    watch.stop()
    assert [(record.levelno, str(error) in record.getMessage()) for record in caplog.records] == [(level, True)]
    registry = CollectorRegistry()
    registry.register(GpuCollector(watch.seen))
    assert not [line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]


def test_how_often_they_are_read_is_bounded_and_the_simulated_engine_has_none() -> None:
    assert WorkerProcessSettings.model_validate({}).gpu_interval_ms == 5000
    assert SimulatedWorkerSettings.model_validate({}).gpu_interval_ms == 0
    with pytest.raises(ValidationError, match=r"gpu_interval_ms is 50, allowed are 0 \(none\) and 100 to 3,600,000"):
        WorkerProcessSettings.model_validate({"gpu_interval_ms": 50})
