"""What a policy may know of a request."""

from __future__ import annotations

from typing import Any, Final, final

from poolgrid.wire.identifiers import Stage
from poolgrid.wire.request_ids import name_of
from poolgrid.wire.value import Value

_WHOLE: Final = Stage.WHOLE


@final
class RoutingRequest(Value):
    """What a policy may know of a request; a value, which nobody changes."""

    __slots__ = (
        "block_size",
        "blocks",
        "isl",
        "media",
        "media_kinds",
        "model",
        "priority",
        "request_id",
        "seed",
        "stage",
        "ttft_target_ms",
    )

    def __init__(
        self,
        request_id: str,
        model: str,
        isl: int,
        block_size: int,
        blocks: int,
        priority: int = 0,
        stage: Stage = _WHOLE,
        media: tuple[int, ...] = (),
        media_kinds: tuple[str, ...] = (),
        seed: int = 0,
        ttft_target_ms: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.isl = isl
        """Prompt tokens."""
        self.block_size = block_size
        self.blocks = blocks
        """Blocks of the prompt, a partial last one included."""
        self.priority = priority
        self.stage = stage
        """What the chosen worker will be asked to do."""
        self.media = media
        """u64 hashes of its media, in order."""
        self.media_kinds = media_kinds
        """Kinds of media that the worker must take."""
        self.seed = seed
        """Of its blocks' hashes (``poolgrid.wire.hashing.hash_seed``), where how long they stay is learnt; else 0."""
        self.ttft_target_ms = ttft_target_ms
        """Within how long the client wants its first token; 0 = it did not say."""

    @property
    def drawn_by(self) -> str:
        """Return what samples are drawn by: the name that the client chose, the same in every process and run."""
        return name_of(self.request_id)

    @property
    def tie_key(self) -> str:
        """Return what ties are broken by: the name, or the media, so that equal media meet among equal workers."""
        return " ".join(map(str, self.media)) if self.media else name_of(self.request_id)

    def parts(self) -> tuple[Any, ...]:
        """Return all of it, in the order in which it is given."""
        return (
            self.request_id,
            self.model,
            self.isl,
            self.block_size,
            self.blocks,
            self.priority,
            self.stage,
            self.media,
            self.media_kinds,
            self.seed,
            self.ttft_target_ms,
        )
