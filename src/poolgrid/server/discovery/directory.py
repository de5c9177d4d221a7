"""Registrations as files of one directory, for the processes of one host.

Rules
    1. An entry is a file that is written under another name and renamed into place, so no reader sees half of it. It is
       renewed by its time of modification; after ``kill -9`` it stays, and counts until its lease is over.
    2. A process that may write into the directory may register: it belongs to the user of the processes, has mode 0700
       when it is made here, and one into which any user may write is refused.
    3. What is read is bounded: regular files of at most ``ENTRY_BYTES_MAX`` bytes, no links, no pipes, at most
       ``FILES_MAX`` of them.
    4. A process that renews its entry sweeps: files that were not renewed for ``SWEEP_AFTER_S`` are removed.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

from prometheus_client import CollectorRegistry

from poolgrid.kernel.wire.registration import ENTRY_BYTES_MAX, LEASE_MS_MAX, Registration
from poolgrid.server.discovery.discovery import Discovery
from poolgrid.server.discovery.registry import LOOK_S, DiscoveryUnavailable, RegistrationStore, Scope, Seen
from poolgrid.server.discovery.settings import DiscoverySettings
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.plugins import DISCOVERY, load_plugin

SUFFIX = ".json"
BEGUN = ".new"

FILES_MAX = 65_536
"""Files that are looked at; a directory with more is full of something else."""

SWEEP_AFTER_S = 2 * LEASE_MS_MAX / 1000
"""Longer than any lease: what is older has no reader left."""


class DirectoryRegistrations:
    """Implements ``poolgrid.server.discovery.registry.RegistrationStore``."""

    kind = "directory"
    writable = True
    look_s = LOOK_S

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self.where = str(directory)

    async def open(self) -> None:
        """Make the directory where there is none; raises ``OSError``, and ``ValueError`` for one that all users may
        write."""
        await asyncio.to_thread(self._open)

    def _open(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = self._directory.stat().st_mode
        if mode & stat.S_IWOTH:
            raise ValueError(
                f"names_dir is {self._directory}, into which any user may write (mode {stat.S_IMODE(mode):04o}) and "
                "redirect this pool's processes. Give it mode 0700, or 0770 for a group"
            )

    async def look(self, scopes: Sequence[Scope]) -> list[Seen]:
        """Return the entries of some scopes; raises ``DiscoveryUnavailable``."""
        return await asyncio.to_thread(self._look, tuple(scopes))

    def _look(self, scopes: Sequence[Scope]) -> list[Seen]:
        found: list[Seen] = []
        now_ns = self._clock.wall_ms() * 1_000_000
        try:
            with os.scandir(self._directory) as files:
                for number, file in enumerate(files):
                    if number >= FILES_MAX:
                        raise DiscoveryUnavailable(f"{self._directory} has more than {FILES_MAX} files")
                    key = file.name.removesuffix(SUFFIX)
                    if key == file.name or key.startswith("."):
                        continue
                    namespace, _, rest = key.partition(".")
                    component = rest.partition(".")[0]
                    if any(scope.holds(namespace, component) for scope in scopes):
                        seen = self._read(key, now_ns)
                        if seen is not None:
                            found.append(seen)
        except DiscoveryUnavailable:
            raise
        except OSError as error:
            raise DiscoveryUnavailable(f"reading {self._directory}: {error.strerror or error}") from None
        return found

    def _read(self, key: str, now_ns: int) -> Seen | None:
        try:
            # Not through links, and without waiting for a writer of a pipe.
            number = os.open(self._directory / (key + SUFFIX), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None  # gone meanwhile, or nothing that is an entry
        try:
            about = os.fstat(number)
            if not stat.S_ISREG(about.st_mode):
                return None
            data = os.read(number, ENTRY_BYTES_MAX + 1)
            return Seen(key, data, about.st_mtime_ns, (now_ns - about.st_mtime_ns) / 1e6)
        except OSError:
            return None
        finally:
            os.close(number)

    async def write(self, registration: Registration, data: bytes) -> None:
        """Write an entry, or renew it; raises ``DiscoveryUnavailable``."""
        await asyncio.to_thread(self._write, registration.key, data)

    def _write(self, key: str, data: bytes) -> None:
        path = self._directory / (key + SUFFIX)
        begun = self._directory / f".{key}{BEGUN}"
        try:
            try:
                if path.read_bytes() == data:
                    os.utime(path)
                    return
            except FileNotFoundError:
                pass  # it is new, or another process swept it
            number = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(number, "wb") as file:
                file.write(data)
            os.replace(begun, path)
            self._sweep()
        except OSError as error:
            raise DiscoveryUnavailable(f"writing {path}: {error.strerror or error}") from None

    def _sweep(self) -> None:
        before_ns = self._clock.wall_ms() * 1_000_000 - int(SWEEP_AFTER_S * 1e9)
        with os.scandir(self._directory) as files:
            for number, file in enumerate(files):
                if number >= FILES_MAX:
                    return
                if not file.name.endswith((SUFFIX, BEGUN)):
                    continue
                try:
                    if file.stat(follow_symlinks=False).st_mtime_ns < before_ns:
                        os.unlink(file.path)
                except OSError:
                    continue  # another one sweeps too

    async def remove(self, key: str) -> None:
        """Take an entry back; raises ``DiscoveryUnavailable``."""
        try:
            await asyncio.to_thread((self._directory / (key + SUFFIX)).unlink, missing_ok=True)
        except OSError as error:
            raise DiscoveryUnavailable(f"removing {key} from {self._directory}: {error.strerror or error}") from None

    async def close(self) -> None:
        """Release nothing: no file stays open."""


async def open_discovery(
    opened: AsyncExitStack, settings: DiscoverySettings, clock: Clock, registry: CollectorRegistry | None = None
) -> Discovery:
    """Return the names that settings ask for, reached; raises ``ValueError`` or ``OSError``."""
    names = Discovery(_store(settings, clock), settings.namespace, settings.names_lease_ms // 1000, clock, registry)
    opened.push_async_callback(names.close)
    await names.open()
    return names


def _store(settings: DiscoverySettings, clock: Clock) -> RegistrationStore:
    if settings.names != "directory":
        return cast(RegistrationStore, load_plugin(DISCOVERY, settings.names)(settings, clock))
    assert settings.names_dir is not None, "the settings have seen to that"
    return DirectoryRegistrations(settings.names_dir, clock)
