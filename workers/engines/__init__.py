"""Engines that a worker can drive, behind one small protocol (``engine``)."""
