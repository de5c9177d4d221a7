"""Commands that measure and simulate: bench, simulation, engine check."""
