"""What all tests need."""

from __future__ import annotations

import zmq


def _leave(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Leave a context that nobody ended to the end of the process.

    A test that fails may leave one behind. pyzmq ends it when it is collected, which waits for its sockets; those that
    are collected with it are closed only afterwards, so the whole run waits for ever, in whatever test comes next.
    """


zmq.Context.__del__ = _leave  # type: ignore[method-assign]
