"""TensorRT-LLM as an engine of a worker: ``core`` and ``arguments`` need no TensorRT-LLM, the rest drives it."""
