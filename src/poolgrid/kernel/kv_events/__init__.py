"""KV-cache events as engines publish them: their dialects, followed and translated into events of the pool."""
