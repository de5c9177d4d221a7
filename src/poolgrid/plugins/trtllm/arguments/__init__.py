"""Arguments of TensorRT-LLM's engines, and the files that hold them: resolved, checked and converted without it."""
