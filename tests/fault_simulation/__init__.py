"""Deterministic simulation testing: whole pools in virtual time on a network and disks that fail, all from one seed.

See ``tests/fault_simulation/README.md``. The services are the real ones, shells included; only what lies
below them is simulated: the event loop (``virtual_loop``), ZMQ (``network``), disk (``disk``), clocks (``machine``).
"""
