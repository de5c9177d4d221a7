"""How long a request's KV blocks stay cached: from what clients write to what workers are told."""

from __future__ import annotations

from poolgrid.frontend.errors import invalid, quoted, unsupported
from poolgrid.frontend.schema import KvCacheRetention
from poolgrid.wire.requests import KvRetention, RetainedTokens

PARAM = "nvext.kv_cache_retention_config"
WHERE_KV_GOES = ("transfer_mode", "directory")


def check_retention(asked: KvCacheRetention) -> KvRetention:
    """Return what a client asks for, ranges in order; raises ``RequestError``."""
    for name in WHERE_KV_GOES:
        value = getattr(asked, name)
        if value is not None:
            raise unsupported(
                f"{PARAM}.{name}", f"where KV is offloaded to is for operators to say (got {quoted(value)})"
            )
    ranges = sorted(asked.token_range_retention_configs, key=lambda each: each.token_start)
    made = KvRetention(
        tuple(RetainedTokens(each.token_start, each.token_end, each.priority, each.duration_ms) for each in ranges),
        asked.decode_retention_priority,
        asked.decode_duration_ms,
    )
    if made.fault:
        param = f"{PARAM}.token_range_retention_configs"
        raise invalid(
            param, f"{param}: by their starts, {made.fault}; allowed are ranges that do not overlap. Not run."
        )
    return made


def for_prompt(retention: KvRetention, isl: int) -> KvRetention:
    """Return what a prompt of ``isl`` tokens needs of it, with an end for every range.

    A request that moves has output behind its prompt, and the output is not part of a range that goes to the end.
    """
    ranges = tuple(
        RetainedTokens(each.start, min(isl, isl if each.end is None else each.end), each.priority, each.duration_ms)
        for each in retention.ranges
        if each.start < isl
    )
    return KvRetention(ranges, retention.decode_priority, retention.decode_duration_ms)
