"""Tensors between workers by the real NIXL."""
