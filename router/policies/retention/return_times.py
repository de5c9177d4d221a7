"""How soon blocks come again, by kind, and which are worth keeping for how long in the room that there is.

Theory of operation. For each kind there is a decayed count of visits, and of returns by the time since the visit. From
these follow, for keeping a granule for a time ``D`` unless it returns before, the chance ``H(D)`` of a hit and the
mean time ``S(D)`` in which it takes room. With a price ``p`` on a granule's second, a kind is kept for the ``D`` that
makes ``H(D) - p S(D)`` largest, or not at all where that is never above 0. The price is the lowest at which what is
kept fits: the one number that all kinds have in common, found by halving.

Where one more step of the price would keep more than fits, a share of the prompts is kept by the lower price. Which
prompts is drawn from their hashes: a random part that stays for long enough is worth more than all of it for too short.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

STEP = math.sqrt(2.0)
BINS = 26
SHORTEST_MS = 1_000.0
EDGES_MS = tuple(SHORTEST_MS * STEP**number for number in range(BINS))
"""Ends of the bins of return times: from a second to an hour and a half in half octaves."""

MEMORY_MS = 1_800_000.0
"""After half an hour a count is worth 1/e: longer than nearly all return times, and short enough to follow a day."""

DOUBT_VISITS = 100.0
"""A kind of which fewer stretches have been seen is taken for the mean of its group by half or more. Stretches, as the
granules of one come again together: those of a long prompt are one thing that is known, not hundreds."""

_LOG_STEP = math.log(STEP)
_EDGES_S = np.asarray(EDGES_MS) / 1000.0
_MIDDLES_S = np.concatenate(([_EDGES_S[0] / 2], (_EDGES_S[:-1] + _EDGES_S[1:]) / 2))


def bin_of(gap_ms: float) -> int:
    """Return the bin of a return time."""
    if gap_ms <= SHORTEST_MS:
        return 0
    return min(BINS - 1, math.ceil(math.log(gap_ms / SHORTEST_MS) / _LOG_STEP - 1e-9))


class Keep(msgspec.Struct, frozen=True, gc=False):
    """What becomes of one kind."""

    worth: float
    """Hits for each second of a granule's room, as a multiple of the price: at least 1."""
    duration_ms: int
    returns: float
    """Chance that it comes again within ``duration_ms``."""


class RetentionPlan(msgspec.Struct, frozen=True, gc=False):
    """Which kinds to keep; those that are not named are not."""

    keep: dict[int, Keep]
    more: dict[int, Keep]
    """What ``share`` of the prompts is kept by: a little more than fits."""
    share: float
    price: float
    """Hits for each second of a granule's room that the dearest kept granule brings."""

    def of(self, draw: float) -> dict[int, Keep]:
        """Return what a prompt is kept by that has drawn a number from 0 to 1."""
        return self.more if draw < self.share else self.keep


NOTHING = RetentionPlan({}, {}, 0.0, 0.0)


class ReturnTimes:
    """Visits and return times by kind; kinds are small integers, and of a group where they are alike."""

    def __init__(self, kinds: int, kinds_per_group: int) -> None:
        self._kinds_per_group = kinds_per_group
        """Kinds that are taken for their mean while little is known of them."""
        self.visits = [0.0] * kinds
        self.noted = 0.0
        """Stretches that these visits were of, of all kinds."""
        self.returned: dict[int, list[float]] = {}
        """By kind, of those that returned at all."""
        self.weight_ms = 0.0
        """The time that the counts stand for."""
        self.as_of_ms: float | None = None

    def note_visit(self, kind: int, granules: int) -> None:
        """Count a stretch of granules that came."""
        self.visits[kind] += granules
        self.noted += 1.0

    def note_return(self, kind: int, gap_ms: float, granules: int) -> None:
        """Count granules that came again, ``gap_ms`` after a visit as this kind."""
        counts = self.returned.get(kind)
        if counts is None:
            counts = self.returned[kind] = [0.0] * BINS
        counts[bin_of(gap_ms)] += granules

    @property
    def per_s(self) -> float:
        """Return how many granules come in a second."""
        return sum(self.visits) * 1000.0 / self.weight_ms if self.weight_ms else 0.0

    def age(self, now_ms: float) -> None:
        """Let counts decay up to a time."""
        if self.as_of_ms is None:
            self.as_of_ms = now_ms
        passed_ms = now_ms - self.as_of_ms
        if passed_ms <= 0.0:
            return
        self.as_of_ms = now_ms
        factor = math.exp(-passed_ms / MEMORY_MS)
        self.weight_ms = self.weight_ms * factor + MEMORY_MS * (1.0 - factor)
        self.noted *= factor
        self.visits = [visits * factor for visits in self.visits]
        self.returned = {kind: [count * factor for count in counts] for kind, counts in self.returned.items()}

    def plan(self, room_granules: float) -> RetentionPlan:
        """Return which kinds to keep in so much room."""
        kinds = [kind for kind, visits in enumerate(self.visits) if visits > LEAST_GRANULES]
        if not kinds or self.weight_ms <= 0.0:
            return NOTHING
        visits = np.asarray([self.visits[kind] for kind in kinds])
        never = [0.0] * BINS
        returned = np.asarray([self.returned.get(kind, never) for kind in kinds])
        groups = np.asarray(kinds) // self._kinds_per_group
        usual = np.zeros_like(returned)
        for group in np.unique(groups):
            alike = groups == group
            usual[alike] = returned[alike].sum(0) / visits[alike].sum()
        doubt = DOUBT_VISITS * float(visits.sum()) / max(1.0, self.noted)
        chances = (returned + doubt * usual) / (visits + doubt)[:, None]
        hits = np.minimum(np.cumsum(chances, 1), 1.0)
        room_s = np.cumsum(chances * _MIDDLES_S, 1) + (1.0 - hits) * _EDGES_S
        per_s = visits * (1000.0 / self.weight_ms)
        rows = np.arange(len(kinds))

        def wanted(price: float) -> tuple[np.ndarray, np.ndarray, float]:
            worth = hits - price * room_s
            best = worth.argmax(1)
            kept = worth[rows, best] > 0.0
            return best, kept, float((per_s * room_s[rows, best] * kept).sum())

        low, high = LOWEST_PRICE, 1.0
        if wanted(low)[2] <= room_granules:
            high = low
        else:
            for _ in range(PRICE_HALVINGS):
                middle = math.sqrt(low * high)
                if wanted(middle)[2] <= room_granules:
                    high = middle
                else:
                    low = middle
        tables, sums = [], []
        for price in (high, low):
            best, kept, demand = wanted(price)
            sums.append(demand)
            tables.append(
                {
                    kind: Keep(
                        float(hits[row, best[row]] / room_s[row, best[row]] / price),
                        int(EDGES_MS[best[row]]),
                        float(hits[row, best[row]]),
                    )
                    for row, kind in enumerate(kinds)
                    if kept[row]
                }
            )
        keep, more = sums
        share = 0.0 if more <= keep else min(1.0, max(0.0, (room_granules - keep) / (more - keep)))
        return RetentionPlan(tables[0], tables[1], share, high)


LEAST_GRANULES = 0.01
"""A kind of which less is left has been forgotten."""

LOWEST_PRICE = 1e-7
"""One hit in four months of a granule: nothing is cheaper, whatever the room."""

PRICE_HALVINGS = 40
"""From the lowest price to 1 that is a ratio of 1.00002: far below what the counts can tell."""
