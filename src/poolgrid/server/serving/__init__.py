"""What both routers need to talk to workers: one connection per worker process, one stream per request.

May import of the kernel ``wire`` and ``requests``; of the server ``process`` and ``transport``.
"""
