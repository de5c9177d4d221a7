"""A request's place in an admission queue (``poolgrid.serving.admission.admission_queue``)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class QueueOrder(Enum):
    """Whose turn it is among the requests of one tenant and priority."""

    ARRIVAL = "arrival"
    SHORTEST_UNCACHED_WORK_FIRST = "shortest-uncached-work-first"


@dataclass(slots=True, eq=False)
class QueuedRequest(Generic[T]):
    """A place in the queue."""

    item: T
    lane: str
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    prompt_tokens: int = 0
    uncached_tokens: int = 0
    """Prompt tokens that the best worker would have to compute, when the request arrived."""
    entered_ms: float = 0.0
    resumed: bool = False
    arrival: int = -1
    """Number in the order of arrival, given by the queue."""
    waits: bool = False
    """Whether it holds a place; kept by the queue."""
