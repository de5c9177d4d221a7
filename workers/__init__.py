"""Worker processes: an engine (simulated, or TensorRT-LLM), its request plane and its event stream."""
