"""What a source of models is; ``poolgrid.workers.model_cache.opening`` has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from poolgrid.workers.model_cache.manifest import ModelCacheError, plain_name

CHUNK_BYTES = 1024 * 1024
"""Read, hashed and written at a time: large enough that Python does not count, small enough to be stopped soon."""


class Unavailable(ModelCacheError):
    """The source does not answer, or not as it should; it may soon."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file that a source has."""

    path: str
    bytes: int
    sha256: str = ""
    """Empty where the source does not say."""
    git_sha1: str = ""
    """Of git's object, which hubs give for small files."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What a source has of a model."""

    files: tuple[ListedFile, ...]
    revision: str = ""


class Source(Protocol):
    """One model at one place."""

    shown: str
    """The place, for people and for the manifest."""
    name: str
    """What the model is called in the cache, unless told otherwise."""

    def listing(self) -> Listing:
        """Return the files; raises ``Unavailable`` for what may pass, ``ModelCacheError`` for what will not."""
        ...

    def bring(self, file: ListedFile, listing: Listing, part: Path, told: Callable[[int], None]) -> str:
        """Bring a file to ``part``, going on where what is there ends, and return its SHA-256 in hexadecimal.

        ``told`` is called with bytes as they come, those that were there included, negative ones where they are
        dropped; what it raises ends the work. Raises as ``listing`` does.
        """
        ...


def name_of_place(path: str) -> str:
    """Return the name of the last part of a path."""
    return plain_name(path.rstrip("/").rpartition("/")[2])
