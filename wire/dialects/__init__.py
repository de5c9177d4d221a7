"""What engines say of their KV caches, each in its own words: read here, by workers and by the consolidator alike."""
