"""The journal as a stream of messages that somebody else stores: its rules, without a socket."""
