"""The consolidator without sockets, disk, clock or log: time is an argument, effects are return values."""
