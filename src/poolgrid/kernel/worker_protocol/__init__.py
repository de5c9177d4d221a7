"""What every worker does with its engine's facts, and reports, for any engine: pure, no sockets, no clock."""
