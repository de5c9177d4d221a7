"""What a worker's engine cannot do, as its card declares it, and whether a request asks for it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from msgspec import Meta

from poolgrid.wire.identifiers import Identifier, Text
from poolgrid.wire.requests import Sampling

GUIDED_DECODING = "guided_decoding"
"""Stands for every kind of guide; the other names are fields of ``Sampling``."""

NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
"""Values that ask for nothing."""

Inability = tuple[Identifier, Text]
"""A field of a request, and the end of a sentence that begins with the field and its value."""

Inabilities = Annotated[tuple[Inability, ...], Meta(max_length=32)]


def is_greedy(sampling: Sampling) -> bool:
    """Return whether nothing is drawn, so that a seed makes no difference."""
    return sampling.temperature == 0 or sampling.top_p == 0 or sampling.top_k == 1


def unmet(sampling: Sampling, inabilities: Iterable[Inability]) -> tuple[str, str] | None:
    """Return the first field of a request that cannot be honoured, with the sentence for its client."""
    for name, why in inabilities:
        if name == GUIDED_DECODING:
            if sampling.guide:
                return sampling.guide, f"{sampling.guide} is set, {why}"
            continue
        value = getattr(sampling, name, None)
        if value is None or value == NEUTRAL.get(name) or (name == "seed" and is_greedy(sampling)):
            continue
        return name, f"{name} is {value}, {why}"
    return None


def common(cards: Iterable[Sequence[Inability]]) -> tuple[Inability, ...]:
    """Return what none of several workers can do, in the words of the first."""
    first, *others = cards
    return tuple(each for each in first if all(any(each[0] == name for name, _ in other) for other in others))
