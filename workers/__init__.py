"""Worker processes: an engine, its request plane and its event stream."""
