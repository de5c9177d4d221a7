"""Which turn of which session a request is: by the name that its client gives, or else by lineage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from poolgrid.consolidator.core.session_table import IDLE_MAX_MS
from poolgrid.inference import InferenceRequest
from poolgrid.router.core.lineage import Known, anchor_of, digest_of
from poolgrid.router.core.projection import Projection
from poolgrid.wire.card import WorkerCard
from poolgrid.wire.hashing import TOKEN_BYTES, stable_u64
from poolgrid.wire.requests import FinishReason
from poolgrid.wire.sessions import SessionTurn, TurnAnswer, TurnEnding, tenant_key

COMPLETE: Final = (FinishReason.STOP, FinishReason.LENGTH)
"""How an answer ends that a later prompt repeats."""

AFTER_TOOL: Final = tuple(TurnEnding).index(TurnEnding.TOOL)

RETURN_MAX_MS: Final = 60_000
"""Blocks are kept no longer than a session keeps its place in the working set."""

SHORT_TOKENS: Final = 64
"""Prompts up to this length begin no session by themselves: computing so many takes 1 ms of a step of 17 (Dynamo's
published times), so there is no KV to wait for, to keep or to return to."""


class SessionNaming:
    """Names the turns of one router's requests, and notes their ends at once: the pool's journal is slower."""

    def __init__(self, projection: Projection, wall_ms: Callable[[], int]) -> None:
        self._sessions = projection.sessions
        self._lineage = projection.lineage
        self._wall_ms = wall_ms

    def turn_of(self, request: InferenceRequest, path: Sequence[int], block_size: int) -> SessionTurn | None:
        """Return the turn that a request would be, dispatched now; ``None`` for a short prompt without a name."""
        hint = request.session
        if not hint.name and not hint.keep_ms and len(request.token_ids) <= TOKEN_BYTES * SHORT_TOKENS:
            return None
        tenant = tenant_key(request.tenant) if request.tenant else 0
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
        turn = SessionTurn(name, tenant, parent, hint.after_tool, tail, anchor, residual, return_ms)
        return self._keeping(turn, request) if request.kept_tokens_max and request.retention is None else turn

    def follows(self, request: InferenceRequest) -> Known | None:
        """Return the turn that a request's session has dispatched last, where lineage has found that session."""
        turn = request.turn
        return None if turn is None else self._lineage.latest(turn.tenant, turn.session)

    def _keeping(self, turn: SessionTurn, request: InferenceRequest) -> SessionTurn:
        """Return a turn with what its client has kept, as far as the tenant's budget has room next to others.

        Engines always compute the last token of a prompt. Turns whose start is not in the pool's journal yet are not
        counted: those that come at once may exceed the budget.
        """
        others = self._sessions.kept.others(turn.tenant, turn.session, self._wall_ms())
        tokens = min(len(request.token_ids) // TOKEN_BYTES - 1, request.kept_tokens_max - others)
        if tokens <= 0:
            return turn
        # Longer than the table knows a session that does nothing, its tokens would not count any more.
        return msgspec.structs.replace(turn, keep_ms=min(request.session.keep_ms, IDLE_MAX_MS), keep_tokens=tokens)

    @staticmethod
    def placed(request: InferenceRequest, card: WorkerCard) -> None:
        """Keep nothing of a turn on a worker whose engine cannot: its client is told what was kept."""
        turn = request.turn
        if turn is not None and turn.keep_tokens and not card.takes_retention:
            request.turn = msgspec.structs.replace(turn, keep_ms=0, keep_tokens=0)

    def is_later(self, turn: SessionTurn | None) -> bool | None:
        """Return whether a turn continues another of its session, or of its parent; ``None`` = no turn is known."""
        return None if turn is None else bool(turn.parent) or (turn.tenant, turn.session) in self._sessions

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
