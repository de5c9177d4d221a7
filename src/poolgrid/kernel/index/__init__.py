"""Which worker holds which block: runs of blocks, found by the sequence hashes of a prompt.

May import of the kernel ``wire``.
"""
