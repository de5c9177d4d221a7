"""KV-cache events as engines publish them: their dialects, followed and translated into events of the pool.

May import of the kernel ``wire``.
"""
