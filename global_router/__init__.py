"""The global router process: pools, their health, and a place on one of them for each request.

May import of the kernel ``wire``, ``requests`` and ``pool_grids``; of the server ``process``, ``transport``,
``http``, ``discovery``, ``forwarding``, ``frontend``, ``proxy`` and ``serving``.
"""
