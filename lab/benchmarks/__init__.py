"""Benchmarks: beside a peer in the same run, printed as ratios. Absolute times on shared machines are noise."""
