"""A model in a directory of this machine, or of a file system that is mounted here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from poolgrid.workers.model_cache.manifest import (
    FILES_MAX,
    MANIFEST_BYTES_MAX,
    MANIFEST_FILE,
    ModelCacheError,
    parse,
    path_problem,
)
from poolgrid.workers.model_cache.sources import CHUNK_BYTES, ListedFile, Listing, Unavailable, name_of_place
from poolgrid.workers.model_cache.unfollowed import open_unfollowed


class Directory:
    """Implements ``Source``; files whose path has a part that begins with a dot are not of the model."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self.shown = str(self._path)
        self.name = name_of_place(self.shown)

    def listing(self) -> Listing:
        """Return what the directory has; sums only where it has a manifest, as another cache does."""
        known = self._known()
        files: list[ListedFile] = []
        try:
            for path, size in self._walk():
                files.append(ListedFile(path, size, known.pop(path, "")))
                if len(files) > FILES_MAX:
                    raise ModelCacheError(f"{self.shown} has more than {FILES_MAX:,} files: it is not one model")
        except OSError as error:
            raise ModelCacheError(f"reading {self.shown}: {error.strerror or error}") from None
        if known:
            raise ModelCacheError(f"{self.shown} lacks {min(known)}, which its {MANIFEST_FILE} names")
        return Listing(tuple(sorted(files, key=lambda file: file.path)))

    def _walk(self) -> Iterator[tuple[str, int]]:
        # Links to files are followed: a hub's own cache consists of them.
        for root, directories, names in os.walk(self._path, onerror=_raise):
            directories[:] = sorted(each for each in directories if not each.startswith("."))
            for name in names:
                place = Path(root, name)
                path = place.relative_to(self._path).as_posix()
                if name.startswith(".") or path == MANIFEST_FILE or not place.is_file():
                    continue
                problem = path_problem(path)
                if problem:
                    raise ModelCacheError(f"reading {self.shown}: file {path!r} {problem}")
                yield path, place.stat().st_size

    def _known(self) -> dict[str, str]:
        place = self._path / MANIFEST_FILE
        if not place.is_file():
            return {}
        if place.stat().st_size > MANIFEST_BYTES_MAX:
            raise ModelCacheError(f"reading {place}: more than {MANIFEST_BYTES_MAX:,} bytes")
        return {file.path: file.sha256 for file in parse(place.read_bytes(), str(place)).files}

    def bring(self, file: ListedFile, listing: Listing, part: Path, told: Callable[[int], None]) -> str:
        """Copy a file, from its beginning: that its first part is still the same cannot be told."""
        place = self._path / file.path
        digest = hashlib.sha256()
        try:
            reading = place.open("rb")
        except OSError as error:
            raise ModelCacheError(f"reading {place}: {error.strerror or error}") from None
        with reading, open(part, "wb", opener=open_unfollowed) as written:
            while True:
                try:
                    chunk = reading.read(CHUNK_BYTES)
                except OSError as error:
                    raise Unavailable(f"reading {place}: {error.strerror or error}") from None
                if not chunk:
                    return digest.hexdigest()
                digest.update(chunk)
                written.write(chunk)
                told(len(chunk))


def _raise(error: OSError) -> None:
    raise error
