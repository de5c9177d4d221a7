"""Engines that a worker can drive: each in a directory of its own, behind one small protocol (``protocol``)."""
