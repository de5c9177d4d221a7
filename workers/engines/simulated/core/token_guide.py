"""What one guided output must keep to, as far as the choice of its tokens needs to know."""

from __future__ import annotations

from typing import Protocol


class GuideBroken(Exception):
    """No token can be chosen any more."""


class TokenGuide(Protocol):
    """What one output must keep to, and how far it is. Pure: the same tokens lead to the same state."""

    def allowed(self) -> bytes | None:
        """Return which tokens may come next: bit i of the whole, lowest bit of a byte first, is token id i.

        The end-of-sequence token is among them where the output may end. ``None``: the guide has become too much.
        """
        ...

    def after(self, token_id: int) -> bytes | None:
        """Return what would be allowed after an allowed token; nothing changes."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on after a token; return False, and be of no further use, when it was not allowed."""
        ...

    def why(self) -> str:
        """Return why ``allowed`` or ``accept`` failed."""
        ...
