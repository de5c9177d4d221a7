"""Media of chat messages: from what a client wrote to bytes that were fetched, checked and hashed.

``references`` reads what a message names, ``loader`` brings it in (``fetcher``, ``local_files``, behind ``media_cache``
and its budget), ``image_headers`` and ``embeddings`` look at what came, ``placeholders`` gives each its place in the
prompt. Whatever is refused is refused with a code of ``refusals``.
"""
