"""A router for the front end's tests: it plays scripts, fails where it is told to, and remembers what it was asked.

Nothing in it sleeps: a script step that waits does so on an event that the test sets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from poolgrid.kernel.requests.inference import InferenceRequest, ServedModel, StreamDelta
from poolgrid.kernel.wire.hashing import TOKEN_BYTES
from poolgrid.kernel.wire.requests import TokenLogprobs
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.frontend.prompt_model import PromptModel

TINY = PromptModel.load(TINY_MODEL_PATH)

Step = list[StreamDelta] | asyncio.Event | Exception
"""What one ``next`` does: returns these deltas, waits for this event and goes on, or raises this."""

Script = Callable[[InferenceRequest], list[Step]]


def speak(
    text: str,
    *,
    tokens_per_delta: int = 1,
    finish_reason: str = "stop",
    cached_tokens: int = 0,
    model: PromptModel = TINY,
) -> list[Step]:
    """Return the steps of a worker that says ``text``: one wake-up per delta, the finish with the last."""
    packed = model.encode(text)
    stride = tokens_per_delta * TOKEN_BYTES
    parts = [packed[at : at + stride] for at in range(0, len(packed), stride)] or [b""]
    steps: list[Step] = [[StreamDelta(part)] for part in parts]
    first, last = steps[0], steps[-1]
    assert isinstance(first, list)
    assert isinstance(last, list)
    first[0].cached_tokens = cached_tokens
    last[0].finish_reason = finish_reason
    return steps


def with_logprobs(steps: list[Step], alternatives: int) -> list[Step]:
    """Give every token of the steps a log probability of -0.5 and ``alternatives`` others."""
    for step in steps:
        if isinstance(step, list):
            for delta in step:
                ids = memoryview(delta.token_ids).cast("I")
                delta.logprobs = tuple(
                    TokenLogprobs(token_id, -0.5, tuple((3 + other, float("-inf")) for other in range(alternatives)))
                    for token_id in ids
                )
    return steps


@dataclass
class FakeStream:
    request: InferenceRequest
    steps: list[Step]
    worker: str = "worker-0"
    decision_reason: str = "lowest_cost"
    promised_tokens: int = 0
    pool: str = ""
    cancels: int = 0
    on_waiting: Callable[[], None] = lambda: None
    """Called when ``next`` has nothing to give and waits: the moment for a test to act."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    unread_tokens: int = 0
    waits_for_room: bool = False

    async def next(self, until_end: bool = False) -> list[StreamDelta]:
        while self.steps:
            step = self.steps.pop(0)
            if isinstance(step, asyncio.Event):
                self.on_waiting()
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                return step
        return []

    def cancel(self) -> None:
        self.cancels += 1
        self.cancelled.set()


class FakeBackend:
    """Plays ``script`` for every request; ``refusal`` is raised instead, from request number ``refuse_from`` on."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        refusal: Exception | None = None,
        refuse_from: int = 0,
        served: Sequence[ServedModel] = (ServedModel("tiny", 1_700_000_000, 262_144, ("tiny-lora",)),),
    ) -> None:
        self.script: Script = script or (lambda request: speak("Hello, world!"))
        self.refusal = refusal
        self.refuse_from = refuse_from
        self.served = list(served)
        self.streams: list[FakeStream] = []
        self.submitted = asyncio.Event()
        self.waiting = 0
        """Streams that have nothing to give and wait."""
        self.on_waiting: Callable[[], None] = lambda: None
        """Called whenever one more stream waits."""
        self.admission: asyncio.Event | None = None
        """When set, ``submit`` waits for it, as in an admission queue."""
        self.abandoned = asyncio.Event()
        """Set when a ``submit`` that waited was given up."""

    @property
    def requests(self) -> list[InferenceRequest]:
        return [stream.request for stream in self.streams]

    async def submit(self, request: InferenceRequest) -> FakeStream:
        if self.refusal is not None and len(self.streams) >= self.refuse_from:
            raise self.refusal
        stream = FakeStream(
            request,
            self.script(request),
            worker=f"worker-{len(self.streams) % 2}",
            on_waiting=self._one_more_waits,
        )
        self.streams.append(stream)
        self.submitted.set()
        if self.admission is not None:
            try:
                await self.admission.wait()
            except asyncio.CancelledError:
                self.abandoned.set()
                raise
        return stream

    def _one_more_waits(self) -> None:
        self.waiting += 1
        self.on_waiting()

    def models(self) -> Sequence[ServedModel]:
        return self.served
