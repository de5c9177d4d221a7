"""Files and directories of a cache's own, reached without following links.

Others may be able to write into a shared cache. A link there must not lead a fetch, which may run with more rights than
theirs, to write elsewhere. Paths are walked from a cache's own directory down, one component at a time, by descriptor.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from poolgrid.workers.model_cache.manifest import ModelCacheError

OWN_DIRECTORY = ".poolgrid"
"""What a cache needs for itself: parts of models, and locks."""

_KINDS = ("partial", "locks")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_unfollowed(path: str, flags: int) -> int:
    """Open a file below a cache's own directory (``opener`` of ``open``); raises ``ModelCacheError`` for a link."""
    place = Path(path)
    directory = _directory(place.parent, make=False)
    try:
        return os.open(place.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=directory)
    except OSError as error:
        raise _refusal(error, place) from None
    finally:
        os.close(directory)


def make_unfollowed(directory: Path) -> None:
    """Make a directory below a cache's own, with its parents; raises ``ModelCacheError`` for a link among them."""
    os.close(_directory(directory, make=True))


def _directory(place: Path, make: bool) -> int:
    parts = place.parts
    own = (at for at, pair in enumerate(pairwise(parts)) if pair[0] == OWN_DIRECTORY and pair[1] in _KINDS)
    at = next(own, len(parts))
    root = Path(*parts[:at])
    if make:
        root.mkdir(parents=True, exist_ok=True)
    opened = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for end in range(at, len(parts)):
        try:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(parts[end], dir_fd=opened)
            below = os.open(parts[end], _DIRECTORY, dir_fd=opened)
        except OSError as error:
            raise _refusal(error, Path(*parts[: end + 1])) from None
        finally:
            os.close(opened)
        opened = below
    return opened


def _refusal(error: OSError, place: Path) -> Exception:
    if error.errno in (errno.ELOOP, errno.ENOTDIR) and place.is_symlink():
        return ModelCacheError(f"{place} is a symbolic link: remove it; a model is fetched into real directories only")
    return OSError(error.errno, error.strerror, str(place))
