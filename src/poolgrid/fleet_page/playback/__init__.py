"""A pool as it was: folded from its journal, outside the router and never in its way."""
