"""``python -m poolgrid.workers.gpus``: reads this machine's GPUs once, as a worker would, and prints the metrics.

What a GPU, or its driver, does not tell is listed behind them. The status is 1 where there is nothing to read.
"""

from __future__ import annotations

import os
import sys

from prometheus_client import CollectorRegistry, generate_latest

from poolgrid.process.clock import SystemClock
from poolgrid.workers.gpus.metrics import GpuCollector
from poolgrid.workers.gpus.nvml import GpusUnavailable, NvmlReader, library_installed
from poolgrid.workers.gpus.watch import Seen


def main() -> int:
    """Read and print; return the exit status."""
    clock = SystemClock()
    try:
        reader = NvmlReader(library_installed(), os.environ)
    except GpusUnavailable as why:
        sys.stderr.write(f"no metrics of GPUs: {why}\n")
        return 1
    try:
        began_ms = clock.monotonic_ms()
        readings = reader.read()
        now_ms = clock.monotonic_ms()
    finally:
        reader.close()
    registry = CollectorRegistry()
    collector = GpuCollector(lambda: Seen(reader.driver, readings, now_ms, now_ms - began_ms))
    registry.register(collector)
    sys.stdout.write(generate_latest(registry).decode())
    absent = [family.name for family in collector.collect() if not family.samples]
    sys.stdout.write(f"# {len(readings)} GPUs; without a value: {', '.join(absent) or 'none'}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
