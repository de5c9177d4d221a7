"""poolgrid in front of real vLLM servers on this machine's CPU: a command of its own, ``python -m tests.real_vllm``."""
