"""How long answers are that end by themselves: as long as those of real chats.

Lengths are log-normal, as the lengths of answers are in published traces. The defaults are mean and standard deviation
of ``output_length`` over the 12,031 requests of Mooncake's conversation trace (Qin et al., FAST 2025;
``tests/data/README.md``): 343 and 250 tokens. Beyond ``DEVIATIONS_MAX`` the logarithm is cut, so that none is endless:
with the defaults answers have from 54 to 1,417 tokens.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from statistics import NormalDist

import xxhash

MEAN_DEFAULT = 343.0
"""Mean of ``output_length`` in the trace, in tokens."""

STDDEV_DEFAULT = 250.0
"""Standard deviation of ``output_length`` in the trace, in tokens."""

TOKENS_MAX = 2**22
"""Largest mean: as long as the longest sequence that a worker takes."""

DEVIATIONS_MAX = 2.5
"""Standard deviations of the logarithm beyond which a length is cut: 1.2 % of all lengths."""

TOKENS_MIN = 2
"""Shortest answer: one token that says something, and the end of the sequence."""

_LENGTH_KEY = 0x6A09_E667_F3BC_C908
"""Any constant: lengths are drawn from other bits than tokens are."""

_u64 = struct.Struct("<Q")
_normal = NormalDist()


@dataclass(frozen=True, slots=True)
class AnswerLengths:
    """A distribution of answer lengths: ``mean`` and ``stddev`` in tokens, the end-of-sequence token included."""

    mean: float = MEAN_DEFAULT
    stddev: float = STDDEV_DEFAULT

    def __post_init__(self) -> None:
        if not 0.0 < self.mean <= TOKENS_MAX:
            raise ValueError(
                f"describing answer lengths: the mean is {self.mean:g} tokens, allowed are above 0 up to {TOKENS_MAX}"
            )
        if not 0.0 <= self.stddev <= TOKENS_MAX:
            raise ValueError(
                f"describing answer lengths: the standard deviation is {self.stddev:g} tokens, "
                f"allowed are 0 to {TOKENS_MAX}"
            )

    def tokens(self, digest: int) -> int:
        """Return the length in tokens of the answer that begins at a digest (u64); the same one for the same digest."""
        drawn = xxhash.xxh3_64_intdigest(_u64.pack(digest), _LENGTH_KEY)
        # The middle of one of 2^53 equal parts: never 0 or 1, for which there is no deviation.
        share = ((drawn >> 11) + 0.5) / 2**53
        deviations = max(-DEVIATIONS_MAX, min(DEVIATIONS_MAX, _normal.inv_cdf(share)))
        variance = math.log1p((self.stddev / self.mean) ** 2)
        length = math.exp(math.log(self.mean) - variance / 2 + math.sqrt(variance) * deviations)
        return max(TOKENS_MIN, round(length))
