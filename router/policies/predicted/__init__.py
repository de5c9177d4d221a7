"""Costs in milliseconds, with the speed of workers learned: the policy ``predicted``."""
