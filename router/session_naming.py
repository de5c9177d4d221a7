"""Which turn of which session a request is: by the name that its client gives, or else by lineage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from poolgrid.inference.inference_request import InferenceRequest
from poolgrid.router.core.lineage import anchor_of, digest_of
from poolgrid.router.core.projection import Projection
from poolgrid.wire.hashing import TOKEN_BYTES, stable_u64
from poolgrid.wire.requests import FinishReason
from poolgrid.wire.sessions import SessionTurn, TurnAnswer, TurnEnding, tenant_key

COMPLETE: Final = (FinishReason.STOP, FinishReason.LENGTH)
"""How an answer ends that a later prompt repeats."""

AFTER_TOOL: Final = tuple(TurnEnding).index(TurnEnding.TOOL)

RETURN_MAX_MS: Final = 60_000
"""Blocks are kept no longer than a session keeps its place in the working set."""


class SessionNaming:
    """Names the turns of one router's requests, and notes their ends at once: the pool's journal is slower."""

    def __init__(self, projection: Projection) -> None:
        self._sessions = projection.sessions
        self._lineage = projection.lineage

    def turn_of(self, request: InferenceRequest, path: Sequence[int], block_size: int) -> SessionTurn:
        """Return the turn that a request would be, dispatched now."""
        hint, tenant = request.session, tenant_key(request.tenant) if request.tenant else 0
        name, parent, anchor, residual, return_ms = hint.name, hint.parent, 0, 0, 0
        if not name and path:
            token_ids = request.token_ids
            name, parent = self._lineage.find(tenant, path, token_ids, block_size, hint.answer)
            anchor = anchor_of(path)
            residual = digest_of(token_ids, len(path) * block_size, len(token_ids) // TOKEN_BYTES)
        if not name:
            # As no client can choose one, of which it would have to know the hash's seed.
            name = f"l{stable_u64(request.request_id, 1):016x}"
        elif hint.after_tool and (session := self._sessions.get(tenant, name)) is not None:
            # In a loop of tool calls a turn most likely ends in one.
            gap = session.gaps[AFTER_TOOL] if session.gaps[AFTER_TOOL].count else self._sessions.gaps[AFTER_TOOL]
            return_ms = gap.limit_ms if gap.limit_ms <= RETURN_MAX_MS else 0
        tail = path[-1] if path else 0
        return SessionTurn(name, tenant, parent, hint.after_tool, tail, anchor, residual, return_ms)

    def is_later(self, turn: SessionTurn | None) -> bool:
        """Return whether a turn continues an earlier one, of its session or of the one that it forked from."""
        return turn is not None and (bool(turn.parent) or self._sessions.get(turn.tenant, turn.session) is not None)

    def dispatched(self, request: InferenceRequest) -> None:
        """Note that a turn is on a worker: what its session's next prompts continue from now on."""
        if request.turn is not None:
            self._lineage.begin(request.request_id, request.turn, len(request.token_ids) // TOKEN_BYTES)

    def ended(
        self, request: InferenceRequest, path: Sequence[int], block_size: int, output: bytes | bytearray, reason: str
    ) -> TurnAnswer | None:
        """Note the end of a turn; return what the pool's journal is to have of it."""
        turn = request.turn
        if turn is None or not turn.anchor:
            return None
        if reason not in COMPLETE:
            self._lineage.withdraw(request.request_id)
            return None
        begin = len(path) * block_size
        total = (len(request.token_ids) + len(output)) // TOKEN_BYTES
        digest = digest_of(request.token_ids[TOKEN_BYTES * begin :] + output, 0, total - begin)
        self._lineage.end(request.request_id, total, digest)
        return TurnAnswer(request.request_id, turn.tenant, turn.session, total, digest)
