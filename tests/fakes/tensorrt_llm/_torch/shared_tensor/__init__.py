"""Handles of tensors for other processes."""

from .shared_tensor import SharedTensorContainer

__all__ = ["SharedTensorContainer"]
