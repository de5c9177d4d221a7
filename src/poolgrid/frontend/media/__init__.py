"""Media of chat messages: from what a client wrote to bytes that were fetched, checked and hashed.

``references`` reads what a message names, ``loader`` brings it in (``fetcher``, ``local_files``, ``data_urls``, behind
``media_cache`` and ``memory_budget``), ``image_checks`` and ``embeddings`` look at what came, ``content_form`` and
``placeholders`` give each its place in the prompt. Whatever is refused is refused with a code of ``refusals``.
"""
