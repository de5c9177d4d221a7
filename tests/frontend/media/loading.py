"""A loader whose names resolve as a test says, and what it does with one URL."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from poolgrid.kernel.requests.inference import EVERYBODY, CacheDomain
from poolgrid.kernel.wire.multimodal import MediaItem
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.media.loader import MediaLoader, MediaMetrics
from poolgrid.server.frontend.media.references import MediaReference, MediaRefused, read_reference
from poolgrid.server.frontend.media.settings import FETCH_TIMEOUT_MS, ITEMS_MAX, MEGABYTE, MediaSettings
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.process.settings import with_constants

LOOPBACK = ("127.0.0.1/32",)
"""The one address that tests allow: 127.0.0.2 and the rest stay private."""


class Names:
    """A name service that answers from a table; several answers for a name are given one after the other."""

    def __init__(self, **table: Sequence[str]) -> None:
        self.table: dict[str, list[str]] = {"media.test": ["127.0.0.1"]}
        self.table.update({name.replace("_", "."): list(answers) for name, answers in table.items()})
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if host[0].isdigit() or ":" in host:
            return [host]
        answers = self.table.get(host)
        if not answers:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return (answers.pop(0) if len(answers) > 1 else answers[0]).split(",")


class Loading:
    def __init__(self, loader: MediaLoader, metrics: MediaMetrics) -> None:
        self.loader = loader
        self.metrics = metrics

    async def take(self, *urls: str, domain: CacheDomain | None = EVERYBODY) -> tuple[MediaItem, ...]:
        lease = self.loader.lease()
        try:
            return await self.loader.load([_reference(url, place) for place, url in enumerate(urls)], lease, domain)
        finally:
            lease.close()

    async def refused(self, *urls: str) -> RequestError:
        with pytest.raises((RequestError, MediaRefused)) as caught:
            await self.take(*urls)
        if isinstance(caught.value, MediaRefused):  # of a URL that is no reference
            return RequestError(caught.value.status, caught.value.code, caught.value.message)
        assert isinstance(caught.value, RequestError)
        labels = {"reason": caught.value.code}
        assert self.metrics.registry.get_sample_value("poolgrid_frontend_media_refused_total", labels)
        return caught.value


def _reference(url: str, place: int) -> MediaReference:
    return read_reference(url, f"messages[0].content[{place}].image_url.url")


@asynccontextmanager
async def loading(
    names: Names | None = None,
    fetch_timeout_ms: int = FETCH_TIMEOUT_MS,
    max_file_size_mb: int = 50,
    max_media_items: int = ITEMS_MAX,
    **settings: Any,
) -> AsyncIterator[Loading]:
    settings.setdefault("media_allowed_networks", LOOPBACK)
    metrics = MediaMetrics(CollectorRegistry())
    loader = MediaLoader(
        with_constants(MediaSettings, settings),
        metrics,
        SystemClock(),
        names or Names(),
        fetch_timeout_ms,
        max_file_size_mb * MEGABYTE,
        max_media_items,
    )
    try:
        yield Loading(loader, metrics)
        assert metrics.registry.get_sample_value("poolgrid_frontend_media_held_bytes") == 0
    finally:
        await loader.close()
