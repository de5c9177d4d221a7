"""The journal: records in checksummed segments with snapshots, on disk or in memory (docs/internals/journal.md)."""
