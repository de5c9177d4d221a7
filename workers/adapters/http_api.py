"""The worker's own HTTP: that of every process, and ``/blocks``."""

from __future__ import annotations

from typing import Protocol
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CollectorRegistry

from poolgrid.runtime.health_app import HealthApp, HttpAnswer, Observed


class ObservedWorker(Observed, Protocol):
    """What the API shows of a worker."""

    def blocks(self, dp_rank: int) -> list[str]:
        """Return what a rank really holds, one line per block and tier.

        Raises ``NotImplementedError`` when the engine cannot tell, ``ValueError`` when there is no such rank.
        """
        ...


class HttpApi(HealthApp):
    """Says too what the engine's cache really holds; what it shows is given to it once it exists."""

    paths = (*HealthApp.paths, "/blocks")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._worker: ObservedWorker | None = None

    def show(self, worker: ObservedWorker) -> None:
        """Answer for this worker from now on."""
        self._observed = self._worker = worker

    def _ready_for(self, query: bytes) -> HttpAnswer | None:
        """Return what a probe gets that asks for another role or model than this worker's."""
        assert self._worker is not None
        state = self._worker.describe()
        for name, values in parse_qs(query.decode("utf-8", "replace")).items():
            if name in ("role", "model") and values != [state[name]]:
                said = f"this worker's {name} is {state[name]}, not {', '.join(values)}"
                return 503, "application/json", msgspec.json.encode({"status": "not ready", "reason": said})
        return None

    def answer(self, method: str, path: str, query: bytes) -> HttpAnswer:
        """Return what a request gets."""
        if path == "/ready" and query and self._worker is not None and method in ("GET", "HEAD"):
            return self._ready_for(query) or super().answer(method, path, query)
        if path != "/blocks" or self._worker is None or method not in ("GET", "HEAD"):
            return super().answer(method, path, query)
        try:
            (dp_rank,) = parse_qs(query.decode("ascii", "replace")).get("dp_rank", ["0"])
            return 200, "text/plain", "\n".join(self._worker.blocks(int(dp_rank))).encode()
        except ValueError as error:
            return 400, "text/plain", f"reading dp_rank: {error}\n".encode()
        except NotImplementedError:
            return 501, "text/plain", b"this engine cannot say what its cache holds\n"
