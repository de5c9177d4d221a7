"""Shows the last reading of the GPUs when somebody scrapes: ``poolgrid_worker_gpu_*``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from poolgrid.process.instruments import GaugeFamily
from poolgrid.workers.gpus.reading import GpuReading
from poolgrid.workers.gpus.watch import Seen

BEGINNING = "poolgrid_worker_gpu_"

Value = float | int | None

Told = Callable[[GpuReading], Value | Mapping[str, Value]]
"""What a metric shows of a GPU: a value, or one for each value of its further label."""


class GpuCollector(Collector):
    """The metrics of one process's GPUs; without GPUs they have no series."""

    def __init__(self, seen: Callable[[], Seen | None]) -> None:
        self._seen = seen

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        seen = self._seen()
        readings = [] if seen is None else seen.readings
        info = GaugeFamily(
            f"{BEGINNING}present",
            "1 for each GPU of the engine: its product and the driver's version.",
            labels=["gpu", "uuid", "name", "driver"],
            across="largest",
        )
        for each in readings:
            info.add_metric([*_labels(each), each.gpu.name, "" if seen is None else seen.driver], 1)
        yield info
        took = GaugeFamily(
            f"{BEGINNING}reading_seconds",
            "How long the last reading of all GPUs took. Absent where none was read for a while: the driver hangs, or "
            "there is no GPU.",
            across="largest",
        )
        if seen is not None:
            took.add_metric([], seen.took_ms / 1000)
        yield took
        for family, told in self._families():
            further = family._labelnames[len(LABELS) :]
            for each in readings:
                found = told(each)
                if isinstance(found, Mapping):
                    assert further, "several values have a label that tells them apart"
                    for name, value in found.items():
                        _add(family, (*_labels(each), name), value)
                else:
                    _add(family, _labels(each), found)
            yield family

    def _families(self) -> Iterable[tuple[GaugeFamily | CounterMetricFamily, Told]]:
        def gauge(name: str, text: str, *further: str) -> GaugeFamily:
            return GaugeFamily(f"{BEGINNING}{name}", text, labels=[*LABELS, *further], across="largest")

        def counter(name: str, text: str, *further: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"{BEGINNING}{name}", text, labels=[*LABELS, *further])

        yield (
            gauge(
                "lost",
                "1 while the driver has lost the GPU or says that it needs a reset: its other metrics are absent. "
                "Drain the worker and look at the kernel's log for XID errors.",
            ),
            lambda each: float(each.is_lost),
        )
        yield (
            gauge(
                "utilization_ratio",
                "Share of the last moments in which some kernel ran, from 0 to 1. It says nothing of how much of the "
                "GPU a kernel used.",
            ),
            lambda each: each.utilization_ratio,
        )
        yield (
            gauge(
                "memory_utilization_ratio",
                "Share of the last moments in which memory was read or written, from 0 to 1. Decoding is bound by it.",
            ),
            lambda each: each.memory_utilization_ratio,
        )
        yield (
            gauge("memory_used_bytes", "Memory in use by all processes, the driver's own included."),
            lambda each: each.memory_used_bytes,
        )
        yield (
            gauge("memory_total_bytes", "Memory of the GPU, or of the part of it."),
            lambda each: each.memory_total_bytes,
        )
        yield gauge("power_watts", "Power drawn now."), lambda each: each.power_watts
        yield (
            gauge("power_limit_watts", "Power at which clocks are held down: a cap below others' slows this worker."),
            lambda each: each.power_limit_watts,
        )
        yield (
            counter("energy_joules", "Energy used since the driver was loaded; its rate is the mean power."),
            lambda each: each.energy_joules,
        )
        yield (
            gauge("temperature_celsius", "Temperature by sensor: `core` or `memory`.", "sensor"),
            lambda each: each.temperatures_celsius,
        )
        yield (
            gauge("clock_hertz", "Clock by domain: `sm` or `memory`.", "domain"),
            lambda each: each.clocks_hertz,
        )
        yield (
            gauge(
                "throttled",
                "1 while clocks are held down, by reason. `idle` is no trouble, and `power_cap` is usual under full "
                "load. `thermal`, `hardware_thermal`, `hardware_slowdown` and `power_brake` mean bad cooling or power.",
                "reason",
            ),
            lambda each: (
                {} if each.throttled is None else {name: float(is_so) for name, is_so in each.throttled.items()}
            ),
        )
        yield (
            counter(
                "ecc_errors",
                "Memory errors since the driver was loaded, by kind: `corrected` or `uncorrected`. After an "
                "uncorrected one what the engine computes is not to be believed: drain the worker and reset the GPU.",
                "kind",
            ),
            lambda each: each.ecc_errors,
        )
        yield (
            gauge(
                "row_remap",
                "1 when a row of memory is `pending` its replacement at the next reset, or when one had a `failure`: "
                "then the GPU is to be replaced.",
                "state",
            ),
            lambda each: each.row_remap,
        )
        yield (
            gauge("nvlinks", "NVLinks by state: `active` or `inactive`. One that goes down slows every step.", "state"),
            lambda each: each.nvlinks,
        )
        yield (
            counter(
                "nvlink_bytes",
                "Bytes that crossed the GPU's NVLinks, payload only, by direction: `transmit` or `receive`.",
                "direction",
            ),
            lambda each: each.nvlink_bytes,
        )
        yield (
            counter("nvlink_errors", "Errors of the GPU's NVLinks by kind: `crc`, `replay` or `recovery`.", "kind"),
            lambda each: each.nvlink_errors,
        )


LABELS = ("gpu", "uuid")


def _labels(reading: GpuReading) -> tuple[str, str]:
    return reading.gpu.index, reading.gpu.uuid


def _add(family: GaugeFamily | CounterMetricFamily, labels: tuple[str, ...], value: Value) -> None:
    if value is not None:
        family.add_metric(labels, value)
