"""Which turn of which session a request is: by the name that its client gives, or else by lineage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from poolgrid.kernel.consolidation.session_table import IDLE_MAX_MS
from poolgrid.kernel.projection.echoes import echoes_of
from poolgrid.kernel.projection.lineage import Known, anchor_of, digest_of, stem_of
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.requests.inference import InferenceRequest
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.hashing import TOKEN_BYTES, stable_u64
from poolgrid.kernel.wire.requests import FinishReason
from poolgrid.kernel.wire.sessions import SessionTurn, TurnAnswer, TurnEnding, TurnPlace, tenant_key

COMPLETE: Final = (FinishReason.STOP, FinishReason.LENGTH)
"""How an answer ends that a later prompt repeats."""

AFTER_TOOL: Final = tuple(TurnEnding).index(TurnEnding.TOOL)

RETURN_MAX_MS: Final = 60_000
"""Blocks are kept no longer than a session keeps its place in the working set."""

UNREPORTED_MS: Final = 10_000
"""After this time a turn has begun, or was refused."""

UNREPORTED_MAX: Final = 1024
"""Turns that are to be kept and have not begun; of more nothing is kept."""

SHORT_TOKENS: Final = 64
"""Prompts up to this length begin no session by themselves: computing so many takes 1 ms of a step of 17 (Dynamo's
published times), so there is no KV to wait for, to keep or to return to."""


class SessionNaming:
    """Names the turns of one router's requests, and notes their ends at once: the pool's journal is slower."""

    def __init__(self, projection: Projection, wall_ms: Callable[[], int]) -> None:
        self._sessions = projection.sessions
        self._lineage = projection.lineage
        self._wall_ms = wall_ms
        self._unreported: dict[str, tuple[int, str, int, int]] = {}
        """What is to be kept of turns whose start is not in the journal yet: tenant, session, tokens, since when."""

    def turn_of(self, request: InferenceRequest, path: Sequence[int], block_size: int) -> SessionTurn | None:
        """Return the turn that a request would be, dispatched now; ``None`` for a short prompt without a name."""
        hint = request.session
        if not hint.name and not hint.keep_ms and len(request.token_ids) <= TOKEN_BYTES * SHORT_TOKENS:
            return None
        tenant = tenant_key(request.tenant) if request.tenant else 0
        name, parent, sibling, anchor, residual, stem, return_ms = hint.name, hint.parent, "", 0, 0, 0, 0
        if not name and path:
            token_ids = request.token_ids
            name, parent, sibling = self._lineage.find(tenant, path, token_ids, block_size, hint.answer)
            anchor, begin = anchor_of(path), len(path) * block_size
            stem = stem_of(token_ids, begin, len(token_ids) // TOKEN_BYTES)
            residual = digest_of(token_ids, begin, len(token_ids) // TOKEN_BYTES)
        if not name:
            # As no client can choose one, of which it would have to know the hash's seed.
            name = f"l{stable_u64(request.request_id, 1):016x}"
        elif hint.after_tool and (session := self._sessions.get(tenant, name)) is not None:
            # In a loop of tool calls a turn most likely ends in one.
            gap = session.gaps[AFTER_TOOL] if session.gaps[AFTER_TOOL].count else self._sessions.gaps[AFTER_TOOL]
            return_ms = gap.limit_ms if gap.limit_ms <= RETURN_MAX_MS else 0
        tail = path[-1] if path else 0
        turn = SessionTurn(
            name, tenant, parent, hint.after_tool, tail, anchor, residual, return_ms, sibling=sibling, stem=stem
        )
        return self._keeping(turn, request, path) if request.kept_tokens_max and request.retention is None else turn

    def follows(self, request: InferenceRequest) -> Known | None:
        """Return the turn that a request's session has dispatched last, where lineage has found that session."""
        turn = request.turn
        return None if turn is None else self._lineage.latest(turn.tenant, turn.session)

    def _keeping(self, turn: SessionTurn, request: InferenceRequest, path: Sequence[int]) -> SessionTurn:
        """Return a turn with what its client has kept, as far as the tenant's budget has room next to the rest.

        Engines always compute the last token of a prompt, and keep whole blocks. What this router has named and the
        pool's journal does not report yet counts as well; what other routers name at the same time does not.
        """
        if not request.session.keep_ms or not path:
            return turn
        now_ms, kept, unreported = self._wall_ms(), self._sessions.kept, self._unreported
        for request_id, (tenant, session, _, since_ms) in list(unreported.items()):
            if since_ms + UNREPORTED_MS <= now_ms or self._is_reported(tenant, session, request_id):
                del unreported[request_id]
        unreported.pop(request.request_id, None)
        total = kept.tokens(turn.tenant, now_ms)
        total += sum(tokens for tenant, _, tokens, _ in unreported.values() if tenant == turn.tenant)
        earlier = kept.begins(turn.tenant, path)
        room = request.kept_tokens_max - total + (0 if earlier is None else earlier.tokens)
        tokens = min(len(request.token_ids) // TOKEN_BYTES - 1, room)
        if tokens <= 0 or len(unreported) >= UNREPORTED_MAX:
            return turn
        unreported[request.request_id] = (turn.tenant, turn.session, tokens, now_ms)
        keep_ms = min(request.session.keep_ms, IDLE_MAX_MS)
        repeats = 0 if earlier is None else earlier.tail
        return msgspec.structs.replace(turn, keep_ms=keep_ms, keep_tokens=tokens, repeats=repeats)

    def _is_reported(self, tenant: int, session: str, request_id: str) -> bool:
        """Return whether the journal has a turn: it runs, or is the last of its session."""
        if request_id in self._sessions.turns:
            return True
        known = self._sessions.get(tenant, session)
        return known is not None and known.request_id == request_id

    @staticmethod
    def placed(request: InferenceRequest, card: WorkerCard, place: TurnPlace | None) -> None:
        """Note the place of a turn, and keep nothing of one on a worker whose engine cannot: its client is told what
        was kept."""
        turn = request.turn
        if turn is None:
            return
        if place is not None and turn.keep_tokens and not card.takes_retention:
            request.turn = msgspec.structs.replace(turn, keep_ms=0, keep_tokens=0, repeats=0, place=place)
        elif turn.place is not place:
            request.turn = msgspec.structs.replace(turn, place=place)

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
        echoes = echoes_of(bytes(output), request.token_ids, path)
        self._lineage.end(request.request_id, total, digest, echoes)
        return TurnAnswer(request.request_id, turn.tenant, turn.session, total, digest, echoes)
