"""The verdict on one worker: a table of rules over its evidence; the first that fits names the cause.

Rules are ordered from what proves a cause alone (prompt lengths, the state of the stream) to what remains when
everything before is excluded. Everything is a function of the evidence, so a router, a recorded journal and a test
come to the same verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Final

import msgspec

from poolgrid.server.diagnosis.diagnosis import Diagnosis

WINDOW: Final = 100
"""Requests of one worker that count: a fault must be named within so many."""


class Observation(msgspec.Struct, gc=False):
    """One request: what the router promised that its worker would reuse, and what the worker reported."""

    request_id: str
    time_ms: int
    isl: int
    """Prompt tokens that the router hashed."""
    reported_isl: int | None
    """Prompt tokens that the engine reported."""
    promised_tokens: int
    reported_tokens: int
    seen_tokens: int
    """Leading tokens that the pool had been sent before, by any request of this router."""
    domain: str
    """``salt``, ``adapter`` or ``media`` where the prompt is hashed with one; empty for plain text."""
    prefix: int
    """Sequence hash of the last promised block; 0 without any."""
    announced: float | None = None
    """Share of an earlier prompt of the worker that the index holds by now; looked up when numbers disagree."""


class WorkerEvidence(msgspec.Struct):
    """What is known of one worker."""

    worker: str
    block_size: int
    observations: list[Observation]
    """Oldest first, at most ``WINDOW``."""
    stream: str = "live"
    stream_reason: str = ""
    was_live: bool = True
    """Whether its stream has been live at some time."""
    held_blocks: int = 0
    """Blocks that it holds according to the index."""
    epochs: int = 1
    """Registrations seen."""
    steps_fell: bool = False
    """Whether its engine counts its steps from 0 again in one epoch."""
    agreed_requests: int = 0
    """Requests with reuse that agreed, those before the window included."""
    own_requests: int = 0
    foreign_requests: int = 0
    """Requests that it started and this router did not send."""
    has_windows: bool = False
    """Whether the index knows of attention windows or checkpoints of the engine."""
    was_cleared: bool = False
    """Whether the worker took back all that it had reported, in the last requests."""
    events_fault: str = ""
    """In what its engine's events do not fit it, as it says itself."""


class UncachedSplit(msgspec.Struct, frozen=True):
    """Why the tokens of a prompt were computed; the parts add up to all that were."""

    cold: int
    """Never sent to the pool before."""
    routing: int
    """Held by another worker than the chosen one."""
    eviction: int
    """Sent before, and held by no worker (any more, or not computed yet)."""
    mismatch: int
    """Promised by the chosen worker, and not reused."""


def split_uncached(isl: int, seen: int, best: int, promised: int, reported: int) -> UncachedSplit:
    """Split the tokens of a prompt that were computed, all numbers being leading tokens of it.

    ``best`` is the most that any candidate held, ``promised`` what the chosen worker held.
    """
    isl = max(isl, reported)
    promised = min(isl, max(reported, promised))
    best = min(isl, max(promised, best))
    seen = min(isl, max(best, seen))
    return UncachedSplit(isl - seen, best - promised, seen - best, promised - reported)


class Cause(Diagnosis):
    """Why reuse is what it is; a fault raises an alert."""

    AGREES = ("agrees", False, "the worker reuses what the router promises", "")
    COLD = ("cold-workload", False, "prompts share too little for reuse: a low hit rate is no fault", "")
    UNKNOWN = (
        "unknown",
        False,
        "too few requests with reused tokens to judge",
        "send requests that share prefixes, and let the engine report cached_tokens",
    )
    EVENTS_UNFIT = (
        "events-unfit",
        True,
        "the KV events of the engine do not fit its worker: block size, ranks, or their form",
        "do what the evidence says, and check it with poolgrid engine-check",
    )
    TRUNCATED = (
        "truncated-prompts",
        True,
        "the engine cuts prompts that the router hashes whole",
        "raise the engine's context length, or give the worker the real one with --max-seq-len",
    )
    TEMPLATE = (
        "template",
        True,
        "the engine renders another chat template than the router",
        "give router and engine the same model directory and chat template",
    )
    TOKENIZER = (
        "tokenizer",
        True,
        "the engine splits text into other tokens than the router",
        "give router and engine the same tokenizer files and revision",
    )
    WRONG_ENDPOINT = (
        "wrong-endpoint",
        True,
        "no KV event of the worker has ever arrived from its endpoint",
        "correct the event endpoint and the port of the rank; check it with poolgrid engine-check",
    )
    GAP = (
        "gap",
        True,
        "KV events were lost and no replay filled the gap",
        "configure a replay endpoint and a larger buffer on the engine",
    )
    RESTART = (
        "restart",
        True,
        "the engine or its worker restarted, and the index does not match its cache yet",
        "wait for the full resync; if it repeats, find out why the engine restarts",
    )
    SALT = (
        "salt",
        True,
        "only requests with a cache_salt disagree: the engine does not apply the salt, or does not report it",
        "use an engine version whose events carry extra_keys; do not isolate tenants on this engine until then",
    )
    ADAPTER = (
        "adapter",
        True,
        "only requests to a LoRA adapter disagree: the engine names the adapter differently",
        "use an engine version whose events carry lora_name",
    )
    BLOCK_SIZE = (
        "block-size",
        True,
        "the engine reuses in blocks of another size than the router hashes",
        "set --kv-block-size to the size of the engine",
    )
    HASH = (
        "hash-algorithm",
        True,
        "events arrive, and none of the blocks in them has the name of a prompt that the worker computed",
        "use the same poolgrid version on router and worker, and the hash version that the engine reports",
    )
    EVENTS_OFF = (
        "events-off",
        True,
        "the worker reuses its cache and has never reported a block",
        "enable KV events on the engine (vLLM: --kv-events-config; TensorRT-LLM: event_buffer_max_size above 0)",
    )
    EVENTS_STOPPED = (
        "events-stopped",
        True,
        "the worker reported blocks earlier, and no longer reports those of new prompts",
        "restart the engine's event publisher, and check its log for a blocked or dead publisher thread",
    )
    WINDOW = (
        "window",
        True,
        "the index assumes another attention window or checkpoint interval than the engine has",
        "remove the window options, so that the sizes from the engine's events count",
    )
    GROUP = (
        "group-hidden",
        True,
        "the engine needs a KV group that the index does not know to resume a prompt",
        "publish the events of all KV groups (vLLM: kv_cache_spec_kind in events), or use --policy approximate",
    )
    TIER = (
        "tier-unannounced",
        True,
        "the worker reuses blocks that it reported as removed: a lower tier holds them and reports nothing",
        "enable the events of the offloading connector, or count the tier out of --host-cache options",
    )
    ASLEEP = (
        "sleeping-engine",
        True,
        "the engine dropped its cache without an event, as sleep and weight updates do",
        "drain the worker before the engine sleeps, or reset its prefix cache by an API that publishes the event",
    )
    FOREIGN = (
        "foreign-traffic",
        True,
        "requests of another router or client evict the blocks that this router reuses",
        "send all requests through the routers of this pool, or give the other client engines of its own",
    )
    UNEXPLAINED = (
        "unexplained",
        True,
        "promised and reported reuse disagree, and no rule explains it",
        "run poolgrid engine-check --out against the engine and report the file",
    )


OF_FINDING = {
    "events off": Cause.EVENTS_OFF,
    "publisher connects": Cause.WRONG_ENDPOINT,
    "endpoint refused": Cause.WRONG_ENDPOINT,
    "no publisher": Cause.WRONG_ENDPOINT,
    "ports collide": Cause.WRONG_ENDPOINT,
    "rank without source": Cause.WRONG_ENDPOINT,
    "rank silent": Cause.EVENTS_OFF,
    "wrong rank": Cause.WRONG_ENDPOINT,
    "wrong topic": Cause.WRONG_ENDPOINT,
    "restarted": Cause.RESTART,
    "sequence jumps": Cause.GAP,
    "replay missing": Cause.GAP,
    "replay silent": Cause.GAP,
    "replay differs": Cause.GAP,
    "block size": Cause.BLOCK_SIZE,
    "tokens missing": Cause.HASH,
    "tokens and hashes": Cause.HASH,
    "windows": Cause.WINDOW,
    "groups unnamed": Cause.GROUP,
    "salt missing": Cause.SALT,
    "salt ignored": Cause.SALT,
    "LoRA unnamed": Cause.ADAPTER,
    "order of keys": Cause.SALT,
    "keys unknown": Cause.HASH,
    "other medium": Cause.TIER,
    "blocks missing": Cause.EVENTS_STOPPED,
    "not taken in": Cause.HASH,
}
"""The cause behind a finding of ``poolgrid engine-check``; the other kinds have none."""


LEAST_PARTED: Final = 4
"""Requests that must disagree before a fault is named: fewer are evictions in a burst of equal prompts."""

RUN: Final = 5
"""Requests with reuse that disagree one after another, and are a fault however many agree afterwards: a cache that was
lost at once is whole again a few requests later."""

RECENT: Final = 32
"""Requests with reuse over which the share of disagreeing tokens is taken: a healed worker is soon acquitted."""

PARTED_ABOVE: Final = 0.2
"""Share of tokens in dispute that is a fault. Pools without faults stay below 0.02 even where caches thrash."""

LENGTHS_DIFFER_ABOVE: Final = 0.1
"""Share of requests whose prompt length the engine reports differently that is a fault: lengths are exact."""

ANNOUNCED_BELOW: Final = 0.5
"""Mean announced share of earlier prompts below which events are missing or cannot be matched."""

FOREIGN_ABOVE: Final = 0.25
"""Share of other clients' requests on a worker, and of tokens lost to eviction, from which they explain the loss."""

COLD_BELOW: Final = 0.05
"""Share of prompt tokens sent before, below which there is nothing to reuse."""

DISTINCT_REUSES: Final = 3
"""Different reported reuses that show the block size of an engine by their greatest common divisor."""


class ReuseVerdict(msgspec.Struct, frozen=True):
    """What is the matter with one worker."""

    worker: str
    cause: Cause
    evidence: tuple[str, ...]
    """What was seen, a sentence each."""
    first_request: str = ""
    """The first request of the window whose reuse parted from what was promised."""
    requests: int = 0
    promised_tokens: int = 0
    reported_tokens: int = 0


@dataclass(frozen=True)
class _Figures:
    """What rules look at."""

    given: WorkerEvidence

    def is_parted(self, each: Observation) -> bool:
        """A block more or less is none: engines compute the last tokens of a prompt again."""
        return abs(each.promised_tokens - each.reported_tokens) > self.given.block_size

    @cached_property
    def lengths_differ(self) -> list[Observation]:
        # Media become tokens by rules of the engine, so lengths of such prompts prove nothing.
        return [
            each
            for each in self.given.observations
            if each.reported_isl not in (None, each.isl) and each.domain != "media"
        ]

    @cached_property
    def warm(self) -> list[Observation]:
        return [each for each in self.given.observations if each.promised_tokens or each.reported_tokens]

    @cached_property
    def all_parted(self) -> list[Observation]:
        return [each for each in self.warm if self.is_parted(each)]

    @cached_property
    def parted(self) -> list[Observation]:
        """Requests that disagree, where they are too many for chance; empty where they are not."""
        groups = [self.warm[-RECENT:]]
        groups += [[each for each in self.warm if each.domain == domain][-RECENT:] for domain in ("salt", "adapter")]
        for group in groups:
            parted = [each for each in group if self.is_parted(each)]
            disputed = sum(abs(each.promised_tokens - each.reported_tokens) for each in parted)
            base = sum(max(each.promised_tokens, each.reported_tokens) for each in group)
            if len(parted) >= LEAST_PARTED and disputed > PARTED_ABOVE * base:
                return parted
        run: list[Observation] = []
        for each in self.warm:
            run = [*run, each] if self.is_parted(each) else []
            if len(run) >= RUN:
                return run
        return []

    @cached_property
    def is_under(self) -> bool:
        """Whether the worker reused more than was promised; else less."""
        return sum(each.reported_tokens - each.promised_tokens for each in self.parted) > 0

    @cached_property
    def is_announced(self) -> bool:
        """Whether the index holds what the worker computed a moment ago; true where that is not known."""
        if not self.given.held_blocks:
            return False
        shares = [each.announced for each in self.parted if each.announced is not None]
        return not shares or sum(shares) / len(shares) >= ANNOUNCED_BELOW

    @cached_property
    def engine_block_size(self) -> int:
        """Return the block size that the reported reuses imply; 0 = they are too few."""
        reuses = {each.reported_tokens for each in self.given.observations if each.reported_tokens}
        return gcd(*reuses) if len(reuses) >= DISTINCT_REUSES else 0

    @cached_property
    def is_lasting(self) -> bool:
        """Whether prefixes are overpromised again after the worker computed them again, or from the beginning on."""
        over = [each for each in self.all_parted if each.promised_tokens > each.reported_tokens]
        again = len(over) - len({each.prefix for each in over})
        if again >= 2 or not over:
            return again >= 2
        first = self.warm.index(over[0])
        before = self.given.agreed_requests - sum(not self.is_parted(each) for each in self.warm[first:])
        return before < LEAST_PARTED

    def only_in(self, domain: str) -> bool:
        """Return whether only requests of a domain disagree, and others agree, or it reused what it was never sent."""
        if any(each.domain != domain for each in self.parted):
            return False
        others = sum(each.domain != domain and not self.is_parted(each) for each in self.warm)
        beyond = sum(each.reported_tokens > each.seen_tokens + self.given.block_size for each in self.parted)
        return others >= 2 or 2 * beyond >= len(self.parted)

    @cached_property
    def foreign_share(self) -> float:
        started = self.given.own_requests + self.given.foreign_requests
        return self.given.foreign_requests / started if started else 0.0

    @cached_property
    def evicted_share(self) -> float:
        """Return the share of tokens sent before that no promise covered."""
        seen = sum(each.seen_tokens for each in self.given.observations)
        lost = sum(max(0, each.seen_tokens - each.promised_tokens) for each in self.given.observations)
        return lost / seen if seen else 0.0

    @cached_property
    def seen_share(self) -> float:
        prompt = sum(each.isl for each in self.given.observations)
        return sum(each.seen_tokens for each in self.given.observations) / prompt if prompt else 0.0


def _lengths(figures: _Figures) -> bool:
    differ = figures.lengths_differ
    return len(differ) >= LEAST_PARTED and len(differ) > LENGTHS_DIFFER_ABOVE * len(figures.given.observations)


def _are_cut(figures: _Figures) -> bool:
    """All that differ are cut to one length, which no prompt exceeds."""
    lengths = Counter(each.reported_isl for each in figures.lengths_differ)
    longest = max(each.reported_isl or 0 for each in figures.given.observations)
    return len(lengths) == 1 and longest in lengths and all(each.isl > longest for each in figures.lengths_differ)


def _by_a_constant(figures: _Figures) -> bool:
    """Prompts of different lengths differ by one number of tokens."""
    differ = figures.lengths_differ
    return len({(each.reported_isl or 0) - each.isl for each in differ}) == 1 and len({each.isl for each in differ}) > 1


_RULES: Final[tuple[tuple[Cause, Callable[[_Figures], bool]], ...]] = (
    (Cause.EVENTS_UNFIT, lambda f: bool(f.given.events_fault)),
    (Cause.TRUNCATED, lambda f: _lengths(f) and _are_cut(f)),
    (Cause.TEMPLATE, lambda f: _lengths(f) and _by_a_constant(f)),
    (Cause.TOKENIZER, _lengths),
    (
        Cause.FOREIGN,
        lambda f: (
            len(f.given.observations) >= LEAST_PARTED
            and f.foreign_share > FOREIGN_ABOVE
            and max(f.evicted_share, PARTED_ABOVE * bool(f.parted)) >= PARTED_ABOVE
            and f.seen_share > COLD_BELOW
            and not (f.parted and f.is_under)
        ),
    ),
    (Cause.COLD, lambda f: not f.parted and len(f.given.observations) >= LEAST_PARTED and f.seen_share < COLD_BELOW),
    (Cause.UNKNOWN, lambda f: not f.parted and len(f.warm) < LEAST_PARTED),
    (Cause.AGREES, lambda f: not f.parted),
    (Cause.WRONG_ENDPOINT, lambda f: not f.given.was_live),
    # A worker takes back all that it reported when it has lost events; an engine that cleared its cache reuses nothing.
    (Cause.GAP, lambda f: f.given.stream in ("stale", "replaying") or (f.given.was_cleared and f.is_under)),
    (Cause.RESTART, lambda f: f.given.steps_fell or (f.given.epochs > 1 and f.is_under)),
    (Cause.SALT, lambda f: f.only_in("salt")),
    (Cause.ADAPTER, lambda f: f.only_in("adapter")),
    (Cause.EVENTS_STOPPED, lambda f: f.is_under and not f.is_announced and f.given.agreed_requests >= LEAST_PARTED),
    (
        Cause.BLOCK_SIZE,
        lambda f: f.is_under and not f.is_announced and f.engine_block_size not in (0, f.given.block_size),
    ),
    (Cause.EVENTS_OFF, lambda f: f.is_under and not f.is_announced and f.given.held_blocks == 0),
    (Cause.HASH, lambda f: f.is_under and not f.is_announced),
    (Cause.WINDOW, lambda f: f.given.has_windows and (f.is_under or f.is_lasting)),
    (Cause.TIER, lambda f: f.is_under),
    (Cause.GROUP, lambda f: f.is_lasting),
    (Cause.ASLEEP, lambda f: f.given.agreed_requests >= LEAST_PARTED),
    (Cause.UNEXPLAINED, lambda f: True),
)


def diagnose(evidence: WorkerEvidence) -> ReuseVerdict:
    """Return the verdict on a worker."""
    figures = _Figures(evidence)
    cause = next(cause for cause, fits in _RULES if fits(figures))
    parted = figures.lengths_differ if cause in _OF_LENGTHS else figures.all_parted if cause.is_fault else []
    return ReuseVerdict(
        evidence.worker,
        cause,
        tuple(_words(figures, cause, parted)),
        parted[0].request_id if parted else "",
        len(evidence.observations),
        sum(each.promised_tokens for each in evidence.observations),
        sum(each.reported_tokens for each in evidence.observations),
    )


_OF_LENGTHS = (Cause.TRUNCATED, Cause.TEMPLATE, Cause.TOKENIZER)


def _words(figures: _Figures, cause: Cause, parted: Sequence[Observation]) -> list[str]:
    given = figures.given
    observations = given.observations
    promised = sum(each.promised_tokens for each in observations)
    reported = sum(each.reported_tokens for each in observations)
    words = [f"{len(observations)} requests: {promised:,} tokens promised, {reported:,} reported as reused"]
    if parted:
        first = parted[0]
        words.append(
            f"first difference: request {first.request_id}, {first.promised_tokens:,} tokens promised and "
            f"{first.reported_tokens:,} reported; {len(parted)} requests since"
        )
    if cause in _OF_LENGTHS:
        words.append(f"prompt of {parted[0].isl:,} tokens at the router, {parted[0].reported_isl:,} at the engine")
    if given.events_fault:
        words.append(given.events_fault)
    if given.stream != "live":
        words.append(
            f"its event stream is {given.stream}" + (f": {given.stream_reason}" if given.stream_reason else "")
        )
    if cause is Cause.BLOCK_SIZE:
        words.append(
            f"reported reuse is in multiples of {figures.engine_block_size} tokens, blocks have {given.block_size}"
        )
    if cause.is_fault and not figures.is_announced:
        words.append("blocks of prompts that it computed earlier are not in the index")
    if cause is Cause.FOREIGN:
        words.append(
            f"{given.foreign_requests:,} of {given.own_requests + given.foreign_requests:,} started requests were not "
            f"sent by this router; {figures.evicted_share:.0%} of the tokens sent before are evicted"
        )
    if cause in (Cause.COLD, Cause.UNKNOWN, Cause.AGREES):
        words.append(f"{figures.seen_share:.0%} of the prompt tokens had been sent before")
    if cause.is_fault:
        words.append(f"{given.held_blocks:,} blocks in the index")
    return words
