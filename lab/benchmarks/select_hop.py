"""What the select-and-reserve hop of the global router adds to TTFT, on loopback.

    python -m lab.benchmarks.select_hop [--requests 400] [--json OUT]

Starts a fleet (`poolgrid up --pools`), then sends the same kind of request in turn through the global router and
straight to the router of the pool that the grid chooses, and compares the times to the first byte of the answer.
Prompts all differ, so no cache helps either.
"""

from __future__ import annotations

import argparse
import json
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

DOCUMENT = Path(__file__).parents[2] / "pool_configs" / "aggregated_four_classes.json"
START_TIMEOUT_S = 90.0


def ttft_ms(client: httpx.Client, url: str, prompt: list[int]) -> float:
    """Return the milliseconds from sending a streaming request to the first byte of its answer's body."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "stream": True}
    started = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        chunks = answer.iter_raw()
        next(chunks)
        elapsed = time.perf_counter() - started
        for _ in chunks:
            pass
    return elapsed * 1000


def measure(url: str, requests: int) -> dict[str, float]:
    """Return p50 and p90 of both ways, and the difference of the medians."""
    with httpx.Client(timeout=30) as client:
        pools = {row["name"]: row["url"] for row in client.get(f"{url}/v1/pools").json()["data"]}
        first = client.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": [99] * 64, "max_tokens": 1})
        pool = first.headers["x-poolgrid-pool"]
        times: dict[str, list[float]] = {"global": [], "direct": []}
        for number in range(requests):
            for way, target in (("global", url), ("direct", pools[pool])):
                prompt = [100 + (number * 7 + at * 13 + (way == "direct")) % 3900 for at in range(64)]
                times[way].append(ttft_ms(client, target, prompt))
    found = {}
    for way, values in times.items():
        ordered = sorted(values)
        found[f"{way}_p50_ms"] = statistics.median(ordered)
        found[f"{way}_p90_ms"] = ordered[int(0.9 * len(ordered))]
    found["added_p50_ms"] = found["global_p50_ms"] - found["direct_p50_ms"]
    found["ratio_p50"] = found["global_p50_ms"] / found["direct_p50_ms"]
    return found


def main() -> int:
    """Run it and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400, help="requests per way")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    up = subprocess.Popen(
        [sys.executable, "-m", "poolgrid", "up", "--pools", str(DOCUMENT), "--port", "0", "--speedup", "20"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert up.stdout is not None
        readable, _, _ = select.select([up.stdout], [], [], START_TIMEOUT_S)
        line = up.stdout.readline().decode().split() if readable else []
        if not line or line[0] != "ready":
            sys.stderr.write("the fleet did not start\n")
            return 1
        figures = measure(line[1], options.requests)
    finally:
        up.terminate()
        up.wait(60)
    table = Table("way", "TTFT p50 ms", "p90 ms", title="64-token prompts, one at a time")
    for way in ("direct", "global"):
        table.add_row(way, f"{figures[f'{way}_p50_ms']:.2f}", f"{figures[f'{way}_p90_ms']:.2f}")
    Console().print(table)
    Console().print(f"the hop adds {figures['added_p50_ms']:.2f} ms at p50 (ratio {figures['ratio_p50']:.2f})")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
