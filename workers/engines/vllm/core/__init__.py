"""Requests and answers in vLLM's words. Pure."""
