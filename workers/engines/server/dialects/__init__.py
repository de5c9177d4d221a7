"""Kinds of engine servers, a module each: ``--engine`` takes its name, with ``-`` for ``_``; ``KIND`` describes it."""
