"""What an engine needs to hand tensors to another worker, however they travel. Buffers are NumPy's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

Tensor: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class TensorUnavailable(Exception):
    """A tensor could not be fetched: its source is gone, keeps it no longer, or is too slow."""
