"""The directory of a cache: what is whole in it, what is being fetched, and which process may write.

    CACHE/NAME/                      a whole model: its files, and poolgrid-model.json with their sums
    CACHE/.poolgrid/locks/NAME.lock  held by the process that fetches or repairs the model
    CACHE/.poolgrid/partial/NAME/    what it has fetched so far

A model is whole from the rename of its directory to ``CACHE/NAME`` on, which is one step and the last one. Only the
process that holds the lock writes; the operating system releases it when the process ends, however it ends.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

CACHE_DIR_VARIABLE = "POOLGRID_MODEL_CACHE_DIR"

MANIFEST_FILE = "poolgrid-model.json"

FILES_MAX = 100_000
"""Files of a model; the largest have some hundreds."""

MANIFEST_BYTES_MAX = 64 * 1024 * 1024
"""More than ``FILES_MAX`` files take; what is larger is something else."""

NAME_CHARS_MAX = 200
"""Of a model's name, which is a directory's: file systems allow 255 bytes."""

LOCK_POLL_S = 0.5
"""Time between two attempts to take a lock that another process holds: fetching takes minutes."""

CHUNK_BYTES = 1024 * 1024

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")
_OWN = ".poolgrid"


class ModelCacheError(RuntimeError):
    """A model could not be fetched or found; says what, where and what to do."""


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a model."""

    path: Annotated[str, Meta(min_length=1, max_length=1024)]
    """Below the directory of the model, with ``/``."""
    bytes: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class Manifest(msgspec.Struct, frozen=True):
    """All of a model, and where it came from. Written last, as ``MANIFEST_FILE`` in the model's directory."""

    version: Literal[1]
    name: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    source: Annotated[str, Meta(max_length=8192)]
    files: Annotated[tuple[ModelFile, ...], Meta(min_length=1, max_length=FILES_MAX)]
    revision: Annotated[str, Meta(max_length=256)] = ""
    """Commit of the hub; empty for sources without."""
    exclude: Annotated[tuple[str, ...], Meta(max_length=1000)] = ()
    """Patterns of files that were left out."""

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)


class PartialModel(NamedTuple):
    """A model that is not whole."""

    name: str
    bytes: int
    fetching: bool
    """Whether a process fetches it now."""


class WrongFile(NamedTuple):
    """A file of a model that is not what its manifest says."""

    path: str
    problem: str


def default_directory(environment: Mapping[str, str]) -> Path:
    """Return where models are kept by default: below the user's directory for caches."""
    given = environment.get(CACHE_DIR_VARIABLE)
    if given:
        return Path(given)
    above = environment.get("XDG_CACHE_HOME") or os.path.join(
        environment.get("HOME") or os.path.expanduser("~"), ".cache"
    )
    return Path(above, "poolgrid", "models")


def path_problem(path: str) -> str:
    """Return why a file cannot have this path below a model's directory; empty when it can."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path or "/".join(parts) != path:
        return "is not a plain path below the directory of the model"
    return "is the manifest itself" if parts[0] == MANIFEST_FILE else ""


def parse_manifest(text: bytes, place: str) -> Manifest:
    """Return a manifest; raises ``ModelCacheError`` naming the place and the field."""
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelCacheError(f"reading {place}: {error}") from None
    for file in manifest.files:
        problem = path_problem(file.path)
        if problem:
            raise ModelCacheError(f"reading {place}: file {file.path!r} {problem}")
    return manifest


class ModelCache:
    """One directory; nothing is made until something is to be written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.expanduser().absolute()

    def path(self, name: str) -> Path:
        """Return the directory of a model; raises ``ModelCacheError`` for what cannot be a name."""
        if not _is_name(name):
            raise ModelCacheError(
                f"the model's name is {name!r}: allowed are 1 to {NAME_CHARS_MAX} letters, digits, '.', '_', '-', '+' "
                "and '@', a letter or digit first"
            )
        return self.directory / name

    def partial_path(self, name: str) -> Path:
        self.path(name)
        return self.directory / _OWN / "partial" / name

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
        return parse_manifest(text, str(place))

    def names(self) -> list[str]:
        return [name for name in _models_below(self.directory) if (self.directory / name / MANIFEST_FILE).is_file()]

    def partials(self) -> list[PartialModel]:
        """Return the models that are not whole, in the order of their names."""
        names = _models_below(self.directory / _OWN / "partial")
        return [PartialModel(name, bytes_below(self.partial_path(name)), self._is_locked(name)) for name in names]

    @contextmanager
    def locked(self, name: str, wait_s: float) -> Iterator[None]:
        """Hold the lock of a model; raises ``ModelCacheError`` when another process has it for longer."""
        from filelock import FileLock, Timeout  # here: it takes a process 10 ms of CPU, and few lock a model

        place = self._lock(name)
        # A fetch may run with more rights than those who can write into a shared cache.
        for each in (place.parent.parent, place.parent, self.partial_path(name).parent, place, self.partial_path(name)):
            if each.is_symlink():
                raise ModelCacheError(f"{each} is a symbolic link: remove it; a cache has real directories only")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
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
        return self.directory / _OWN / "locks" / f"{name}.lock"

    def _is_locked(self, name: str) -> bool:
        from filelock import FileLock, Timeout  # here: it takes a process 10 ms of CPU, and few lock a model

        place = self._lock(name)
        if not place.exists():
            return False
        try:
            with FileLock(place, timeout=0):
                return False
        except (Timeout, OSError):
            return True

    def wrong_files(self, name: str, manifest: Manifest, read: Callable[[int], None] | None = None) -> list[WrongFile]:
        """Return the files that are missing or have another size and, with ``read``, another content.

        ``read`` gets the numbers of bytes that are read.
        """
        found = []
        for file in manifest.files:
            place = self.path(name) / file.path
            try:
                size = place.stat().st_size
                if size != file.bytes:
                    found.append(WrongFile(file.path, f"has {size:,} bytes, not {file.bytes:,}"))
                elif read is not None and sha256_of(place, read) != file.sha256:
                    found.append(WrongFile(file.path, "its content is not what was fetched"))
            except FileNotFoundError:
                found.append(WrongFile(file.path, "is missing"))
            except OSError as error:
                found.append(WrongFile(file.path, f"cannot be read: {error.strerror or error}"))
        return found


def sha256_of(path: Path, read: Callable[[int], None]) -> str:
    """Return a file's sum in hexadecimal; ``read`` gets the numbers of bytes that are read."""
    digest = hashlib.sha256()
    with path.open("rb") as reading:
        while chunk := reading.read(CHUNK_BYTES):
            digest.update(chunk)
            read(len(chunk))
    return digest.hexdigest()


def bytes_below(directory: Path) -> int:
    """Return the size of all files below a directory, some of which may go meanwhile."""
    total = 0
    for place in directory.rglob("*"):
        try:
            total += place.stat().st_size if place.is_file() else 0
        except OSError:
            continue
    return total


def _is_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and len(name) <= NAME_CHARS_MAX


def _models_below(directory: Path) -> list[str]:
    try:
        return sorted(each.name for each in directory.iterdir() if each.is_dir() and _is_name(each.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ModelCacheError(f"reading {directory}: {error.strerror or error}") from None
