"""Measures the step times of an engine server from outside: lone prompts of several lengths, and requests together.

Every prompt is of tokens that no cache has. The measurement ends by its time-out, with the points that it has by then.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from statistics import median

from poolgrid.process.clock import Clock
from poolgrid.tools.engine_check.core.probe_plan import PlanLimits, fresh_tokens
from poolgrid.tools.engine_check.core.timing_points import (
    DecodeSample,
    Measured,
    PrefillSample,
    gaps_while_all_decode,
)
from poolgrid.tools.engine_check.server import EngineServer
from poolgrid.tools.engine_check.settings import EngineCheckSettings
from poolgrid.workers.engines.server.server_client import ServerError

MEASURE_TIMEOUT_S = 600.0
"""The measurement ends by then, with the points that it has."""

LENGTHS = (16, 64, 256, 1024, 4096, 16_384)
"""Prompt lengths whose prefill is measured; longer ones than the model takes are left out."""

REPEATS = 5
"""Prompts of each length."""

DECODED_TOKENS = 48
"""Tokens of each request whose steps are timed: the median of them is steady, and they fill few blocks."""

USED_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Shares of the KV blocks at which steps are timed, where prompts can be long enough."""

SHORTEST_CONTEXT = 32
"""Tokens of a prompt that uses next to nothing."""

OVERHEAD_SAMPLES = 11
"""Requests without work that are timed; their median is taken."""

WARM_UP_TOKENS = 512
"""Length of the prompts before the first measurement: servers compile at the first request of a kind."""


class Measurement:
    """One measurement of one server."""

    def __init__(
        self,
        settings: EngineCheckSettings,
        server: EngineServer,
        model: str,
        clock: Clock,
        tell: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._server = server
        self._model = model
        self._clock = clock
        self._tell = tell
        self._deadline_ms = clock.monotonic_ms() + MEASURE_TIMEOUT_S * 1000
        self._limits = PlanLimits(f"{clock.wall_ms()}", 1)
        self._numbers = itertools.count()
        self.cut_short = False
        """Whether time was over before all points were measured."""

    async def run(self, kv_tokens: int, max_model_len: int | None) -> Measured:
        """Measure all; raises ``ServerError``."""
        longest = (max_model_len or 2**31) - DECODED_TOKENS - 1
        self._tell("warming up")
        await self._together(1, min(WARM_UP_TOKENS, longest), 4)
        overhead_ms = median([await self._server.round_trip_ms() for _ in range(OVERHEAD_SAMPLES)])
        prefill = await self._prefill([length for length in LENGTHS if length <= longest and length <= kv_tokens])
        decode = await self._decode(kv_tokens, longest)
        return Measured(overhead_ms, tuple(prefill), tuple(decode))

    async def _prefill(self, lengths: Sequence[int]) -> list[PrefillSample]:
        samples = []
        for length in lengths:
            times: list[float] = []
            for number in range(REPEATS):
                if self._is_over():
                    break
                self._tell(f"prefill of {length:,} tokens, {number + 1} of {REPEATS}")
                sent_ms, arrivals = await self._server.stream(self._model, self._fresh(length), 1)
                times.append(arrivals[0] - sent_ms)
            samples.append(PrefillSample(length, tuple(times)))
        return samples

    async def _decode(self, kv_tokens: int, longest: int) -> list[DecodeSample]:
        most = self._settings.concurrency
        plans = [(requests, SHORTEST_CONTEXT) for requests in sorted({1, max(1, most // 4), most})]
        for share in USED_SHARES:
            context = int(share * kv_tokens / most) - DECODED_TOKENS
            if SHORTEST_CONTEXT < context <= longest:
                plans.append((most, context))
        samples = []
        for requests, context in plans:
            if self._is_over():
                break
            self._tell(f"decode of {requests} requests with {context:,} tokens each")
            arrivals = await self._together(requests, context, DECODED_TOKENS)
            share = requests * (context + DECODED_TOKENS / 2) / kv_tokens
            samples.append(DecodeSample(requests, context, share, tuple(gaps_while_all_decode(arrivals))))
        return samples

    async def _together(self, requests: int, context: int, tokens: int) -> list[list[float]]:
        try:
            async with asyncio.TaskGroup() as together:
                tasks = [
                    together.create_task(self._server.stream(self._model, self._fresh(context), tokens))
                    for _ in range(requests)
                ]
        except* ServerError as errors:
            raise errors.exceptions[0] from None
        return [task.result()[1] for task in tasks]

    def _fresh(self, length: int) -> tuple[int, ...]:
        return fresh_tokens(self._limits, f"measured/{next(self._numbers)}", length)

    def _is_over(self) -> bool:
        self.cut_short |= self._clock.monotonic_ms() >= self._deadline_ms
        return self.cut_short
