"""A pool as it was: folded from its journal, beside the router and never in its way."""
