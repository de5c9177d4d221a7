"""Brings in the media that a request names: all of them or none, each refused with its place in the body.

The media of one request are loaded side by side; the first refusal ends the others. Fetching is asynchronous; decoding
base64, reading files, hashing and looking at what came happens in threads of this loader, so that 50 MB delay no other
request.

One tenant's media by URL, fetched and checked, for a short time; one fetch for all its requests that ask at once.

Rules
    1. At most ``bytes_max`` bytes are kept; the least recently used go first. What is larger is not kept.
    2. An entry is valid for ``ttl_ms`` after its fetch ended; then it is fetched again.
    3. While a URL is being fetched, each request for it waits for that fetch. It continues while any request waits,
       and is cancelled when the last one has left. Its refusal is everyone's, and is not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from poolgrid.kernel.requests.inference import CacheDomain
from poolgrid.kernel.wire.multimodal import MediaItem, MediaKind, digest_media
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.media.addresses import AddressPolicy
from poolgrid.server.frontend.media.image_headers import check_image
from poolgrid.server.frontend.media.placeholders import check_embeddings
from poolgrid.server.frontend.media.references import LocalFiles, MediaReference, MediaRefused, decode_data_url, shown
from poolgrid.server.frontend.media.settings import (
    CACHE_BYTES,
    CACHE_TTL_MS,
    FETCH_TIMEOUT_MS,
    FETCHES_MAX,
    FILE_BYTES_MAX,
    ITEMS_MAX,
    REQUEST_BYTES_MAX,
    MediaSettings,
)
from poolgrid.server.process.caches import BudgetedLru, TenantCaches
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.instruments import Gauge
from poolgrid.server.process.tasks import cancel_all, owned

FETCH_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""A neighbouring cache answers in milliseconds, a far server in seconds; beyond the time-out there is nothing."""


class MediaMetrics:
    """The instruments of one loader, registered in ``registry``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        self.registry = registry
        self.loaded = counter(
            "poolgrid_frontend_media_loaded",
            "Media loaded, by source (`http`, `https`, `data`, `file`) and kind (`image`, `embeddings`).",
            ["source", "kind"],
        )
        self.loaded_bytes = counter("poolgrid_frontend_media_loaded_bytes", "Bytes of media loaded.", ["source"])
        self.uncounted = counter(
            "poolgrid_frontend_media_uncounted",
            "Media with an unknown number of tokens, by kind. Routing uses only the blocks before them, so "
            "equal images are not found in caches.",
            ["kind"],
        )
        self.refused = counter(
            "poolgrid_frontend_media_refused",
            "Media refused, by reason code. If `media_address_not_allowed` or `media_path_not_allowed` grows, "
            "a client tries to reach forbidden places.",
            ["reason"],
        )
        self.fetch_seconds = Histogram(
            "poolgrid_frontend_media_fetch_seconds",
            "Time to fetch one URL, from name lookup to last byte, redirects included. Part of TTFT.",
            buckets=FETCH_BUCKETS_S,
            registry=registry,
        )
        self.held_bytes = gauge(
            "poolgrid_frontend_media_held_bytes",
            "Memory of media of requests in flight. At 1 GiB the next request gets 429.",
        )
        self.cached_bytes = gauge("poolgrid_frontend_media_cached_bytes", "Memory of media cached by URL.")
        self.cache_lookups = counter(
            "poolgrid_frontend_media_cache_lookups",
            "URL look-ups: `hit`, `miss` (fetched) or `shared` (joined a fetch in flight).",
            ["outcome"],
        )


class MediaBudget:
    """The bytes of media that this process holds for requests in flight: all leases together.

    An addition that would exceed it is refused (429): nothing waits, because what would make room is the end of other
    answers.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0

    def lease(self, request_bytes_max: int) -> MediaLease:
        """Return an empty lease of at most ``request_bytes_max`` bytes."""
        return MediaLease(self, request_bytes_max)


class MediaLease:
    """What one request holds; closing it twice is harmless."""

    def __init__(self, budget: MediaBudget, bytes_max: int) -> None:
        self._budget = budget
        self._bytes_max = bytes_max
        self._held = 0
        self._closed = False

    def add(self, size: int) -> None:
        """Take ``size`` bytes more, or raise ``MediaRefused`` and take none."""
        if self._held + size > self._bytes_max:
            raise MediaRefused(
                "media_too_large",
                f"the media of the request have more than {self._bytes_max} bytes together, the limit",
            )
        if self._budget.held + size > self._budget.bytes_max:
            raise MediaRefused(
                "media_busy",
                f"media of other requests hold {self._budget.held} bytes of {self._budget.bytes_max} "
                "(media-memory-bytes); try again",
            )
        if not self._closed:
            self._held += size
            self._budget.held += size

    def close(self) -> None:
        self._budget.held -= self._held
        self._held = 0
        self._closed = True


@dataclass(slots=True)
class _Flight:
    task: asyncio.Task[MediaItem | MediaRefused]
    waiting: int = 0


Key = tuple[str, ...]
"""The salt of the request, what the medium was checked as, and its URL."""


class MediaCache:
    """Keeps media by key."""

    def __init__(
        self, bytes_max: int, ttl_ms: float, clock: Clock, on_lookup: Callable[[str], None] = lambda outcome: None
    ) -> None:
        """``on_lookup`` is called for each ``get``: hit, miss, or shared (the URL was being fetched already)."""
        self._on_lookup = on_lookup
        self._ttl_ms = ttl_ms
        self._clock = clock
        self._kept: BudgetedLru[Key, tuple[float, MediaItem]] = BudgetedLru(
            bytes_max, lambda key, entry: len(entry[1].data)
        )
        self._flights: dict[Key, _Flight] = {}

    @property
    def held(self) -> int:
        """Return the bytes kept."""
        return self._kept.used

    async def get(
        self, key: Key, fetch: Callable[[], Coroutine[Any, Any, MediaItem | MediaRefused]]
    ) -> MediaItem | MediaRefused:
        kept = self._kept.get(key)
        if kept is not None:
            if kept[0] > self._clock.monotonic_ms():
                self._on_lookup("hit")
                return kept[1]
            self._kept.drop(key)
        flight = self._flights.get(key)
        if flight is None:
            self._on_lookup("miss")
            flight = _Flight(owned(fetch(), "fetch of a medium"))
            self._flights[key] = flight
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        else:
            self._on_lookup("shared")
        flight.waiting += 1
        try:
            # Shielded: that one of several waiting clients leaves must not end the fetch for the others.
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._flights.pop(key, None)
                flight.task.cancel()

    async def close(self) -> None:
        await cancel_all([flight.task for flight in self._flights.values()])
        self._kept.clear()

    def _landed(self, key: Key, task: asyncio.Task[MediaItem | MediaRefused]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
        # ``exception`` also marks it as seen, for the case that everyone left in the same turn.
        if task.cancelled() or task.exception() is not None:
            return
        medium = task.result()
        if isinstance(medium, MediaItem) and self._ttl_ms > 0:
            self._kept.keep(key, (self._clock.monotonic_ms() + self._ttl_ms, medium))


if TYPE_CHECKING:
    from poolgrid.server.frontend.media.fetcher import MediaFetcher, Resolver

THREADS = 2
"""Hashing runs at gigabytes per second; two threads keep one large file from holding up the small ones."""

RETRY_AFTER_S = 1


class MediaLoader:
    """Loads media; ``close`` ends its connections and threads."""

    def __init__(
        self,
        settings: MediaSettings,
        metrics: MediaMetrics,
        clock: Clock,
        resolver: Resolver | None = None,
        fetch_timeout_ms: int = FETCH_TIMEOUT_MS,
        file_bytes_max: int = FILE_BYTES_MAX,
        items_max: int = ITEMS_MAX,
    ) -> None:
        self._fetch_timeout_ms = fetch_timeout_ms
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._file_bytes_max = file_bytes_max
        self._items_max = items_max
        self._policy = AddressPolicy(settings.media_allowed_networks)
        self._resolver = resolver
        self._fetcher: MediaFetcher | None = None
        path = settings.allowed_local_media_path
        self._files = LocalFiles(path) if path is not None else None
        self._caches = TenantCaches(CACHE_BYTES, self._new_cache)
        self._budget = MediaBudget(settings.media_memory_bytes)
        self._turn = asyncio.Semaphore(FETCHES_MAX)
        self._threads: ThreadPoolExecutor | None = None
        metrics.held_bytes.set_function(lambda: self._budget.held)
        metrics.cached_bytes.set_function(lambda: sum(cache.held for cache in self._caches))

    def lease(self) -> MediaLease:
        """Return what the media of one request are charged to; the caller closes it when the request has ended."""
        return self._budget.lease(REQUEST_BYTES_MAX)

    async def load(
        self,
        references: Sequence[MediaReference],
        lease: MediaLease,
        domain: CacheDomain | None,
        item_bytes_max: int = 0,
    ) -> tuple[MediaItem, ...]:
        """Return the media in the order of their references; raises ``RequestError``.

        What is fetched is shared within ``domain``; without one it is fetched for this request alone, and not kept.
        ``item_bytes_max`` is what the model's workers allow for one; 0 = as much as this server does.
        """
        limit = self._items_max
        if len(references) > limit:
            raise self._error(
                references[limit].param,
                MediaRefused("media_too_many", f"the request has {len(references)} media, allowed are at most {limit}"),
            )
        bytes_max = min(self._file_bytes_max, item_bytes_max or self._file_bytes_max)
        loaded = await self._side_by_side(references, lease, domain, bytes_max)
        if isinstance(loaded, RequestError):
            try:
                raise loaded
            finally:
                del loaded  # or this frame and the error would hold each other
        return loaded

    async def _side_by_side(
        self, references: Sequence[MediaReference], lease: MediaLease, domain: CacheDomain | None, bytes_max: int
    ) -> tuple[MediaItem, ...] | RequestError:
        tasks = [owned(self._item(reference, lease, domain, bytes_max), reference.param) for reference in references]
        try:
            for done in asyncio.as_completed(tasks):
                loaded = await done
                if isinstance(loaded, RequestError):
                    return loaded
            return tuple(item for task in tasks if isinstance(item := task.result(), MediaItem))
        finally:
            # Nothing of a request outlives it: also what is being cancelled is waited for.
            await cancel_all(tasks)

    async def close(self) -> None:
        for cache in self._caches:
            await cache.close()
        if self._fetcher is not None:
            await self._fetcher.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    async def _item(
        self, reference: MediaReference, lease: MediaLease, domain: CacheDomain | None, bytes_max: int
    ) -> MediaItem | RequestError:
        try:
            medium = await self._medium(reference, domain, bytes_max)
            if isinstance(medium, MediaRefused):
                return self._error(reference.param, medium)
            lease.add(len(medium.data))
        except MediaRefused as refusal:
            return self._error(reference.param, refusal)
        self._metrics.loaded.labels(reference.source, reference.kind.value).inc()
        self._metrics.loaded_bytes.labels(reference.source).inc(len(medium.data))
        return medium

    async def _medium(
        self, reference: MediaReference, domain: CacheDomain | None, bytes_max: int
    ) -> MediaItem | MediaRefused:
        if reference.source == "file":
            if self._files is None:
                raise MediaRefused(
                    "media_path_not_allowed",
                    f"{reference.shown} is a local file: none are read here (allowed-local-media-path is not set)",
                )
            return await self._in_thread(partial(self._read_file, self._files, reference, bytes_max))
        if reference.source not in self._settings.media_allowed_schemes:
            raise MediaRefused(
                "media_scheme_not_allowed",
                f"{shown(reference.url)} has the scheme {reference.source!r}: allowed are "
                f"{', '.join(self._settings.media_allowed_schemes)}",
            )
        if reference.source == "data":
            return await self._in_thread(partial(self._read_data, reference, bytes_max))
        cache = None if domain is None else self._caches.of(domain.tenant, domain.shares)
        if cache is None or domain is None:
            return await self._fetch(reference, bytes_max)
        # Models that allow different sizes share nothing: what one refuses may be there for another.
        key = (domain.salt, f"{reference.kind.value} {bytes_max}", reference.url)
        return await cache.get(key, lambda: self._fetch(reference, bytes_max))

    def _new_cache(self, bytes_max: int) -> MediaCache:
        def note(outcome: str) -> None:
            self._metrics.cache_lookups.labels(outcome).inc()

        return MediaCache(bytes_max, CACHE_TTL_MS, self._clock, note)

    async def _fetch(self, reference: MediaReference, bytes_max: int) -> MediaItem | MediaRefused:
        """Fetch and check one URL, on the budget while it is in progress."""
        transit = self._budget.lease(bytes_max)
        try:
            await self._take_turn()
            try:
                fetcher = await self._opened()
                began_ms = self._clock.monotonic_ms()
                data = await fetcher.fetch(reference.url, bytes_max, transit.add)
                self._metrics.fetch_seconds.observe((self._clock.monotonic_ms() - began_ms) / 1000)
            finally:
                self._turn.release()
            return await self._in_thread(partial(self._check, reference, data))
        except MediaRefused as refusal:
            return refusal.alone()
        finally:
            transit.close()

    async def _opened(self) -> MediaFetcher:
        """Return what fetches, made with the first URL: its library is slow to import, and most processes see none."""
        if self._fetcher is None:
            made = await asyncio.to_thread(self._new_fetcher)
            # Another request may have been first; what was made has no connection yet.
            self._fetcher = self._fetcher or made
        return self._fetcher

    def _new_fetcher(self) -> MediaFetcher:
        from poolgrid.server.frontend.media.fetcher import MediaFetcher, resolve

        return MediaFetcher(
            self._policy,
            schemes=self._settings.media_allowed_schemes,
            timeout_ms=self._fetch_timeout_ms,
            resolver=self._resolver or resolve,
        )

    async def _take_turn(self) -> None:
        try:
            async with asyncio.timeout(self._fetch_timeout_ms / 1000):
                await self._turn.acquire()
        except TimeoutError:
            raise MediaRefused(
                "media_busy",
                f"{FETCHES_MAX} media are being fetched, the limit, and none ended "
                f"within {self._fetch_timeout_ms} ms; try again",
            ) from None

    async def _in_thread(self, work: Callable[[], MediaItem]) -> MediaItem | MediaRefused:
        def done() -> MediaItem | MediaRefused:
            try:
                return work()
            except MediaRefused as refusal:
                return refusal.alone()

        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "media")
        return await asyncio.get_running_loop().run_in_executor(self._threads, done)

    def _read_file(self, files: LocalFiles, reference: MediaReference, bytes_max: int) -> MediaItem:
        return self._check(reference, files.read(reference.url, bytes_max))

    def _read_data(self, reference: MediaReference, bytes_max: int) -> MediaItem:
        return self._check(reference, decode_data_url(reference.url, bytes_max))

    def _check(self, reference: MediaReference, data: bytes) -> MediaItem:
        if reference.kind is MediaKind.EMBEDDINGS:
            return MediaItem(reference.kind, data, check_embeddings(data), digest_media(data))
        image = check_image(data)
        hashed = digest_media(data)
        return MediaItem(reference.kind, data, image.media_type, hashed, width=image.width, height=image.height)

    def note_places(self, items: Sequence[MediaItem]) -> None:
        """Count the media of a request whose tokens cannot be counted: routing goes by what stands before them."""
        for item in items:
            if not item.token_count:
                self._metrics.uncounted.labels(item.kind.value).inc()

    def _error(self, param: str, refusal: MediaRefused) -> RequestError:
        self._metrics.refused.labels(refusal.code).inc()
        headers = ((b"retry-after", b"%d" % RETRY_AFTER_S),) if refusal.status == 429 else ()
        return RequestError(
            refusal.status, refusal.code, f"{param}: {refusal.message}. The request was not run.",
            param=param, headers=headers,
        )  # fmt: skip
