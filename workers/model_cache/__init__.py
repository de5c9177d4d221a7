"""Models in a directory of this machine: fetched once, checked by their sums, found by every worker that starts."""
