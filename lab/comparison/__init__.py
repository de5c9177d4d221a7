"""The same engines, the same traffic, each router in front: ``python -m lab.comparison --help``."""
