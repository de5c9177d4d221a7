"""What was read of one GPU, and which GPUs a process has. Pure.

``None`` is what a GPU, or its driver, does not tell: old ones have no throttling reasons, some no NVLink, parts of a
GPU (MIG) no clocks of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NO_GPU = ("", "-1", "none", "void", "NoDevFiles")
"""What ``CUDA_VISIBLE_DEVICES`` says where a process is to have none."""

PART = "MIG-"
"""Before the UUID of a part of a GPU."""


@dataclass(frozen=True, slots=True)
class GpuName:
    """One GPU, or part of one, as the driver knows it."""

    index: str
    """The driver's number, as ``nvidia-smi`` shows it; of a part that of its GPU."""
    uuid: str
    name: str = ""
    """The product's."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment."""

    gpu: GpuName
    is_lost: bool = False
    """Whether the driver has lost it, or says that it needs a reset; the rest is unknown then."""
    utilization_ratio: float | None = None
    """Share of the last moments in which some kernel ran."""
    memory_utilization_ratio: float | None = None
    """Share of the last moments in which memory was read or written."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    """Since the driver was loaded."""
    temperatures_celsius: dict[str, float] = field(default_factory=dict)
    """By sensor: ``core``, ``memory``."""
    clocks_hertz: dict[str, float] = field(default_factory=dict)
    """By domain: ``sm``, ``memory``."""
    throttled: dict[str, bool] = field(default_factory=dict)
    """By reason, whether clocks are held down for it now."""
    ecc_errors: dict[str, int] = field(default_factory=dict)
    """Since the driver was loaded: ``corrected``, ``uncorrected``."""
    row_remap: dict[str, int] = field(default_factory=dict)
    """Of rows of memory that were replaced: whether one is ``pending`` a reset, whether one has a ``failure``."""
    nvlinks: dict[str, int] = field(default_factory=dict)
    """How many links are ``active`` and ``inactive``."""
    nvlink_bytes: dict[str, int] = field(default_factory=dict)
    """By direction: ``transmit``, ``receive``."""
    nvlink_errors: dict[str, int] = field(default_factory=dict)
    """By kind: ``crc``, ``replay``, ``recovery``."""


def visible(named: str | None, present: Sequence[str]) -> list[str]:
    """Return which of the GPUs that are ``present`` (UUIDs, in the driver's order) a process may use, in CUDA's order.

    ``named`` is ``CUDA_VISIBLE_DEVICES``; ``None`` = all. As CUDA has it, UUIDs may be shortened as long as they name
    one only, and the list ends before the first name that is none. Parts of GPUs are given back as they are named.
    """
    if named is None:
        return list(present)
    found: list[str] = []
    for name in (each.strip() for each in named.split(",")):
        if name in NO_GPU:
            break
        if name.startswith(PART):
            found.append(name)
            continue
        if name.isdecimal() and name.isascii():
            meant = [present[int(name)]] if int(name) < len(present) else []
        else:
            meant = [uuid for uuid in present if uuid.startswith(name)]
        if len(meant) != 1 or meant[0] in found:
            break
        found += meant
    return found
