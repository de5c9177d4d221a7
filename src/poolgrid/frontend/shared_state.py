"""What the routers of a pool share in NATS: limits of tenants, and responses that clients may go on from."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from poolgrid.frontend.access.limits_on_nats import LimitsOnNats
from poolgrid.frontend.responses_api.store_on_nats import NatsResponseStore
from poolgrid.frontend.settings import FrontendSettings
from poolgrid.nats.nats_settings import NatsSettings
from poolgrid.process.clock import Clock


class Sharing(NamedTuple):
    """Who shares, and how."""

    scope: str
    """What routers of one pool agree on, and no others."""
    place: str
    """Where this router answers, if nobody else can answer there at the same time; empty = not known."""
    lease_s: int
    replicas: int


class SharedState(NamedTuple):
    """What one router shares with the others of its pool."""

    limits: LimitsOnNats
    responses: NatsResponseStore | None
    """``None`` where none are kept."""


def open_shared_state(
    opened: AsyncExitStack,
    nats: NatsSettings,
    frontend: FrontendSettings,
    sharing: Sharing,
    clock: Clock,
    registry: CollectorRegistry,
) -> SharedState:
    """Return what is shared, to be closed with ``opened``."""
    limits = LimitsOnNats(nats, sharing.scope, sharing.place, sharing.lease_s, sharing.replicas, clock, registry)
    opened.push_async_callback(limits.close)
    responses = None
    if frontend.response_store_bytes:
        responses = NatsResponseStore(
            nats,
            sharing.scope,
            frontend.response_store_bytes,
            frontend.response_store_ttl_s,
            sharing.replicas,
            clock,
        )
        responses.start()
        opened.push_async_callback(responses.disconnect)
    return SharedState(limits, responses)
