"""Which pool serves a request: the grid, its axes, circuit breakers, other destinations.

May import of the kernel ``wire``.
"""
