"""What one tenant does changes nothing that another can see of a cache: not by being there, nor by pushing out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.requests.inference import WHOLE, CacheShares, InferenceRequest
from poolgrid.kernel.wire.hashing import hash_seed
from poolgrid.kernel.wire.multimodal import MediaItem, MediaKind
from poolgrid.kernel.wire.requests import Sampling
from poolgrid.server.frontend.media.loader import MediaCache
from poolgrid.server.frontend.tokenization import SegmentCache
from poolgrid.server.process.caches import BudgetedLru, TenantCaches
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.serving.prompt_paths import TenantPaths

SHARES = CacheShares(3, 1)


class Use(NamedTuple):
    """One request, as far as caches see it."""

    tenant: str
    salt: str
    what: int
    """Which of a few texts, prompts or pictures."""


uses = st.lists(
    st.builds(Use, st.sampled_from(("a", "b", "c")), st.sampled_from(("", "s")), st.integers(0, 29)), max_size=80
)

Observed = list[tuple[Use, int]]
"""Each use with the work that it took, which is what its time depends on."""


def segments(seen: Sequence[Use], shared: bool = False) -> Observed:
    """Segments of 8 KB; a part holds sixteen."""
    caches = TenantCaches(3 * 16 * 16_900, SegmentCache)
    observed: Observed = []
    for use in seen:
        cache = caches.of("", SHARES) if shared else caches.of(use.tenant, SHARES)
        assert cache is not None
        salt = "" if shared else use.salt
        text = chr(65 + use.what) * 8_000
        known = cache.get(text, salt)
        if known is None:
            cache.keep(text, bytes(8_000), salt)
        observed.append((use, known is None))
        assert sum(each.used_bytes for each in caches) <= 3 * 16 * 16_900
    return observed


def paths(seen: Sequence[Use], shared: bool = False) -> Observed:
    """Prompts of two stretches and more, that share their beginnings by threes, and of which a part holds a few."""
    caches = TenantPaths(3 * 40_000)
    observed: Observed = []
    for use in seen:
        tokens = b"".join(token.to_bytes(4, "little") for token in range(use.what % 3, 70 * 16 + 40 * use.what))
        salt = "" if shared else f"{use.tenant} {use.salt}"
        tenant = "" if shared else use.tenant
        request = InferenceRequest("r", "m", tokens, Sampling(1), cache_salt=salt, tenant=tenant, cache_shares=SHARES)
        cache = caches.of(request)
        before = cache.reused_blocks
        path = cache.path(tokens, 16, hash_seed("", salt))
        observed.append((use, len(path) - (cache.reused_blocks - before)))
        assert cache.used_bytes <= 40_000
    return observed


def media(seen: Sequence[Use], shared: bool = False) -> Observed:
    """Pictures of 1 KB in a cache that holds four of a tenant's; the work is a fetch."""
    caches = TenantCaches(3 * 4_096, lambda bytes_max: MediaCache(bytes_max, 60_000, SystemClock()))
    observed: Observed = []

    async def run() -> None:
        for use in seen:
            cache = caches.of("", SHARES) if shared else caches.of(use.tenant, SHARES)
            assert cache is not None
            fetched: list[int] = []

            async def fetch(what: int = use.what, fetched: list[int] = fetched) -> MediaItem:
                fetched.append(what)
                return MediaItem(MediaKind.IMAGE, bytes(1_000), "image/png", b"")

            await cache.get(("" if shared else use.salt, "image", f"http://media.test/{use.what}"), fetch)
            observed.append((use, len(fetched)))
            assert sum(each.held for each in caches) <= 3 * 4_096

    asyncio.run(run())
    return observed


CACHES: tuple[Callable[..., Observed], ...] = (segments, paths, media)


@pytest.mark.parametrize("cache", CACHES)
@given(seen=uses)
def test_the_work_of_a_tenants_requests_is_the_same_without_those_of_others(
    cache: Callable[..., Observed], seen: list[Use]
) -> None:
    whole = cache(seen)

    for tenant in ("a", "b", "c"):
        alone = cache([use for use in seen if use.tenant == tenant])
        assert [each for each in whole if each[0].tenant == tenant] == alone


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_that_tenants_share_would_be_found_out(cache: Callable[..., Observed]) -> None:
    """The old behaviour, planted: by being there, and by pushing out."""
    asked, sent = Use("a", "", 3), Use("b", "", 3)
    others = [Use("b", "", what) for what in range(1, 30, 3)] + [Use("b", "", what) for what in range(2, 30, 3)]

    def of_a(*seen: Use) -> list[int]:
        return [work for use, work in cache(seen, shared=True) if use.tenant == "a"]

    assert of_a(asked) != of_a(sent, asked)
    assert of_a(asked, asked) != of_a(asked, *others * 3, asked)


def test_parts_are_equal_and_together_no_more_than_the_budget() -> None:
    made: list[int] = []

    def make(budget_bytes: int) -> object:
        made.append(budget_bytes)
        return object()

    caches = TenantCaches(1_000, make)
    for tenant in ("a", "b", "c", "one more than there are"):
        caches.of(tenant, SHARES)
        caches.of(tenant, SHARES)

    assert made == [333, 333, 333]
    assert caches.of("one more than there are", SHARES) is None


def test_a_new_edition_of_the_tenants_begins_with_empty_caches_and_ends_the_old() -> None:
    ended: list[object] = []
    caches = TenantCaches(1_000, lambda budget: [budget], ended.append)
    first, again = caches.of("a", SHARES), caches.of("a", CacheShares(3, 1))
    changed = CacheShares(2, 2)
    second = caches.of("a", changed)

    assert first is again
    assert (second, ended) == ([500], [[333]])
    assert caches.of("a", SHARES) is None, "a request that began before the change keeps nothing"
    assert caches.of("a", WHOLE) is None, "nor does one that nobody said whose it is"
    assert caches.of("a", None) is None
    assert caches.of("a", changed) is second


BUDGET = 10
steps = st.lists(st.tuples(st.sampled_from(["keep", "get", "drop", "clear"]), st.integers(0, 5), st.integers(1, 12)))


@given(steps)
def test_it_keeps_what_a_naive_list_keeps(steps: list[tuple[str, int, int]]) -> None:
    gone: list[tuple[int, int]] = []
    lru: BudgetedLru[int, int] = BudgetedLru(BUDGET, lambda key, size: size, lambda key, size: gone.append((key, size)))
    naive: list[tuple[int, int]] = []
    left: list[tuple[int, int]] = []
    for what, key, size in steps:
        there = [entry for entry in naive if entry[0] == key]
        if what == "get":
            assert lru.get(key) == (there[0][1] if there else None)
            naive = [entry for entry in naive if entry[0] != key] + there
        elif what == "drop":
            lru.drop(key)
            naive = [entry for entry in naive if entry[0] != key]
            left += there
        elif what == "clear":
            lru.clear()
            naive = []
        else:
            assert lru.keep(key, size) == (size <= BUDGET)
            if size <= BUDGET:
                naive = [*(entry for entry in naive if entry[0] != key), (key, size)]
                left += there
                while sum(each for _, each in naive) > BUDGET:
                    left.append(naive.pop(0))
        assert [(each, lru._kept[each]) for each in lru] == naive
        assert lru.used == sum(each for _, each in naive) <= BUDGET
        assert len(lru) == len(naive)
        assert gone == left
