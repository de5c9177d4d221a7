"""The pure core: no sockets, no clock, no randomness; time and draws come in as arguments, effects go out as values."""
