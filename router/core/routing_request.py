"""What a policy may know of a request."""

from __future__ import annotations

import msgspec

from poolgrid.wire.identifiers import Stage
from poolgrid.wire.request_ids import name_of


class RoutingRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a policy may know of a request; the decision journal stores it as it is, by the names of the fields."""

    request_id: str
    model: str
    isl: int
    """Prompt tokens."""
    block_size: int
    blocks: int
    """Blocks of the prompt, a partial last one included."""
    priority: int = 0
    stage: Stage = Stage.WHOLE
    """What the chosen worker will be asked to do."""
    media: tuple[int, ...] = ()
    """u64 hashes of its media, in order."""
    media_kinds: tuple[str, ...] = ()
    """Kinds of media that the worker must take."""
    ttft_target_ms: float = 0.0
    """The client's target for its first token; 0 = none."""

    @property
    def drawn_by(self) -> str:
        """Return what samples are drawn by: the name that the client chose, the same in every process and run."""
        return name_of(self.request_id)

    @property
    def tie_key(self) -> str:
        """Return what ties are broken by: the name, or the media, so that equal media meet among equal workers."""
        return " ".join(map(str, self.media)) if self.media else name_of(self.request_id)
