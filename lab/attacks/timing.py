"""Whether a tenant can tell by timing what another tenant has sent: `lab.benchmarks.tenant_timing`, row by row.

If nothing is shared, what a victim has just sent and what it has not take times of one distribution: the area under
the curve of the best guess is a half, and the rank test of Mann and Whitney finds nothing.
"""

from __future__ import annotations

from lab.attacks.attack import Attack, Outcome, Part, Run, Scene
from lab.benchmarks.tenant_timing import CACHES, SAMPLES, SIZES_BYTES, measure

SAMPLES_MIN = 40
SECONDS_MAX = 180.0
"""For 200 samples a side of the largest size, over HTTP, on a busy machine."""


def timing(cache: str, size: int) -> Run:
    """Return the measurement of one cache at one size."""

    async def run(scene: Scene) -> Outcome:
        (row,) = await measure([cache], [size], scene.count(SAMPLES, SAMPLES_MIN))
        got = (
            f"{row.samples} a side: medians {row.seen_ms:.3f} and {row.unseen_ms:.3f} ms, area {row.area:.3f}, "
            f"p = {row.p_value:.2g}"
        )
        told = f"what another tenant sent ({cache}, {size} bytes) is told from what it did not: {got}"
        return Outcome(got, [told] if row.told_apart else [])

    return run


def _attack(cache: str, size: int) -> Attack:
    return Attack(
        f"{cache}, {size:,} bytes",
        f"Times {SAMPLES} times what another tenant has sent, and as often what it has not ({cache}, {size:,} bytes).",
        timing(cache, size),
        short=False,
        alone=True,
        judge_latency=False,
        seconds_min=SECONDS_MAX / 2,
    )


PART = Part(
    "timing",
    "Timing side channels between tenants",
    tuple(_attack(cache, size) for cache in CACHES for size in SIZES_BYTES),
)
