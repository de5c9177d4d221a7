"""A small engine, as `docs/internals/engines.md` tells how to write one: it answers with the prompt, token by token."""
