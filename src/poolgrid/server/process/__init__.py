"""What every process has: clock, tasks, logs, metrics, settings, lifecycle."""
