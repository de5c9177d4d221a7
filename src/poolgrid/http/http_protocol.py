"""uvicorn's HTTP/1.1 protocol with a short way for endpoints that want their request whole and write for themselves.

Rules
    1. An application may have ``direct_endpoint(path)``; a ``POST`` whose path it knows takes the short way, everything
       else goes as uvicorn has it. The endpoint is an ASGI application all the same.
    2. On the short way a body that announces its length is gathered first and the endpoint called once it is complete:
       no task waits for it, and a body that came in one piece is never copied. One longer than the endpoint's
       ``body_bytes_max``, of unknown length, or that waits for ``100 Continue`` is left to the endpoint to receive.
    3. ``scope["extensions"][CONNECTION]`` is the ``Connection``: the body, and a call when the client leaves, so that
       no task has to wait for that either.
    4. What is answered, and how it is written, is said in ``poolgrid.http.direct_cycle``.
    5. What may come at all, and for how long, is said in ``poolgrid.http.bounded_protocol`` and
       ``poolgrid.http.held_connection``.
    6. A request that comes in one piece, on a connection that waits for nothing else, with the head of the one before,
       takes the short way without the parser (``poolgrid.http.repeated_head``).
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry

from poolgrid.http.bounded_protocol import BoundedProtocol
from poolgrid.http.browser_requests import AllowedHosts
from poolgrid.http.connection_task import ConnectionTask
from poolgrid.http.direct_cycle import DefaultLines, DirectCycle, begun, nobody
from poolgrid.http.http_connections import HttpConnections, InvalidRequests
from poolgrid.http.http_settings import HttpLimits
from poolgrid.http.repeated_head import RepeatedHead

SERVER_ENDS = "the server is shutting down"
"""Message of the cancellation of a request whose answer has not finished in time for the end of the server."""

BODY_BYTES_MAX_DEFAULT = 1024 * 1024
"""Largest body that is gathered for an endpoint that names no limit of its own."""


_OF_A_REQUEST = ("headers", "state", "extensions")
"""What of a scope is made for each request anew."""

HEADS_TRIED_MAX = 4
"""Heads in a row that a connection keeps to know them again, and that did not come again; then it keeps none: each of
its requests has a head of its own."""


class _Repeated:
    """A request whose head may come again on its connection."""

    __slots__ = ("endpoint", "head", "of_head", "scope")

    def __init__(self, head: RepeatedHead, cycle: DirectCycle) -> None:
        self.head = head
        self.scope = {name: value for name, value in cycle.scope.items() if name not in _OF_A_REQUEST}
        """What of its scope is the connection's, as it was before anybody else put something there."""
        self.endpoint = cycle.endpoint
        """Where it went."""
        self.of_head: dict[str, Any] = {}
        """What its endpoint keeps of the head."""


class DirectProtocol(BoundedProtocol):
    """One connection."""

    cycle: Any
    """The request that came last: uvicorn's own cycle, or one on the short way."""
    _gathering: DirectCycle | None = None
    _serving: DirectCycle | None = None
    _task: ConnectionTask | None = None
    """Serves what takes the short way, once there was something."""
    _repeated: _Repeated | None = None
    """A request before: the last one that came whole, or one before that."""
    default_lines = DefaultLines()
    """Those of its server."""
    _heads_tried = 0

    @classmethod
    def serving(
        cls, limits: HttpLimits, registry: CollectorRegistry | None, allowed_hosts: AllowedHosts | None = None
    ) -> type[DirectProtocol]:
        """Return the protocol of one server, with these limits and metrics in ``registry``.

        Requests that name another host than the ``allowed_hosts`` are refused; without them any host will do.
        """

        class Serving(cls):  # type: ignore[misc, valid-type]
            table = HttpConnections(limits, registry)
            default_lines = DefaultLines()
            hosts = allowed_hosts
            invalid_requests = InvalidRequests(registry)

        return Serving

    def data_received(self, data: bytes) -> None:
        """Begin the request that this is, if it is a whole one like the one before; else read on."""
        queue, table = self._queue, self.table
        if self._waiting is not None or (queue is not table.idle and (queue is not table.heads or self._head_bytes)):
            super().data_received(data)
            return
        repeated = self._repeated
        if repeated is not None and self._begin_again(repeated, data):
            return
        before = self.cycle
        super().data_received(data)
        cycle = self._serving
        if cycle is not None and cycle is self.cycle and cycle is not before:
            # It came whole, and there was nothing before it.
            self._repeated = None
            if self._heads_tried < HEADS_TRIED_MAX and cycle.keep_alive and self._waiting is None:
                self._heads_tried += 1
                head = RepeatedHead.of(data, list(cycle.scope["headers"]), table.limits.header_line_bytes)
                if head is not None:
                    self._repeated = _Repeated(head, cycle)

    def _begin_again(self, repeated: _Repeated, data: bytes) -> bool:
        """Call the endpoint with a request that needs no parser; return False where it goes another way."""
        last = self._serving
        if last is None or self.cycle is not last or self.limit_concurrency is not None:
            return False
        # Of this head, which need not be that of the request before: one that came in pieces leaves it as it is.
        endpoint, scope = repeated.endpoint, repeated.scope
        if self.app.direct_endpoint(scope["raw_path"]) is not endpoint:
            return False
        taken = repeated.head.taken(data)
        if taken is None:
            return False
        headers, body = taken
        if len(body) > getattr(endpoint, "body_bytes_max", BODY_BYTES_MAX_DEFAULT):
            return False
        self._heads_tried = 0
        queue = self._queue
        if queue is not None:  # as ``_move`` does
            self._queue = None
            queue.pop(self, None)
        self.scope = {**scope, "headers": headers, "state": self.app_state.copy()}  # type: ignore[typeddict-item]
        cycle = begun(self, endpoint, True)
        self.cycle = cycle
        self._serve(cycle, body, repeated.of_head)
        return True

    def begin(self) -> None:
        """Take the short way where there is one, else go on as usual."""
        direct_endpoint = getattr(self.app, "direct_endpoint", None)
        endpoint = None
        announced = self._announced_bytes
        if (
            direct_endpoint is not None
            and announced is not None
            and self.parser.get_method() == b"POST"
            and self.parser.get_http_version() == "1.1"
            and not self.parser.should_upgrade()
            and not self.expect_100_continue
            # What is pipelined behind an answer that is not complete waits for its turn in uvicorn's queue.
            and (self.cycle is None or self.cycle.response_complete)
            and self.limit_concurrency is None
            and not self.root_path
        ):
            endpoint = direct_endpoint(self.url)
        if (
            endpoint is None
            or announced is None
            or announced > getattr(endpoint, "body_bytes_max", BODY_BYTES_MAX_DEFAULT)
        ):
            super().begin()
            return
        scope = self.scope
        scope["method"] = "POST"
        scope["raw_path"] = self.url
        scope["path"] = self.url.decode("ascii")
        scope["query_string"] = b""
        cycle = begun(self, endpoint, self.parser.should_keep_alive())
        self._gathering = self.cycle = cycle

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        if self._gathering is not None:
            self._gathering.parts.append(body)
        else:
            super().on_body(body)

    def finish(self) -> None:
        """Call the endpoint with the whole body."""
        cycle = self._gathering
        if cycle is None:
            super().finish()
            return
        self._gathering = None
        parts, cycle.parts = cycle.parts, []
        self._serve(cycle, parts[0] if len(parts) == 1 else b"".join(parts))

    def _serve(self, cycle: DirectCycle, body: bytes, of_head: dict[str, Any] | None = None) -> None:
        """Start the endpoint."""
        self._serving = cycle
        task = self._task
        if task is None:
            task = self._task = ConnectionTask(self.loop, self.tasks)
        task.serve(cycle, body, of_head)

    def abandon(self) -> None:
        """Forget the body that is not whole, and its request, which nobody begins.

        uvicorn breaks the circle of protocol and cycle when the endpoint returns; here there is none to return.
        """
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            gathering.on_response = nobody

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the endpoint at once."""
        self.abandon()
        super().connection_lost(exc)
        serving, self._serving = self._serving, None
        if serving is not None and not serving.response_complete:
            serving.disconnected = True
            serving.left()
            serving.let_go()
        task, self._task = self._task, None
        if task is not None:
            task.end()
