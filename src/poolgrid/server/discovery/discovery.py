"""A process among names: it registers, renews, and follows who else is there. The shell around ``registry``.

Rules
    1. What is registered is renewed three times per lease until ``close``, which takes it back. When that fails it is
       tried every ``RETRY_S``, and that is logged now and then.
    2. What is followed is looked for every ``look_s`` of the store. While that fails, what was known last holds.
    3. Names are for finding. A connection that stands is not ended because a name is gone.

Which consolidator of a namespace a process is connected to, of those that have all the endpoints it needs.

Rules
    1. A process stays with the consolidator that answers it, whatever is registered besides: an entry alone moves no
       process that is connected.
    2. When that connection is lost the others are tried, the latest life first, each for ``PATIENCE_MS``; then all
       again. An endpoint without an entry counts only as long as it answers, or while there is no other.
    3. Two consolidators of one namespace are a mistake or an attack. The log names both entries: as an error
       where the other one is the later life.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from poolgrid.kernel.wire.addresses import EndpointName, parse_name
from poolgrid.kernel.wire.answers import FleetList, NamedRow
from poolgrid.kernel.wire.registration import Registration, encode_registration
from poolgrid.server.discovery.registry import DiscoveryUnavailable, RegistrationStore, Registry, Scope
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.instruments import Counter
from poolgrid.server.process.log_lines import Complaints
from poolgrid.server.process.tasks import Restart, cancel_all, supervised

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


PATIENCE_MS = 5000.0
"""How long a consolidator may take to answer for the first time before another one is tried."""


class DiscoveredConsolidator:
    """Follows a consolidator by its name; ``on_move`` gets where it is now, endpoint by endpoint.

    When its entry is gone it is taken to be where it was: it comes back, or another one follows it.
    """

    def __init__(
        self,
        names: Discovery,
        addresses: Sequence[str],
        on_move: Callable[[list[str]], None],
        answers: Callable[[], bool | None],
        clock: Clock,
    ) -> None:
        """``addresses`` are ``dyn://`` names of endpoints of one component.

        ``answers``: whether the consolidator that was moved to last answers now; ``None`` = it was not asked.
        """
        self._names = names
        self._wanted = [parse_name(address) for address in addresses]
        self._on_move = on_move
        self._answers = answers
        self._clock = clock
        self._where: list[str] = []
        self._has_answered = False
        self._moved_ms = 0.0
        self._tried: list[list[str]] = []
        """Since one has answered."""
        self._others: list[str] = []
        """Entries that were named in the log."""

    def start(self) -> None:
        first = self._wanted[0]
        self._names.follow(Scope(first.namespace, first.component), self.look)
        self._names.after_each_look(self.look)

    def look(self) -> None:
        """Move if the connection is lost and there is another consolidator."""
        first = self._wanted[0]
        found = [
            (each.key, [each.endpoints[name.endpoint] for name in self._wanted])
            for each in reversed(self._names.registry.instances(first.namespace, first.component))
            if all(name.endpoint in each.endpoints for name in self._wanted)
        ]
        places = [where for _, where in found]
        answers = self._answers() if self._where else False
        if answers:
            self._has_answered, self._tried = True, []
            self._report_others(found)
        elif self._is_to_move(places, answers):
            self._move(places)

    def _is_to_move(self, places: list[list[str]], answers: bool | None) -> bool:
        if all(where == self._where for where in places):
            return False
        if self._where not in places:
            return True
        waited_ms = self._clock.monotonic_ms() - self._moved_ms
        return answers is False and (self._has_answered or waited_ms >= PATIENCE_MS)

    def _move(self, places: list[list[str]]) -> None:
        others = [where for where in places if where != self._where]
        self._tried.append(self._where)
        untried = [where for where in others if where not in self._tried]
        if not untried:
            untried, self._tried = others, []
        self._where = untried[0]
        self._has_answered = False
        self._moved_ms = self._clock.monotonic_ms()
        log.info("%s is at %s", self._wanted[0], self._where[0])
        self._on_move(self._where)

    def _report_others(self, found: list[tuple[str, list[str]]]) -> None:
        own = next((at for at, (_, where) in enumerate(found) if where == self._where), None)
        others = [key for key, where in found if where != self._where]
        if others == self._others:
            return
        self._others = others
        if not others:
            return
        is_later = own is None or found[0][1] != self._where
        log.log(
            logging.ERROR if is_later else logging.WARNING,
            "%s: connected to %s (entry %s), and %s is registered as well at %s: this process stays where it is "
            "connected; a namespace has one consolidator, remove the entry that is wrong",
            self._wanted[0],
            self._where[0],
            "none any more" if own is None else found[own][0],
            ", ".join(others[:4]),
            ", ".join(where[0] for _, where in found if where != self._where)[:400],
        )
