"""A small engine, as `docs/engines.md` tells how to write one: it answers with the prompt, token by token."""
