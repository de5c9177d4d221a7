"""Kinds of engine servers, a module each; ``poolgrid.workers.engines.server.definition`` has their table."""
