"""An engine server without a socket: its facts, its answers, its blocks. Pure."""
