"""What a logits processor is, whatever the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class LogitsRow(Protocol):
    """One row of logits as an engine has it (a torch tensor of one dimension): read and changed in place by index."""

    def __getitem__(self, index: Any, /) -> Any:
        """Return some of the logits."""
        ...

    def __setitem__(self, index: Any, value: Any, /) -> None:
        """Change some of the logits."""
        ...


class LogitsProcessor(Protocol):
    """Changes the logits of one request before each of its tokens is chosen.

    Made anew for each request, so it may keep state. It must be picklable: an engine may run in another process.
    """

    def __call__(self, token_ids: Sequence[int], logits: LogitsRow, /) -> None:
        """Change ``logits`` (one value per token id) in place; ``token_ids`` is the prompt and the output so far.

        May raise: the logits then stay as they were for this token, and the failure is counted.
        """
        ...


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a processor is told about its request when it is made."""

    isl: int
    """Prompt tokens."""
    vocabulary_size: int
    """Token ids are below this; 0 = not known."""


LogitsProcessorFactory = Callable[[Mapping[str, Any], RequestFacts], LogitsProcessor]
"""Makes a processor from a request's arguments; raises ``ValueError`` that names a wrong argument."""
