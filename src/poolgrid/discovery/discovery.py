"""A process among names: it registers, renews, and follows who else is there. The shell around ``registry``.

Rules
    1. What is registered is renewed three times per lease until ``close``, which takes it back. When that fails it is
       tried every ``RETRY_S``, and that is logged now and then.
    2. What is followed is looked for every ``look_s`` of the store. While that fails, what was known last holds.
    3. Names are for finding. A connection that stands is not ended because a name is gone.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from poolgrid.discovery.ports import DiscoveryUnavailable, RegistrationStore, Scope
from poolgrid.discovery.registry import Registry
from poolgrid.process.clock import Clock
from poolgrid.process.complaints import Complaints
from poolgrid.process.instruments import Counter
from poolgrid.process.tasks import Restart, cancel_all, supervised
from poolgrid.wire.answers import FleetList, NamedRow
from poolgrid.wire.names import EndpointName
from poolgrid.wire.registration import Registration, encode_registration

log = logging.getLogger(__name__)


class _RegistryCollector(Collector):
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        known = GaugeMetricFamily(
            "poolgrid_names_instances",
            "Registered processes that this process follows.",
            labels=["component"],
        )
        counts: dict[str, int] = {}
        for each in self._registry.instances():
            counts[each.component] = counts.get(each.component, 0) + 1
        for component in sorted(counts):
            known.add_metric([component], counts[component])
        yield known
        refused = GaugeMetricFamily(
            "poolgrid_names_refused_entries",
            "Invalid registrations; the log lists them.",
        )
        refused.add_metric([], self._registry.refused_count)
        yield refused


class DiscoveryMetrics:
    """Failures to write and read, and what is known."""

    def __init__(self, registry: CollectorRegistry | None, known: Registry) -> None:
        self.failures = Counter(
            "poolgrid_names_failures",
            "Failed attempts to register (write) or to read registrations (read).",
            ["operation"],
            registry=registry,
        )
        if registry is not None:
            registry.register(_RegistryCollector(known))


RETRY_S = 1.0
"""Before a write that failed is tried again."""

RENEWALS_PER_LEASE = 3


def new_life() -> str:
    """Return what tells this life of a process from all others."""
    return f"{time.time_ns():016x}{secrets.token_hex(4)}"


class Discovery:
    """The names that this process has, and those that it follows."""

    def __init__(
        self,
        store: RegistrationStore,
        namespace: str,
        lease_s: int,
        clock: Clock,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.store = store
        self.namespace = namespace
        self.registry = Registry()
        self.trouble = ""
        """Why the last look failed; empty when it did not."""
        self._lease_s = lease_s
        self._life = new_life()
        self._clock = clock
        self._complaints = Complaints(log, clock)
        self._scopes: list[Scope] = []
        self._listeners: list[Callable[[], None]] = []
        self._after_look: list[Callable[[], None]] = []
        self._own: dict[str, tuple[Registration, bytes]] = {}
        self._changed = asyncio.Event()
        self._listing = asyncio.Lock()
        self._listed: FleetList | None = None
        self._listed_ms = 0.0
        self._looked = asyncio.Event()
        self._renewing: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._metrics = DiscoveryMetrics(registry, self.registry)

    async def open(self) -> None:
        """Reach where registrations are kept; raises ``ValueError`` or ``OSError`` when that cannot be used."""
        await self.store.open()

    async def close(self) -> None:
        """Give this process's names back, and follow none any more."""
        await self.withdraw()
        await cancel_all(self._tasks)
        await self.store.close()

    # Registering

    async def register(self, component: str, instance: str, endpoints: dict[str, str]) -> None:
        """Have a name from now on, whether it can be written just now or not.

        Where another system registers processes this does nothing. Raises ``RegistrationRefused`` when no process
        could use what is registered.
        """
        if not self.store.writable:
            return
        made = Registration(
            namespace=self.namespace,
            component=component,
            instance=instance,
            life=self._life,
            endpoints={name: address for name, address in endpoints.items() if address},
            lease_ms=1000 * self._lease_s,
        )
        data = encode_registration(made)
        self._own[made.key] = (made, data)
        await self._write(made, data)
        if self._renewing is None:
            self._renewing = supervised(self._renew, "renewal of names", Restart(limit=None))

    async def withdraw(self) -> None:
        """Give this process's names back; it still follows others."""
        if self._renewing is not None:
            await cancel_all([self._renewing])
            self._renewing = None
        for key in self._own:
            try:
                await self.store.remove(key)
            except DiscoveryUnavailable as error:
                log.warning("deregistering %s failed (%s): the entry expires with its lease", key, error)
        self._own.clear()

    async def _renew(self) -> None:
        good = True
        while True:
            pause_s = self._lease_s / RENEWALS_PER_LEASE
            await asyncio.sleep(pause_s if good else min(RETRY_S, pause_s))
            good = True
            for registration, data in list(self._own.values()):
                good = await self._write(registration, data) and good

    async def _write(self, registration: Registration, data: bytes) -> bool:
        try:
            await self.store.write(registration, data)
        except DiscoveryUnavailable as error:
            self._metrics.failures.labels("write").inc()
            self._complain("registering under this process's name", error)
            return False
        return True

    # Following

    def follow(self, scope: Scope, on_change: Callable[[], None]) -> None:
        """Know the processes of a scope from now on; ``on_change`` is called when one there, or elsewhere, changes."""
        self._listeners.append(on_change)
        if scope not in self._scopes:
            self._scopes.append(scope)
        if len(self._listeners) == 1:
            self._tasks.append(supervised(self._look, "look at names", Restart(limit=None)))

    def after_each_look(self, call: Callable[[], None]) -> None:
        """Have something called after every look at the scopes that are followed, whether it succeeded or not."""
        self._after_look.append(call)

    async def _look(self) -> None:
        was_away = False
        while True:
            try:
                seen = await self.store.look(self._scopes)
            except DiscoveryUnavailable as error:
                was_away = True
                self._metrics.failures.labels("read").inc()
                self.trouble = str(error)
                self._complain("reading registrations", error)
            else:
                now_ms = self._clock.monotonic_ms()
                if was_away:
                    self.registry.looked_again(now_ms)
                was_away, self.trouble = False, ""
                changed = self.registry.look(seen, now_ms)
                for key, why in self.registry.refused.items():
                    self._complaints.about(f"names ({key[:80]!r})", why)
                if changed:
                    for listener in self._listeners:
                        listener()
                    self._changed.set()
            for call in self._after_look:
                call()
            self._looked.set()
            await asyncio.sleep(self.store.look_s)

    async def first_look(self) -> None:
        """Wait until it was looked once who is there, well or not."""
        await self._looked.wait()

    async def fleet(self) -> FleetList:
        """Return all processes that have names, followed or not, as of ``look_s`` ago at most.

        Raises ``DiscoveryUnavailable``.
        """
        async with self._listing:
            now_ms = self._clock.monotonic_ms()
            if self._listed is None or now_ms - self._listed_ms >= 1000 * self.store.look_s:
                found = Registry()
                found.look(await self.store.look([Scope()]), now_ms)
                rows = [_row(each) for each in found.instances()]
                self._listed = FleetList(
                    names=self.store.kind, where=self.store.where, refused=found.refused, data=rows
                )
                self._listed_ms = now_ms
            return self._listed

    def addresses(self, name: EndpointName) -> list[str]:
        """Return where an endpoint that is followed listens, the latest life first."""
        return self.registry.addresses(name)

    async def address(self, name: EndpointName) -> str:
        """Wait until an endpoint that is followed is somewhere; return where."""
        while not (found := self.addresses(name)):
            self._changed.clear()
            await self._changed.wait()
        return found[0]

    def _complain(self, doing: str, error: Exception) -> None:
        words = "%s at %s failed (%s): it is retried without limit, and the known entries stay%s"
        self._complaints.note(doing, words, doing, self.store.where, error)


def _row(registration: Registration) -> NamedRow:
    return NamedRow(
        namespace=registration.namespace,
        component=registration.component,
        instance=registration.instance,
        endpoints=registration.endpoints,
        started_ms=registration.started_ms,
        lease_ms=registration.lease_ms,
    )
