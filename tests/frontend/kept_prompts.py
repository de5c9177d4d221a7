"""A worker that keeps some of each prompt that asks for it."""

from __future__ import annotations

from poolgrid.kernel.requests.inference import InferenceRequest
from poolgrid.kernel.wire.sessions import SessionTurn
from tests.frontend.fake_backend import Step, speak

KEPT_TOKENS, CACHED_TOKENS = 9, 2


def kept(request: InferenceRequest) -> list[Step]:
    """Play a worker that keeps some of each prompt that asks for it."""
    if request.session.keep_ms:
        request.turn = SessionTurn("s", keep_ms=request.session.keep_ms, keep_tokens=KEPT_TOKENS)
    return speak("Hello", cached_tokens=CACHED_TOKENS)
