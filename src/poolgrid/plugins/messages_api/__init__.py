"""Anthropic's Messages API: a request is turned into a chat request, its answer into content blocks."""
