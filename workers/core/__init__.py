"""What every worker does with its engine's facts, and says of it, whatever the engine: pure, no sockets, no clock."""
