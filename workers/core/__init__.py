"""What every worker does with its engine's facts, whatever the engine: pure, no sockets, no clock."""
