"""OpenAI's Responses API: a request is turned into a chat request, its answer into items, and kept if it may be."""
