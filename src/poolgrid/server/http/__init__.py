"""HTTP/1.1 server and client: uvicorn behind limits, and a client for engine servers.

May import of the kernel ``wire``; of the server ``process`` and ``transport``.
"""
