"""Following what publishes KV events itself: numbered frames, replays, and block names by their tokens. Pure."""
