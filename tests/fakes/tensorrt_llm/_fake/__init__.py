"""What is behind the fake's TensorRT-LLM surface: our simulated engine, and the traps."""
