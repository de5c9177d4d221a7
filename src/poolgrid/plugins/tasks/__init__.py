"""Requests whose answer is not tokens: ``/v1/embeddings``, ``/v1/images/generations`` and ``/v1/videos``."""
