"""The records of the event log."""
