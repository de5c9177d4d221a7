"""The OpenAI surface that both routers share: templates, tokenization, streaming, errors. It never chooses a worker.

May import of the kernel ``wire`` and ``requests``; of the server ``process``, ``http`` and
``structured_output``.
"""
