"""Commands, each in a module of its own with an ``app`` that holds nothing else, so that each imports what it needs."""
