"""Brings a model into a cache: once, whole, and on from where an earlier attempt ended."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from poolgrid.wire.hashing import stable_u64
from poolgrid.workers.model_cache.cache import ModelCache, Wrong, sha256_of
from poolgrid.workers.model_cache.manifest import (
    MANIFEST_FILE,
    PART,
    Manifest,
    ModelCacheError,
    ModelFile,
    encode,
    left_out,
)
from poolgrid.workers.model_cache.sources import ListedFile, Listing, Source, Unavailable
from poolgrid.workers.model_cache.unfollowed import make_unfollowed, open_unfollowed

log = logging.getLogger(__name__)

T = TypeVar("T")

FILES_AT_A_TIME = 4
"""Enough for a disk or a network that one stream does not fill; a hub slows down who asks for more."""

SPARE_BYTES = 64 * 1024 * 1024
"""Stays free on the disk beside the model: a file system that is full to its last byte breaks others."""

PAUSE_MIN_S = 1.0
PAUSE_MAX_S = 30.0
"""Between two attempts: doubles from the one to the other."""


class Ended(Exception):
    """Whoever asked does not want it any more, or another file has failed."""


class Progress(Protocol):
    """Who is told how the work goes; from several threads."""

    def phase(self, name: str, total_bytes: int) -> None:
        """Tell of the next part of the work: ``wait``, ``list``, ``fetch`` or ``verify``."""
        ...

    def moved(self, count: int) -> None:
        """Tell of bytes of this phase that are done; negative ones are to be done again."""
        ...


@dataclass(frozen=True)
class FetchLimits:
    """Bounds of fetching one model."""

    wait_s: float = 7200.0
    """How long another process may hold the model's lock: it may be fetching all of it."""
    attempts: int = 6
    """Of the list of files, and of a file without getting further; the time between them doubles."""
    size_max: int = 4 * 2**40
    """Largest model, in bytes: twice what the largest published ones have."""
    pause_min_s: float = PAUSE_MIN_S


@dataclass(frozen=True)
class Fetching:
    """One model on its way from a source into a cache."""

    cache: ModelCache
    source: Source
    name: str
    progress: Progress
    limits: FetchLimits = FetchLimits()
    exclude: tuple[str, ...] = ()
    """Patterns of files that are left out."""
    check: bool = False
    """Read what is there, and fetch again what is not what it was."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set, it ends the work soon; what was fetched stays for the next time."""

    def run(self) -> Manifest:
        """Return the manifest of the model, which is whole then; raises ``ModelCacheError``, and ``Ended``."""
        if not self.check:
            whole = self._whole()
            if whole is not None:
                return whole
        self.progress.phase("wait", 0)
        with self.cache.locked(self.name, self.limits.wait_s):
            try:
                return self._with_lock()
            except OSError as error:
                place = error.filename or self.cache.directory
                raise ModelCacheError(f"fetching {self.source.shown} to {place}: {error.strerror or error}") from None

    def _whole(self) -> Manifest | None:
        """Return the manifest where all is there."""
        manifest = self.cache.manifest(self.name)
        if manifest is None:
            if self.cache.path(self.name).exists():
                raise ModelCacheError(
                    f"{self.cache.path(self.name)} is there and has no {MANIFEST_FILE}: it was not fetched by "
                    "poolgrid; move it away, or give another name"
                )
            return None
        if (manifest.source, manifest.exclude) != (self.source.shown, self.exclude):
            without = f" without {', '.join(manifest.exclude)}" if manifest.exclude else ""
            raise ModelCacheError(
                f"{self.cache.path(self.name)} was fetched from {manifest.source}{without}, and is asked for from "
                f"{self.source.shown}{' without ' + ', '.join(self.exclude) if self.exclude else ''}: give another "
                "name, or remove it"
            )
        return None if self.cache.wrong_sizes(self.name, manifest) else manifest

    def _with_lock(self) -> Manifest:
        # Another process may have fetched it meanwhile.
        manifest = self._whole()
        if manifest is not None:
            if not self.check:
                return manifest
            self.progress.phase("verify", manifest.total_bytes)
            wrong = self.cache.wrong_files(self.name, manifest, self._told)
            if not wrong:
                return manifest
        else:
            there = self.cache.manifest(self.name)
            wrong = self.cache.wrong_sizes(self.name, there) if there is not None else []
        if wrong:
            self._take_back(wrong)
        self.progress.phase("list", 0)
        listing = self._listing()
        partial = self.cache.partial_path(self.name)
        make_unfollowed(partial)
        self._drop_others(partial, listing)
        self._check_room(partial, listing)
        self.progress.phase("fetch", sum(file.bytes for file in listing.files))
        files = self._bring_all(partial, listing)
        made = Manifest(1, self.name, self.source.shown, files, listing.revision, self.exclude)
        self._finish(partial, made)
        return made

    def _told(self, count: int) -> None:
        if self.ended.is_set():
            raise Ended
        self.progress.moved(count)

    def _take_back(self, wrong: Sequence[Wrong]) -> None:
        """Make a broken model one that is under way, without its wrong files."""
        for each in wrong:
            log.warning("%s: %s %s; it is fetched again", self.cache.path(self.name), each.path, each.problem)
        partial = self.cache.partial_path(self.name)
        broken = self.cache.path(self.name)
        if broken.is_symlink():
            raise ModelCacheError(f"{broken} is a symbolic link: a model is fetched into real directories only")
        make_unfollowed(partial)
        shutil.rmtree(partial)
        broken.rename(partial)
        _drop_links(partial)
        (partial / MANIFEST_FILE).unlink()
        for each in wrong:
            (partial / each.path).unlink(missing_ok=True)

    def _listing(self) -> Listing:
        listing = self._patiently(self.source.shown, self.source.listing)
        files = tuple(file for file in listing.files if not left_out(file.path, self.exclude))
        if not files:
            raise ModelCacheError(
                f"{self.source.shown} has {len(listing.files)} files"
                + (f", and {', '.join(self.exclude)} leaves none of them" if listing.files else ": it is no model")
            )
        return Listing(files, listing.revision)

    def _drop_others(self, partial: Path, listing: Listing) -> None:
        """Remove what an earlier attempt fetched that is not of the model any more, and links, which none makes."""
        _drop_links(partial)
        wanted = {file.path for file in listing.files}
        for place in [each for each in partial.rglob("*") if not each.is_dir()]:
            if place.relative_to(partial).as_posix().removesuffix(PART) not in wanted:
                place.unlink()

    def _check_room(self, partial: Path, listing: Listing) -> None:
        total = sum(file.bytes for file in listing.files)
        if total > self.limits.size_max:
            raise ModelCacheError(
                f"{self.source.shown} has {total:,} bytes, allowed are {self.limits.size_max:,}; nothing was fetched"
            )
        have = sum(place.stat().st_size for place in partial.rglob("*") if place.is_file())
        missing = max(0, total - have) + SPARE_BYTES
        free = shutil.disk_usage(partial).free
        if missing > free:
            raise ModelCacheError(
                f"{self.source.shown} needs {missing:,} more bytes in {self.cache.directory}, free are {free:,}; "
                "nothing was fetched"
            )

    def _bring_all(self, partial: Path, listing: Listing) -> tuple[ModelFile, ...]:
        with ThreadPoolExecutor(FILES_AT_A_TIME, "model file") as threads:
            # The largest first, so that none of them is left alone at the end.
            order = sorted(range(len(listing.files)), key=lambda at: -listing.files[at].bytes)
            under_way = {at: threads.submit(self._bring, partial, listing, listing.files[at]) for at in order}
            try:
                done, _ = wait(under_way.values(), return_when=FIRST_EXCEPTION)
                failed = [error for each in done if (error := each.exception()) is not None]
                if failed:
                    raise failed[0]
            except BaseException:
                self.ended.set()
                threads.shutdown(cancel_futures=True)
                raise
            return tuple(under_way[at].result() for at in range(len(listing.files)))

    def _bring(self, partial: Path, listing: Listing, file: ListedFile) -> ModelFile:
        whole = partial / file.path
        part = whole.with_name(whole.name + PART)
        make_unfollowed(whole.parent)
        if whole.exists():
            # Of an earlier attempt. Without a sum to hold it against it cannot be told from another one's.
            if file.sha256 and whole.stat().st_size == file.bytes and sha256_of(whole, self._told) == file.sha256:
                return ModelFile(file.path, file.bytes, file.sha256)
            whole.unlink()

        counted = 0

        def told(count: int) -> None:
            nonlocal counted
            counted += count
            self._told(count)

        def bring() -> str:
            # What an attempt before has told of is told of again.
            told(-counted)
            sha256 = self.source.bring(file, listing, part, told)
            if file.sha256 and sha256 != file.sha256:
                part.unlink()
                raise Unavailable(
                    f"{self.source.shown}: {file.path} has the sum {sha256}, expected is {file.sha256}; it is dropped"
                )
            return sha256

        sha256 = self._patiently(f"{self.source.shown}: {file.path}", bring, lambda: _size(part))
        size = part.stat().st_size
        _sync(part)
        part.rename(whole)
        return ModelFile(file.path, size, sha256)

    def _patiently(self, what: str, work: Callable[[], T], reached: Callable[[], int] = lambda: 0) -> T:
        """Return what ``work`` returns, tried again while its source is not available.

        An attempt that got further than all before it, as ``reached`` says, is none of those that count.
        """
        attempt, furthest = 0, 0
        while True:
            if self.ended.is_set():
                raise Ended
            try:
                return work()
            except Unavailable as error:
                attempt = 1 if reached() > furthest else attempt + 1
                furthest = max(furthest, reached())
                if attempt == self.limits.attempts:
                    raise ModelCacheError(f"{error}; given up after {attempt} attempts") from None
                pause_s = min(PAUSE_MAX_S, self.limits.pause_min_s * 2.0 ** (attempt - 1))
                # Up to a quarter longer: a fleet that starts at once does not come back at once.
                pause_s *= 1 + stable_u64(f"{what}/{os.getpid()}/{attempt}") / 2**66
                log.warning("%s; attempt %d of %d in %.0f s", error, attempt + 1, self.limits.attempts, pause_s)
                if self.ended.wait(pause_s):
                    raise Ended from None

    def _finish(self, partial: Path, manifest: Manifest) -> None:
        """Make the model whole, in one step."""
        for directory in sorted((each for each in partial.rglob("*") if each.is_dir()), reverse=True):
            if not any(directory.iterdir()):
                directory.rmdir()
            else:
                _sync(directory)
        place = partial / MANIFEST_FILE
        with open(place, "wb", opener=open_unfollowed) as written:
            written.write(encode(manifest))
        _sync(place)
        _sync(partial)
        partial.rename(self.cache.path(self.name))
        _sync(self.cache.directory)


def _drop_links(directory: Path) -> None:
    for place in [each for each in directory.rglob("*") if each.is_symlink()]:
        log.warning("%s is a symbolic link; it is removed", place)
        place.unlink()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sync(path: Path) -> None:
    """Wait until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
