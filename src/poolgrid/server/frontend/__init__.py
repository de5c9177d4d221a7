"""The OpenAI surface that both routers share: templates, tokenization, streaming, errors. It never chooses a worker."""
