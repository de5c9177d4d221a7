"""One task on its way to the client: progress, and a result at the end."""

from __future__ import annotations

from collections.abc import Sequence

from poolgrid.kernel.requests.inference import InferenceRequest, StreamDelta
from poolgrid.kernel.wire.tasks import TaskResult
from poolgrid.server.frontend.inference_endpoint import generation_failed
from poolgrid.server.frontend.sequence_output import RequestOutput


class TaskOutput(RequestOutput):
    """What has come of a task."""

    def __init__(self, request: InferenceRequest) -> None:
        self.index = 0
        self.request = request
        self.progress = 0
        self.result: TaskResult | None = None

    @property
    def work(self) -> str:
        return "serving the task"

    def absorb(self, deltas: Sequence[StreamDelta]) -> None:
        """Take what arrived since the last call."""
        if not deltas:
            self._fail("the router ended the stream without a finish reason")
        for delta in deltas:
            self.progress = max(self.progress, delta.progress or 0)
            if delta.result is not None:
                self.result, self.finish_reason, self.progress = delta.result, delta.finish_reason, 100
            elif delta.finish_reason is not None:
                self._fail_by(delta)

    async def next(self) -> None:
        """Wait until something is new; raises ``RequestError`` where it has failed."""
        assert self.stream is not None, "submitted before anything is awaited from it"
        self.absorb(await self.stream.next())
        if self.finish_reason == "error":
            raise generation_failed(self)
