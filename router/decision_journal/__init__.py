"""Every decision of a router on disk, with all that is needed to derive it again (format: docs/measuring.md#replay)."""
