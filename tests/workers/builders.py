"""Small builders that the worker tests share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from poolgrid.kernel.wire.events import BlocksRemoved, BlocksStored, CacheCleared
from poolgrid.kernel.wire.hashing import pack_tokens, unpack_hashes
from poolgrid.kernel.wire.identifiers import Stage, Tier
from poolgrid.kernel.wire.requests import Generate, KvOffered, Routing, Sampling, TokenDelta
from poolgrid.plugins.simulated.core.engine import SimulatedEngine, StepOutcome
from poolgrid.plugins.simulated.core.kv_transfer import read_ticket
from poolgrid.plugins.simulated.core.next_token import Vocabulary

VOCABULARY = Vocabulary(size=1000, first_token_id=10)


def make_request(
    request_id: str = "r",
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 4,
    priority: int = 0,
    cache_salt: str = "",
    stop_token_ids: tuple[int, ...] = (),
    seed: int | None = None,
    logprobs: int | None = None,
    tokens_together: int = 1,
) -> Generate:
    return Generate(
        request_id,
        pack_tokens(prompt),
        Sampling(max_tokens=max_tokens, seed=seed, logprobs=logprobs),
        stop_token_ids=stop_token_ids,
        routing=Routing(priority=priority, cache_salt=cache_salt, tokens_together=tokens_together),
    )


def prefill_leg(request: Generate) -> Generate:
    return msgspec.structs.replace(request, stage=Stage.PREFILL)


def decode_leg(request: Generate, prefilled: TokenDelta) -> Generate:
    assert prefilled.disaggregated_params is not None
    return msgspec.structs.replace(request, stage=Stage.DECODE, disaggregated_params=prefilled.disaggregated_params)


def prefill(engine: SimulatedEngine, request: Generate, now_ms: float = 0.0) -> tuple[Generate, KvOffered, float]:
    """Run a prefill leg on an idle engine; return the decode leg, the offer and the time of the first token."""
    engine.submit(prefill_leg(request), now_ms)
    outcomes = run_to_end(engine, now_ms)
    (delta,) = (delta for outcome in outcomes for delta in outcome.deltas if delta.request_id == request.request_id)
    assert delta.finish_reason == "prefilled"
    leg = decode_leg(request, delta)
    return leg, engine.offer(read_ticket(leg).transfer_id, outcomes[-1].ended_ms), outcomes[-1].ended_ms


def run_through(engine: SimulatedEngine, now_ms: float = 0.0) -> list[StepOutcome]:
    """Run until nothing happens any more, also by the passing of time."""
    outcomes = []
    while True:
        outcome = engine.step(now_ms)
        if outcome is not None:
            outcomes.append(outcome)
            now_ms = outcome.ended_ms
        elif engine.next_moment_ms is not None:
            now_ms = engine.next_moment_ms
        else:
            return outcomes


def run_to_end(engine: SimulatedEngine, now_ms: float = 0.0, horizon_ms: float | None = None) -> list[StepOutcome]:
    outcomes = []
    while (outcome := engine.step(now_ms, horizon_ms)) is not None:
        outcomes.append(outcome)
        now_ms = outcome.ended_ms
    return outcomes


def outputs(outcomes: Iterable[StepOutcome]) -> dict[str, bytes]:
    """Join the tokens of each request, checking that every delta continues the one before."""
    joined: dict[str, bytes] = {}
    for outcome in outcomes:
        for delta in outcome.deltas:
            before = joined.get(delta.request_id, b"")
            assert delta.position == len(before) // 4, f"{delta.request_id}: a hole or an overlap"
            joined[delta.request_id] = before + delta.token_ids
    return joined


def fold(events: Iterable[object], held: dict[Tier, set[int]] | None = None) -> dict[Tier, set[int]]:
    """Apply wire cache events to a plain model of what a worker holds in full attention."""
    held = {tier: set() for tier in Tier} if held is None else held
    for event in events:
        if getattr(event, "group", 0):
            continue
        if isinstance(event, BlocksStored):
            for sequence_hash in unpack_hashes(event.sequence_hashes):
                assert sequence_hash not in held[event.tier], "stored twice on one tier"
                held[event.tier].add(sequence_hash)
        elif isinstance(event, BlocksRemoved):
            for sequence_hash in unpack_hashes(event.sequence_hashes):
                held[event.tier].remove(sequence_hash)
        elif isinstance(event, CacheCleared):
            for blocks in held.values():
                blocks.clear()
    return held
