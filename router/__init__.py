"""The KV-aware router: a projection of the event stream that answers OpenAI requests through workers."""
