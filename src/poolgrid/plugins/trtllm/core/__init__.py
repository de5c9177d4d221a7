"""TensorRT-LLM without TensorRT-LLM, pure: requests into its words, its answers and statistics into ours."""
