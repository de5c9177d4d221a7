"""Registrations in a key-value bucket of NATS JetStream, for processes of many hosts.

Rules
    1. An entry is written with its lease as its time to live, and renewed by writing it again: the servers end it,
       whatever became of its process. They count whole seconds, and look once a second.
    2. Looks read the bucket's stream from its beginning, as many messages with one question as an answer takes. There
       is no consumer that could be lost, and an entry that is renewed meanwhile comes again at the end. Any replica
       may answer; one that is behind does not count (``poolgrid.plugins.nats.bucket``).
    3. The bucket is one for all namespaces of the account, ``poolgrid-names``. Which user may write what is set in
       NATS, by subject: ``$KV.poolgrid-names.NAMESPACE.>``.
    4. The connection is made in the background: a process does not wait for NATS to start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from poolgrid.kernel.wire.addresses import without_credentials
from poolgrid.kernel.wire.registration import ENTRY_BYTES_MAX, Registration
from poolgrid.plugins.nats.bucket import Bucket, BucketReader, BucketSpec, is_deleted, key_of, sequence_of
from poolgrid.plugins.nats.connection import NatsUnavailable
from poolgrid.server.discovery.registry import LOOK_S, DiscoveryUnavailable, Scope, Seen
from poolgrid.server.discovery.settings import DiscoverySettings
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.nats_settings import NatsSettings

BUCKET = "poolgrid-names"
STREAM = f"KV_{BUCKET}"
SUBJECT = f"$KV.{BUCKET}."

ENTRIES_MAX = 65_536
"""Entries that one look reads; a bucket with more is full of something else."""

BUCKET_BYTES_MAX = 64 * 1024 * 1024
"""What the servers keep of it: 16,384 entries as large as they may be, ten times as many as they are."""

MESSAGE_BYTES_MAX = 2 * ENTRY_BYTES_MAX
"""An entry with its headers."""

START_S = 2.0
"""How long a first question waits for the connection."""

ENDED_TTL_S = 5
"""How long the servers keep that a name was taken back."""


class NatsRegistrations:
    """Implements ``poolgrid.server.discovery.registry.RegistrationStore``."""

    kind = "nats"
    writable = True
    look_s = LOOK_S

    def __init__(self, settings: NatsSettings, lease_s: int, replicas: int, clock: Clock) -> None:
        spec = BucketSpec(BUCKET, "names of poolgrid's processes", BUCKET_BYTES_MAX, MESSAGE_BYTES_MAX, replicas)
        self._bucket = Bucket(settings, "names", spec, clock)
        self._lease_s = lease_s
        self._readers: dict[Scope, BucketReader] = {}
        self.where = ", ".join(map(without_credentials, settings.nats_url))

    async def open(self) -> None:
        """Begin to connect; raises ``ValueError`` without nats-py."""
        self._bucket.start("names")

    async def _until_open(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                await self._bucket.is_open.wait()
        except TimeoutError:
            raise DiscoveryUnavailable(f"there is no connection to NATS at {self.where} yet") from None

    async def look(self, scopes: Sequence[Scope]) -> list[Seen]:
        """Return the entries of some scopes; raises ``DiscoveryUnavailable``."""
        await self._until_open()
        found: dict[str, Seen] = {}
        try:
            for scope in scopes:
                for message in await self._reader(scope).read(1):
                    key = key_of(message, self._bucket.spec)
                    if message.data and not is_deleted(message):
                        found[key] = Seen(key, message.data, sequence_of(message))
                    else:
                        found.pop(key, None)
        except NatsUnavailable as error:
            raise DiscoveryUnavailable(str(error)) from None
        return list(found.values())

    def _reader(self, scope: Scope) -> BucketReader:
        reader = self._readers.get(scope)
        if reader is None:
            keys = f"{scope.namespace or '*'}.{scope.component or '*'}.*"
            reader = self._readers[scope] = self._bucket.reader(keys, self._lease_s, ENTRIES_MAX)
        return reader

    async def write(self, registration: Registration, data: bytes) -> None:
        """Write an entry, or renew it; raises ``DiscoveryUnavailable``."""
        await self._until_open()
        try:
            await self._bucket.write(registration.key, data, ttl_s=self._lease_s)
        except NatsUnavailable as error:
            raise DiscoveryUnavailable(str(error)) from None

    async def remove(self, key: str) -> None:
        """Take an entry back; raises ``DiscoveryUnavailable``."""
        await self._until_open()
        try:
            await self._bucket.remove(key, ENDED_TTL_S)
        except NatsUnavailable as error:
            raise DiscoveryUnavailable(str(error)) from None

    async def close(self) -> None:
        await self._bucket.close()


def open_store(settings: DiscoverySettings, clock: Clock) -> NatsRegistrations:
    """Return the registrations in NATS (entry point of ``poolgrid.discovery``)."""
    return NatsRegistrations(settings, settings.names_lease_ms // 1000, settings.nats_replicas, clock)
