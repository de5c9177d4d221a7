"""Ids of tool calls: the same in every process, different for each call of a request, as the model's template has them.

Clients send ids back with the results, and templates print them: Mistral's accept nine letters and digits only, Kimi's
model is trained on ``functions.NAME:N`` with N counted over the whole conversation.
"""

from __future__ import annotations

import msgspec

from poolgrid.wire.hashing import stable_u64

MISTRAL_ID_CHARS = 9
"""Length of the call ids that Mistral's templates accept, letters and digits only."""

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class CallIds(msgspec.Struct, frozen=True):
    """The ids of one answer's calls."""

    request_id: str
    format: str = ""
    """Name of the format of tool calls (``OutputFormat.tools``)."""
    earlier_calls: int = 0
    """Calls in the conversation before this answer."""

    def of(self, choice: int, call: int, name: str) -> str:
        """Return the id of the call of a function, by its number in a choice."""
        if self.format == "kimi_k2":
            return f"functions.{name}:{self.earlier_calls + call}"
        seed = f"{self.request_id}/{choice}/{call}"
        return _short(seed) if self.format == "mistral" else f"call_{stable_u64(seed):016x}"


def mistral_id(call_id: str) -> str:
    """Return a call's id as Mistral's templates accept it: as it is, or another one that is always the same."""
    fits = len(call_id) == MISTRAL_ID_CHARS and call_id.isascii() and call_id.isalnum()
    return call_id if fits else _short(call_id)


def _short(seed: str) -> str:
    number = stable_u64(seed)
    characters = []
    for _ in range(MISTRAL_ID_CHARS):
        number, digit = divmod(number, len(_DIGITS))
        characters.append(_DIGITS[digit])
    return "".join(characters)
