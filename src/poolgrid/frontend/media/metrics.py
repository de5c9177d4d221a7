"""What is measured about media, under ``poolgrid_frontend_media_``."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram

from poolgrid.process.instruments import Gauge

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
