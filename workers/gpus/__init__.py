"""The GPUs of a worker's engine, beside its serving: what NVIDIA's driver says of them, as metrics."""
