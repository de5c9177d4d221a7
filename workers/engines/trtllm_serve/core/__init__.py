"""Requests and answers in the words of trtllm-serve. Pure."""
