"""What a prefill leg's server says of the KV that it keeps, carried to the decode leg without being looked at. Pure."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from poolgrid.wire.limits import OPAQUE_BYTES_MAX
from poolgrid.wire.requests import FinishReason, Generate, RefusalKind
from poolgrid.workers.core.refusal import BrokenError, RefusedError
from poolgrid.workers.engines.server.core.calls import AnswerPiece, Failure

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


def left_for(request: Generate, title: str, form: type[T]) -> T:
    """Return what the prefill leg left for a decode leg; raises ``RefusedError`` without it, ``BrokenError``."""
    if request.disaggregated_params is None:
        raise RefusedError("a decode leg comes without disaggregated_params: nothing says where its KV is")
    try:
        return msgspec.json.decode(request.disaggregated_params, type=form)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BrokenError(f"the KV of the prefill leg is not {title}'s: {error}") from None


def leave(piece: AnswerPiece, params: dict[str, Any] | None, title: str, field: str, needs: str) -> None:
    """End a prefill leg with ``params``, which the server gave as ``field``; without any it ``needs`` an option."""
    if params is None:
        piece.failure = Failure(f"{title} kept no KV for a decode leg: its server needs {needs}", RefusalKind.CANNOT_DO)
        return
    left = _encode(params)
    if len(left) > OPAQUE_BYTES_MAX:
        piece.failure = Failure(f"{field} have {len(left)} bytes, allowed are {OPAQUE_BYTES_MAX}", RefusalKind.BROKEN)
        return
    piece.finish, piece.params = FinishReason.PREFILLED, left
    piece.tokens, piece.logprobs = [], None
