"""`poolgrid bench`: load against any OpenAI endpoint, from flags or from a trace, and what it measured."""
