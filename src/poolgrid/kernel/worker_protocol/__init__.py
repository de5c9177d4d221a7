"""What a worker does with any engine's facts and reports: the engine's interface, events, the push protocol.

May import of the kernel ``wire`` and ``kv_events``.
"""
