"""The choice of a worker: eligible workers, predicted times, costs, the policy ``kv``, the state of a router.

May import of the kernel ``wire``, ``index``, ``decision`` and ``projection``.
"""
