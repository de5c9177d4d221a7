"""Keeps the tenants of a process equal to their file, without a restart.

The file is looked at (``stat``) at most every ``CHECK_MS``, by whoever asks for the tenants: requests, probes and
scrapes all do. A changed file is read and put in force in one go. One that cannot be read or used changes nothing: the
old one stays, an error is logged, ``outcome="refused"`` is counted, and ``stale`` is true until a good one is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from poolgrid.frontend.access import key_file
from poolgrid.frontend.access.key_file import KeyFileError
from poolgrid.frontend.access.tenants import MakeMeter, Tenants
from poolgrid.process.clock import Clock

log = logging.getLogger(__name__)

CHECK_MS = 1000.0
"""Least time between two looks whether the file has changed; a look is one ``stat``."""

Signature = tuple[int, int, int]


class WatchedKeyFile:
    """The tenants of ``path``; ``on_reload`` is told ``loaded`` or ``refused`` after each change of the file."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        on_reload: Callable[[str], None],
        make_meter: MakeMeter | None = None,
        processes: int = 1,
    ) -> None:
        """Read the file; raises ``OSError`` or ``KeyFileError``.

        ``make_meter`` makes what keeps a tenant's figures; by default they are this process's alone.
        Of ``processes`` that share a port each allows an equal part of the limits.
        """
        self._path = path
        self._clock = clock
        self._on_reload = on_reload
        self.stale = False
        """Whether the file has changed to something that cannot be used."""
        if path.stat().st_mode & 0o077:
            log.warning("%s can be read by others than its owner: chmod 600 it, its salt_secret is a secret", path)
        self._seen = self._signature()
        self._checked_ms = clock.monotonic_ms()
        self._processes = processes
        document = key_file.read(path).divided(processes)
        self._tenants = Tenants(document) if make_meter is None else Tenants(document, make_meter)

    def tenants(self) -> Tenants:
        """Return the tenants as the file says now, or said before it broke."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._checked_ms >= CHECK_MS:
            self._checked_ms = now_ms
            signature = self._signature()
            if signature != self._seen:
                self._seen = signature
                self._reload()
        return self._tenants

    def _signature(self) -> Signature | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _reload(self) -> None:
        try:
            document = key_file.read(self._path).divided(self._processes)
        except (OSError, KeyFileError) as error:
            self.stale = True
            log.error("reading API keys: %s. What was in force stays in force: mend the file", error)
            self._on_reload("refused")
            return
        self.stale = False
        self._tenants.use(document)
        log.info("read API keys of %d tenants from %s", len(document.tenants), self._path)
        self._on_reload("loaded")
