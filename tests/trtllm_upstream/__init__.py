"""poolgrid against TensorRT-LLM's own Python, as far as it runs without the compiled library."""
