"""The consolidator process: takes the batches of sources, keeps the journal on disk, serves it to routers.

May import of the kernel ``wire``, ``kv_events``, ``consolidation`` and ``journal``; of the server ``process``,
``transport``, ``http`` and ``discovery``.
"""
