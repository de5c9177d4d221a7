"""TensorRT-LLM's own server, ``trtllm-serve``, as an engine."""
