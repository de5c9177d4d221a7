"""The catalogue of attacks on a pool, run against real processes: ``python -m lab.attacks --help``."""
