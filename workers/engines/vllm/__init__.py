"""vLLM's own server, ``vllm serve``, as an engine."""
