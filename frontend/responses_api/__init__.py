"""OpenAI's Responses API without its memory: a request is turned into a chat request, its answer into items."""
