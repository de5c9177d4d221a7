"""The GPUs of this machine, and which worker gets which. Assigning is pure; only ``present_gpus`` looks.

Rules
    1. Nothing is started on hope: GPUs that are asked for and not there end the start with their names and numbers.
    2. A GPU goes to one worker. To share one, name it for both.
    3. GPUs are named as CUDA names them: by number, or by the UUID of a device or of a part of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poolgrid.process.figures import counted

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class GpusMissing(ValueError):
    """Too few GPUs; the message lists the present ones."""


@dataclass(frozen=True, slots=True)
class Need:
    """The GPUs that one worker needs."""

    worker: str
    count: int
    made_of: str
    """How the count comes about: ``TP 4 x PP 1``."""
    named: tuple[str, ...] = ()
    """Those it is to have; empty = any that are free."""


def split_names(text: str) -> tuple[str, ...]:
    """Return the GPUs of a list such as ``0,1`` or ``GPU-5c…,MIG-…``."""
    return tuple(name for each in text.split(",") if (name := each.strip()))


def present_gpus() -> tuple[str, ...] | None:
    """Return numbers and UUIDs of all GPUs, as NVIDIA's driver tells; ``None`` where there is no driver to ask."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None  # no driver here
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    finally:
        pynvml.nvmlShutdown()
    return (*map(str, range(len(handles))), *(each.decode() if isinstance(each, bytes) else each for each in uuids))


def usable_gpus(named: str, environment: Mapping[str, str], present: Sequence[str] | None) -> tuple[str, ...]:
    """Return the GPUs that workers may get, in order.

    ``named`` is the user's list (empty = all that this process may see), ``present`` what the driver tells. Raises
    ``GpusMissing`` for a name that is not there, and where it is unknown what is there.
    """
    visible = environment.get(CUDA_VISIBLE_DEVICES)
    seen = None if visible is None else split_names(visible)
    chosen = split_names(named)
    where = "gpus"
    if not chosen and seen is not None:
        chosen, where = (() if seen[:1] == ("-1",) else seen), CUDA_VISIBLE_DEVICES
    elif not chosen and present is not None:
        return tuple(each for each in present if each.isdecimal())
    elif not chosen:
        raise GpusMissing(
            "counting the GPUs of this machine: NVIDIA's driver cannot be asked (it is missing, or nvidia-ml-py) and "
            f"{CUDA_VISIBLE_DEVICES} is not set; name them with --gpus 0,1,..."
        )
    for each in chosen:
        if present is not None and each not in present and not each.startswith("MIG-"):
            there = ", ".join(name for name in present if name.isdecimal()) or "none"
            raise GpusMissing(f"{where} names GPU {each}, which is not there: {there} are")
        if where == "gpus" and seen is not None and each not in seen:
            raise GpusMissing(f"gpus names GPU {each}, {CUDA_VISIBLE_DEVICES} allows {visible or 'none'}")
    return chosen


def assign(needs: Sequence[Need], usable: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the GPUs of each worker, those that are named for one first; raises ``GpusMissing``."""
    assigned: dict[str, tuple[str, ...]] = {}
    for need in needs:
        if not need.named:
            continue
        if len(need.named) != need.count:
            raise GpusMissing(
                f"{need.worker} is to have {counted(len(need.named), 'GPU')} ({','.join(need.named)}) and needs "
                f"{need.count} "
                f"({need.made_of})"
            )
        strangers = [each for each in need.named if each not in usable]
        if strangers:
            raise GpusMissing(f"{need.worker} is to have GPU {strangers[0]}, usable are {','.join(usable) or 'none'}")
        assigned[need.worker] = need.named
    taken = {each for names in assigned.values() for each in names}
    free = [each for each in usable if each not in taken]
    wanting = [need for need in needs if not need.named]
    wanted = sum(need.count for need in wanting)
    if wanted > len(free):
        each_needs = ", ".join(f"{need.worker}: {need.count} = {need.made_of}" for need in wanting)
        raise GpusMissing(
            f"{counted(wanted, 'GPU')} {'is' if wanted == 1 else 'are'} needed ({each_needs}) and {len(free)} "
            f"{'is' if len(free) == 1 else 'are'} free ({','.join(free) or 'none'}); fewer "
            "workers, a smaller engine file, or GPUs named for several workers at once (--gpus prefill=0 "
            "--gpus decode=0) need fewer"
        )
    for need in wanting:
        assigned[need.worker], free = tuple(free[: need.count]), free[need.count :]
    return {need.worker: assigned[need.worker] for need in needs}
