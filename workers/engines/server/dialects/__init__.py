"""Kinds of engine servers, a module each; ``poolgrid.server.workers.engines.server.definition`` has their table."""
