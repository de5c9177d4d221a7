"""All attacks, by part."""

from __future__ import annotations

from lab.attacks import (
    connections,
    engine,
    frames,
    guides,
    media,
    members,
    names,
    nats,
    pauses,
    picker,
    slow_disk,
    tasks,
    timing,
    up,
)
from lab.attacks.attack import Part

PARTS: dict[str, Part] = {
    module.PART.name: module.PART
    for module in (
        connections,
        guides,
        media,
        tasks,
        frames,
        members,
        engine,
        timing,
        slow_disk,
        pauses,
        up,
        picker,
        nats,
        names,
    )
}
