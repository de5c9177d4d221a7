"""What a router knows of its pool, folded from the journal: workers, load ledger, sessions, trust in events.

May import of the kernel ``wire``, ``index``, ``decision`` and ``consolidation.session_table``.
"""
