"""What poolgrid knows about TensorRT-LLM without importing it: arguments, engine files, the disaggregation codec."""
