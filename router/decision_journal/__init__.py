"""Every decision of a router on disk, with all that is needed to derive it again (docs/internals/journal.md)."""
