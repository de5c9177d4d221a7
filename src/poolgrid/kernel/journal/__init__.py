"""The records of a pool's journal as bytes, and the ports through which the consolidator and its readers meet.

May import of the kernel ``wire`` and ``consolidation``.
"""
