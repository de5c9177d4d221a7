"""The directory of a cache: what is whole in it, what is under way, and who may write.

    CACHE/NAME/                      a whole model: its files, and poolgrid-model.json with their sums
    CACHE/.poolgrid/locks/NAME.lock  held by the process that fetches or mends the model
    CACHE/.poolgrid/partial/NAME/    what it has fetched so far

Rules
    1. A model is whole from the rename of its directory to ``CACHE/NAME`` on, which is one step and the last one: all
       its files and its manifest are on the disk before. A process that is killed leaves what the next one goes on
       with.
    2. Only who holds the lock writes. The operating system gives it free when a process ends, however it ends. Between
       machines that share a file system the lock is as good as that file system's.
    3. Nothing is written through a symbolic link below ``CACHE/.poolgrid`` (``unfollowed``).
    4. What is whole is not changed, but for one that verification finds broken: it goes back to what is under way.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from poolgrid.workers.model_cache.manifest import (
    MANIFEST_BYTES_MAX,
    MANIFEST_FILE,
    Manifest,
    ModelCacheError,
    ModelFile,
    name_problem,
    parse,
)
from poolgrid.workers.model_cache.sources import CHUNK_BYTES
from poolgrid.workers.model_cache.unfollowed import OWN_DIRECTORY, make_unfollowed

CACHE_DIR_VARIABLE = "POOLGRID_MODEL_CACHE_DIR"

LOCK_POLL_S = 0.5
"""How often a lock is asked for that another process holds: fetching takes minutes."""


def default_directory(environment: Mapping[str, str]) -> Path:
    """Return where models are kept when nobody says: below the user's directory for caches."""
    given = environment.get(CACHE_DIR_VARIABLE)
    if given:
        return Path(given)
    above = environment.get("XDG_CACHE_HOME") or os.path.join(
        environment.get("HOME") or os.path.expanduser("~"), ".cache"
    )
    return Path(above, "poolgrid", "models")


@dataclass(frozen=True, slots=True)
class Partial:
    """A model that is not whole."""

    name: str
    bytes: int
    fetching: bool
    """Whether a process is at it now."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """A file of a model that is not what its manifest says."""

    path: str
    problem: str


class ModelCache:
    """One directory; nothing is made until something is to be written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.expanduser().absolute()

    def path(self, name: str) -> Path:
        """Return the directory of a model; raises ``ModelCacheError`` for what cannot be a name."""
        problem = name_problem(name)
        if problem:
            raise ModelCacheError(f"the model's name is {name!r}: {problem}")
        return self.directory / name

    def partial_path(self, name: str) -> Path:
        """Return where a model is put together."""
        self.path(name)
        return self.directory / OWN_DIRECTORY / "partial" / name

    def manifest(self, name: str) -> Manifest | None:
        """Return a model's manifest, ``None`` when it is not whole; raises ``ModelCacheError`` for a broken one."""
        place = self.path(name) / MANIFEST_FILE
        try:
            if place.stat().st_size > MANIFEST_BYTES_MAX:
                raise ModelCacheError(f"reading {place}: more than {MANIFEST_BYTES_MAX:,} bytes")
            text = place.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ModelCacheError(f"reading {place}: {error.strerror or error}") from None
        return parse(text, str(place))

    def names(self) -> list[str]:
        """Return the whole models' names, in order."""
        return [name for name in self._below(self.directory) if (self.directory / name / MANIFEST_FILE).is_file()]

    def partials(self) -> list[Partial]:
        """Return the models that are not whole, in the order of their names."""
        found = []
        for name in self._below(self.directory / OWN_DIRECTORY / "partial"):
            size = sum(_size(each) for each in self.partial_path(name).rglob("*"))
            found.append(Partial(name, size, self._is_locked(name)))
        return found

    def _below(self, directory: Path) -> list[str]:
        try:
            return sorted(each.name for each in directory.iterdir() if each.is_dir() and not name_problem(each.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ModelCacheError(f"reading {directory}: {error.strerror or error}") from None

    @contextmanager
    def locked(self, name: str, wait_s: float) -> Iterator[None]:
        """Hold the lock of a model; raises ``ModelCacheError`` when another process has it for longer."""
        place = self._lock(name)
        try:
            make_unfollowed(place.parent)
            if place.is_symlink():
                raise ModelCacheError(f"{place} is a symbolic link: remove it")
            lock = FileLock(place, timeout=wait_s)
            lock.acquire(poll_interval=LOCK_POLL_S)
        except Timeout:
            raise ModelCacheError(
                f"model {name} in {self.directory}: another process has held {place} for {wait_s:.0f} s; it may still "
                "be fetching, see `poolgrid model list`"
            ) from None
        except OSError as error:
            raise ModelCacheError(f"locking {place}: {error.strerror or error}") from None
        try:
            yield
        finally:
            lock.release()

    def _lock(self, name: str) -> Path:
        self.path(name)
        return self.directory / OWN_DIRECTORY / "locks" / f"{name}.lock"

    def _is_locked(self, name: str) -> bool:
        place = self._lock(name)
        if not place.exists():
            return False
        try:
            with FileLock(place, timeout=0):
                return False
        except (Timeout, OSError):
            return True

    def wrong_sizes(self, name: str, manifest: Manifest) -> list[Wrong]:
        """Return the files that are missing or have another size; nothing is read."""
        return [wrong for file in manifest.files if (wrong := _wrong_size(self.path(name), file)) is not None]

    def wrong_files(self, name: str, manifest: Manifest, told: Callable[[int], None]) -> list[Wrong]:
        """Read every file and return those that are not what the manifest says; ``told`` gets the bytes as read."""
        found = []
        for file in manifest.files:
            wrong = _wrong_size(self.path(name), file)
            if wrong is None:
                try:
                    is_wrong = sha256_of(self.path(name) / file.path, told) != file.sha256
                    wrong = Wrong(file.path, "its content is not what was fetched") if is_wrong else None
                except OSError as error:
                    wrong = Wrong(file.path, f"cannot be read: {error.strerror or error}")
            else:
                told(file.bytes)
            if wrong is not None:
                found.append(wrong)
        return found


def sha256_of(path: Path, told: Callable[[int], None]) -> str:
    """Return a file's sum in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as reading:
        while chunk := reading.read(CHUNK_BYTES):
            digest.update(chunk)
            told(len(chunk))
    return digest.hexdigest()


def _wrong_size(directory: Path, file: ModelFile) -> Wrong | None:
    try:
        place = directory / file.path
        size = place.stat().st_size
    except OSError as error:
        return Wrong(file.path, "is missing" if isinstance(error, FileNotFoundError) else str(error.strerror))
    return None if size == file.bytes else Wrong(file.path, f"has {size:,} bytes, not {file.bytes:,}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0  # it has just been renamed
