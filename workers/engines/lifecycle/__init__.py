"""What the lives of all engines share: loading, warm-up, health, progress, load."""
