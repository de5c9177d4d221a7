"""What one tenant has used, and whether it may use more, in one process.

Rates come with each call, so that changed ones count from then on; what was used stays used. Times are arguments.

What an answer says of its tenant's limits, in the headers of OpenAI's that clients and gateways slow down by.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from poolgrid.server.frontend.access.key_file import Tenant

MINUTE_MS = 60_000.0

GRAIN_MS = 1.0
"""Waits below this are none: it is what the rounding of a million charges adds up to after half a year of uptime."""


class TokenBucket(NamedTuple):
    """One limit of one tenant at one time: it fills at a rate up to its size, and requests take from it.

    A request for at most what is in the bucket gets it. One for more than the bucket can hold gets it when
    the bucket is full; the bucket then owes the rest, and grants nothing until that is made up for. It holds one
    minute's worth: a client that was quiet may use its minute at once.
    """

    full_at_ms: float = 0.0
    """When it is full if nothing is taken until then; a time in the past means full."""
    per_minute: float = 0.0
    """Its rate, and its size; 0.0 = nothing was taken yet."""

    def used(self, now_ms: float) -> float:
        return max(0.0, self.full_at_ms - now_ms) / MINUTE_MS * self.per_minute

    def resized(self, per_minute: float, now_ms: float) -> TokenBucket:
        """Return the bucket with another rate from now on; what was used stays used."""
        if per_minute == self.per_minute:
            return self
        return TokenBucket(now_ms + self.used(now_ms) / per_minute * MINUTE_MS, per_minute)

    def wait_s(self, amount: float, now_ms: float) -> float:
        """Return how long it takes until ``amount`` may be taken; 0.0 = now."""
        missing = min(amount, self.per_minute) - (self.per_minute - self.used(now_ms))
        wait_ms = missing / self.per_minute * MINUTE_MS
        return wait_ms / 1000 if wait_ms > GRAIN_MS else 0.0

    def charged(self, amount: float, now_ms: float) -> TokenBucket:
        """Return the bucket without ``amount``, whatever is there; a negative one gives back."""
        full_at_ms = max(now_ms, self.full_at_ms) + amount / self.per_minute * MINUTE_MS
        return TokenBucket(full_at_ms, self.per_minute)


class Rate(IntEnum):
    """The buckets of a tenant; the value is the place of each."""

    REQUESTS = 0
    TOKENS = 1


class RateDecision(NamedTuple):
    """Whether a request may begin: it was counted when there was room and nothing to wait for."""

    in_flight: int
    """Requests in flight before it."""
    wait_s: float
    """Time until the next request is due; 0.0 = now."""
    is_full: bool = False
    """Whether it would have been one too many at a time."""


class Meter:
    """The figures of one tenant in this process."""

    __slots__ = ("_buckets", "in_flight")

    def __init__(self) -> None:
        self.in_flight = 0
        self._buckets = [TokenBucket() for _ in Rate]

    def begin(self, rules: Tenant, now_ms: float) -> RateDecision:
        """Count a request in, unless it would be one too many at a time or in its minute."""
        before = self.in_flight
        if rules.concurrent_requests is not None and before >= rules.concurrent_requests:
            return RateDecision(before, 0.0, True)
        per_minute = rules.requests_per_minute
        wait_s = 0.0 if per_minute is None else self._take(Rate.REQUESTS, 1, per_minute, now_ms)
        if wait_s == 0.0:
            self.in_flight += 1
        return RateDecision(before, wait_s)

    def end(self, rules: Tenant, output_tokens: int, now_ms: float) -> None:
        self.in_flight -= 1
        if rules.tokens_per_minute is not None and output_tokens > 0:
            self._charge(rules, output_tokens, now_ms)

    def standing(self, rules: Tenant, now_ms: float) -> list[tuple[Rate, TokenBucket, float]]:
        limits = (rules.requests_per_minute, rules.tokens_per_minute)
        return [
            (rate, self._buckets[rate].resized(limit, now_ms), now_ms)
            for rate, limit in zip(Rate, limits, strict=True)
            if limit is not None
        ]

    def take_tokens(self, rules: Tenant, tokens: int, now_ms: float) -> float:
        if rules.tokens_per_minute is None:
            return 0.0
        return self._take(Rate.TOKENS, tokens, rules.tokens_per_minute, now_ms)

    def give_back_tokens(self, rules: Tenant, tokens: int, now_ms: float) -> None:
        if rules.tokens_per_minute is not None and tokens > 0:
            self._charge(rules, -tokens, now_ms)

    def _take(self, rate: Rate, amount: float, per_minute: int, now_ms: float) -> float:
        bucket = self._buckets[rate].resized(per_minute, now_ms)
        wait_s = bucket.wait_s(amount, now_ms)
        if wait_s == 0.0:
            self._buckets[rate] = bucket.charged(amount, now_ms)
        return wait_s

    def _charge(self, rules: Tenant, tokens: int, now_ms: float) -> None:
        per_minute = rules.tokens_per_minute
        assert per_minute is not None, "only a limit is charged"
        self._buckets[Rate.TOKENS] = self._buckets[Rate.TOKENS].resized(per_minute, now_ms).charged(tokens, now_ms)


_NAMES = {Rate.REQUESTS: b"requests", Rate.TOKENS: b"tokens"}
_KINDS = (b"limit", b"remaining", b"reset")

LIMIT_HEADERS = tuple(f"x-ratelimit-{kind.decode()}-{_NAMES[rate].decode()}" for rate in Rate for kind in _KINDS)
"""All of them, by name."""

Standing = Sequence[tuple[Rate, TokenBucket, float]]
"""Each limit of a tenant, with its bucket and the time (ms) at which it was looked at."""


def limit_headers(standing: Standing) -> list[tuple[bytes, bytes]]:
    """Return the headers: the limit of a minute, what is left of it, and the time until all of it is there again."""
    headers: list[tuple[bytes, bytes]] = []
    for rate, bucket, now_ms in standing:
        name = _NAMES[rate]
        left = max(0, int(bucket.per_minute - bucket.used(now_ms)))
        headers += (
            (b"x-ratelimit-limit-" + name, b"%d" % bucket.per_minute),
            (b"x-ratelimit-remaining-" + name, b"%d" % left),
            (b"x-ratelimit-reset-" + name, _duration(max(0.0, bucket.full_at_ms - now_ms))),
        )
    return headers


def _duration(ms: float) -> bytes:
    """Return a time as OpenAI writes it: ``12ms``, ``1.5s``, ``6m0s``."""
    if ms < 1000:
        return b"%dms" % ms
    minutes, rest_ms = divmod(round(ms), 60_000)
    seconds = f"{rest_ms / 1000:g}s"
    return (f"{minutes}m{seconds}" if minutes else seconds).encode()
