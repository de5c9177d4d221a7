"""The PyTorch backend."""
