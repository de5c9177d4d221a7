"""What an answer says of its tenant's limits, in the headers of OpenAI's that clients and gateways slow down by."""

from __future__ import annotations

from collections.abc import Sequence

from poolgrid.frontend.access.meter import Rate, TokenBucket

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
