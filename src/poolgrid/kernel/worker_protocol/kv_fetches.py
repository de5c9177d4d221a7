"""Requests of the decode stage and their prefill workers: which to ask, when again, when to give up.

Rules:

1. A fetch begins with a question (``Ask``). The first answer that knows the transfer is handed on (``Offered``).
2. From then on the question is repeated ``ASKS_PER_KEPT_TIME`` times within the time that the source keeps the blocks
   unasked, until the fetch ends: a request may wait long for its turn, and its blocks must not expire meanwhile.
3. A question without an answer within the time-out, or an answer that the transfer is not known, fails the fetch
   (``Failed``): its request can run elsewhere, and nothing waits for a source that is gone.
4. Every end of a fetch is reported to the source, once (``ReleaseSource``).

Pure: time comes in as an argument, effects go out as values.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from poolgrid.kernel.wire.requests import KvOffered
from poolgrid.kernel.worker_protocol.refusal import BusyError, RefusedError

ASKS_PER_KEPT_TIME = 4
"""Two questions may be lost before blocks expire."""

ASK_INTERVAL_MIN_MS = 20.0
"""However short the source keeps blocks, it is not asked more often than this."""


@dataclass(frozen=True, slots=True)
class KvWanted:
    """Where the KV of a decode request is."""

    endpoint: str
    """Request plane of the prefill worker."""
    transfer_id: str
    kept_ms: float
    """The prefill worker keeps it this long after it was last asked."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Send ``FetchKv``."""

    endpoint: str
    transfer_id: str


@dataclass(frozen=True, slots=True)
class ReleaseSource:
    """Send ``ReleaseKv``; one for each fetch, when it ends."""

    endpoint: str
    transfer_id: str


@dataclass(frozen=True, slots=True)
class Offered:
    """The request can go to the engine."""

    request_id: str
    offer: KvOffered


@dataclass(frozen=True, slots=True)
class Failed:
    """The request cannot have its KV; another pair of workers may serve it."""

    request_id: str
    cause: str
    """``unknown`` or ``timeout``."""
    reason: str


Effect = Ask | ReleaseSource | Offered | Failed


@dataclass(slots=True)
class _Fetch:
    request_id: str
    wanted: KvWanted
    due_ms: float
    """When to give up while ``asked``, else when to ask again."""
    asked: bool = True
    offered: bool = False


class KvFetches:
    """The fetches of one worker; ``fetches_max`` of them at a time, one more is refused as busy."""

    def __init__(self, timeout_ms: float, fetches_max: int) -> None:
        self._timeout_ms = timeout_ms
        self._fetches_max = fetches_max
        self._by_request: dict[str, _Fetch] = {}
        self._by_transfer: dict[tuple[str, str], _Fetch] = {}
        self._dues: list[tuple[float, int, _Fetch]] = []  # a heap; entries that no longer hold are skipped
        self._set = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def begin(self, request_id: str, wanted: KvWanted, now_ms: float) -> list[Effect]:
        """Begin a fetch, or raise ``RefusedError`` and change nothing."""
        key = (wanted.endpoint, wanted.transfer_id)
        other = self._by_transfer.get(key)
        if other is not None:
            raise RefusedError(
                f"transfer {wanted.transfer_id!r} is already being fetched, for request {other.request_id!r}"
            )
        if len(self._by_request) >= self._fetches_max:
            raise BusyError(
                f"{len(self._by_request)} requests have their KV fetched, allowed are at most {self._fetches_max}"
            )
        fetch = _Fetch(request_id, wanted, 0.0)
        self._by_request[request_id] = self._by_transfer[key] = fetch
        self._set_due(fetch, now_ms + self._timeout_ms)
        return [Ask(wanted.endpoint, wanted.transfer_id)]

    def receive(self, endpoint: str, offer: KvOffered, now_ms: float) -> list[Effect]:
        """Take an answer; one for a fetch that has ended is ignored."""
        fetch = self._by_transfer.get((endpoint, offer.transfer_id))
        if fetch is None:
            return []
        if not offer.known:
            self._forget(fetch)
            reason = f"the prefill worker at {endpoint} no longer keeps the KV of transfer {offer.transfer_id!r}"
            return [ReleaseSource(endpoint, offer.transfer_id), Failed(fetch.request_id, "unknown", reason)]
        fetch.asked = False
        self._set_due(fetch, now_ms + max(ASK_INTERVAL_MIN_MS, fetch.wanted.kept_ms / ASKS_PER_KEPT_TIME))
        if fetch.offered:
            return []
        fetch.offered = True
        return [Offered(fetch.request_id, offer)]

    def tick(self, now_ms: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._dues and self._dues[0][0] <= now_ms:
            due_ms, _, fetch = heappop(self._dues)
            if fetch.due_ms != due_ms:
                continue
            wanted = fetch.wanted
            if fetch.asked:
                self._forget(fetch)
                reason = (
                    f"the prefill worker at {wanted.endpoint} did not answer for transfer {wanted.transfer_id!r} "
                    f"within {self._timeout_ms:.0f} ms"
                )
                effects.append(ReleaseSource(wanted.endpoint, wanted.transfer_id))
                effects.append(Failed(fetch.request_id, "timeout", reason))
            else:
                fetch.asked = True
                self._set_due(fetch, now_ms + self._timeout_ms)
                effects.append(Ask(wanted.endpoint, wanted.transfer_id))
        return effects

    def end(self, request_id: str) -> list[Effect]:
        """End a request's fetch, if there is one: its KV is here, or it is not needed."""
        fetch = self._by_request.get(request_id)
        if fetch is None:
            return []
        self._forget(fetch)
        return [ReleaseSource(fetch.wanted.endpoint, fetch.wanted.transfer_id)]

    def next_moment_ms(self) -> float | None:
        """Return when ``tick`` has something to do; ``None`` while there are no fetches."""
        while self._dues:
            due_ms, _, fetch = self._dues[0]
            if fetch.due_ms == due_ms:
                return due_ms
            heappop(self._dues)
        return None

    def _set_due(self, fetch: _Fetch, due_ms: float) -> None:
        fetch.due_ms = due_ms
        # The running number keeps the heap from ever comparing two fetches.
        self._set += 1
        heappush(self._dues, (due_ms, self._set, fetch))
        if len(self._dues) > 4 * len(self._by_request) + 64:
            self._dues = [entry for entry in self._dues if entry[2].due_ms == entry[0]]
            heapify(self._dues)

    def _forget(self, fetch: _Fetch) -> None:
        fetch.due_ms = -1.0
        del self._by_request[fetch.request_id]
        del self._by_transfer[(fetch.wanted.endpoint, fetch.wanted.transfer_id)]


@dataclass(frozen=True, slots=True)
class KvArrival:
    """The KV of one decode request is here."""

    request_id: str
    moved_blocks: int
    present_blocks: int
    """Blocks of the prompt that were here already."""
    moved_bytes: int
    duration_ms: float
