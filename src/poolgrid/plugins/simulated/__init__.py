"""The simulated engine as one of a worker: ``core`` is pure, the rest drives it in real time."""
