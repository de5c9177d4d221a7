"""Service discovery: the addresses of a deployment's processes, each valid while the process renews it.

May import of the kernel ``wire``; of the server ``process`` and ``transport``.
"""
