"""Benchmarks, attacks, dashboards and the site: in the repository, not installed."""
