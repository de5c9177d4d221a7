"""The consolidator without sockets, disk, clock or log: time is an argument, effects are return values.

May import of the kernel ``wire``, ``kv_events`` and ``index.sharded_map``.
"""
