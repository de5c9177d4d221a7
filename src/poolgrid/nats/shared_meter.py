"""What a tenant has used at one of several routers, each of which may grant a share of its limits.

Rules
    1. A limit is this router's share of it, which may change at any time, and may be nothing. What was used stays used,
       and what comes with a share as used up is charged.
    2. What is asked for beyond a share is refused, and noted: it is what this router wants more for.
    3. What is wanted is what was used within the last ten seconds or so, and twice what there is after a refusal.

A meter of the kind that is alone has none of this (``poolgrid.frontend.access.meter``).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from poolgrid.frontend.access.key_file import Tenant
from poolgrid.frontend.access.meter import MINUTE_MS, Meter, Rate, RateDecision, TokenBucket
from poolgrid.nats.limit_shares import IN_FLIGHT, KINDS, NOTHING, Amounts, Use, limits_of

WINDOW_MS = 5_000.0
"""What was used counts for one to two of these."""

NO_SHARE_WAIT_S = 1.0
"""When to ask again where there is no share: others give what they can spare within two looks, which is a second."""

_KIND = {Rate.REQUESTS: 1, Rate.TOKENS: 2}


class SharedMeter(Meter):
    """The figures of one tenant at this router. ``note`` is called when something was asked of it."""

    __slots__ = ("_before", "_limited", "_note", "_now", "_owed", "_rules", "_since_ms", "shares")

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self.shares: Amounts = NOTHING
        self._note = note
        self._rules: Tenant | None = None
        self._limited: Tenant | None = None
        self._now, self._before = _Window(), _Window()
        self._since_ms = 0.0
        self._owed = 0.0
        """Tokens that were used while there was no share to charge."""

    # What others give and take

    def grant(self, shares: Amounts, charged: Amounts, now_ms: float) -> None:
        """Go by other shares from now on; ``charged`` is used up of them already, or given back where it is less."""
        if shares == self.shares and charged == NOTHING:
            return
        self.shares, self._rules = shares, None
        for rate in Rate:
            share, more = shares[_KIND[rate]], float(charged[_KIND[rate]])
            bucket = self._buckets[rate]
            if rate is Rate.TOKENS:
                more += self._owed
                self._owed = 0.0 if share else more
            if not share:
                self._buckets[rate] = TokenBucket()
                continue
            bucket = bucket.resized(share, now_ms)
            # What is given back is never more than was used.
            self._buckets[rate] = bucket.charged(max(more, -bucket.used(now_ms)), now_ms)

    def use_of(self, rules: Tenant, now_ms: float) -> Use:
        if now_ms - self._since_ms >= WINDOW_MS:
            is_long_ago = now_ms - self._since_ms >= 2 * WINDOW_MS
            self._before, self._now = (_Window() if is_long_ago else self._now), _Window()
            self._now.peak = self.in_flight
            self._since_ms = now_ms
        now, before = self._now, self._before
        per_minute = MINUTE_MS / (WINDOW_MS + now_ms - self._since_ms)
        needed = [max(now.peak, before.peak, self.in_flight)]
        needed += [int((now.taken[rate] + before.taken[rate]) * per_minute * 5 / 4) for rate in Rate]
        limits = limits_of(rules)
        wants = [
            min(limits[kind], 2 * max(needed[kind], self.shares[kind]) + 1)
            if now.refused[kind] or before.refused[kind]
            else min(limits[kind], needed[kind])
            for kind in KINDS
        ]
        used = [int(self._buckets[rate].used(now_ms)) for rate in Rate]
        return Use(self.in_flight, (wants[0], wants[1], wants[2]), (0, used[0], used[1]))

    @property
    def is_quiet(self) -> bool:
        return not self.in_flight and self._now.is_empty and self._before.is_empty

    # What tenants ask

    def begin(self, rules: Tenant, now_ms: float) -> RateDecision:
        """Count a request in, unless it would be one too many at a time or in its minute."""
        self._note()
        limited = self._of_share(rules)
        verdict = super().begin(limited, now_ms)
        if verdict.is_full:
            self._now.refused[IN_FLIGHT] = True
            return verdict._replace(share=limited.concurrent_requests)
        self._now.peak = max(self._now.peak, self.in_flight)
        return verdict

    def end(self, rules: Tenant, output_tokens: int, now_ms: float) -> None:
        super().end(self._of_share(rules), output_tokens, now_ms)

    def standing(self, rules: Tenant, now_ms: float) -> list[tuple[Rate, TokenBucket, float]]:
        limited = self._of_share(rules)
        limits = (limited.requests_per_minute, limited.tokens_per_minute)
        return [
            (rate, self._buckets[rate].resized(limit, now_ms), now_ms)
            for rate, limit in zip(Rate, limits, strict=True)
            if limit
        ]

    def take_tokens(self, rules: Tenant, tokens: int, now_ms: float) -> float:
        return super().take_tokens(self._of_share(rules), tokens, now_ms)

    def give_back_tokens(self, rules: Tenant, tokens: int, now_ms: float) -> None:
        super().give_back_tokens(self._of_share(rules), tokens, now_ms)

    def _of_share(self, rules: Tenant) -> Tenant:
        if rules is not self._rules or self._limited is None:
            self._rules = rules
            here = [min(limit, share) for limit, share in zip(limits_of(rules), self.shares, strict=True)]
            self._limited = msgspec.structs.replace(
                rules,
                concurrent_requests=None if rules.concurrent_requests is None else here[0],
                requests_per_minute=None if rules.requests_per_minute is None else here[1],
                tokens_per_minute=None if rules.tokens_per_minute is None else here[2],
            )
        return self._limited

    def _take(self, rate: Rate, amount: float, per_minute: int, now_ms: float) -> float:
        wait_s = super()._take(rate, amount, per_minute, now_ms) if per_minute else NO_SHARE_WAIT_S
        if wait_s:
            self._now.refused[_KIND[rate]] = True
        else:
            self._now.taken[rate] += amount
        return wait_s

    def _charge(self, rules: Tenant, tokens: int, now_ms: float) -> None:
        self._now.taken[Rate.TOKENS] += tokens
        if rules.tokens_per_minute:
            super()._charge(rules, tokens, now_ms)
        else:
            self._owed += tokens


class _Window:
    __slots__ = ("peak", "refused", "taken")

    def __init__(self) -> None:
        self.peak = 0
        self.taken = [0.0, 0.0]
        self.refused = [False, False, False]

    @property
    def is_empty(self) -> bool:
        return not self.peak and not any(self.taken) and not any(self.refused)
