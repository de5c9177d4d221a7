"""The router process: a projection of the event stream that answers OpenAI requests through workers.

May import of the kernel ``wire``, ``index``, ``decision``, ``projection``, ``routing``, ``requests``,
``consolidation`` and ``journal``; of the server ``diagnosis``, ``process``, ``transport``, ``http``, ``discovery``,
``frontend``, ``proxy``, ``serving`` and ``consolidator``.
"""
