"""What a cached model consists of: its files with sizes and SHA-256 sums, and where they came from. Pure.

The manifest is written last, into the directory of the model, under ``MANIFEST_FILE``. A directory that has one is
whole; served over HTTP, it is a mirror for others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MANIFEST_FILE = "poolgrid-model.json"
"""Not hidden: servers of files leave hidden ones out."""

PART = ".poolgrid-part"
"""Ends the name of a file that is not whole."""

FILES_MAX = 100_000
"""Files of a model; the largest have some hundreds."""

MANIFEST_BYTES_MAX = 64 * 1024 * 1024
"""More than ``FILES_MAX`` files take; what is larger is something else."""

PATH_CHARS_MAX = 1024
"""Of a file's path in its model; file systems allow four times that for all of it."""

NAME_CHARS_MAX = 200
"""Of a model's name, which is a directory's: file systems allow 255 bytes."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")


class ModelCacheError(RuntimeError):
    """A model could not be fetched or found; says what, where and what to do."""


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a model."""

    path: Annotated[str, Meta(min_length=1, max_length=PATH_CHARS_MAX)]
    """Below the directory of the model, with ``/``."""
    bytes: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class Manifest(msgspec.Struct, frozen=True):
    """All of a model."""

    version: Literal[1]
    name: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    source: Annotated[str, Meta(max_length=8192)]
    """Directory, URL or name on a hub that it was fetched from."""
    files: Annotated[tuple[ModelFile, ...], Meta(min_length=1, max_length=FILES_MAX)]
    revision: Annotated[str, Meta(max_length=256)] = ""
    """Commit of the hub; empty for sources without."""
    exclude: Annotated[tuple[str, ...], Meta(max_length=1000)] = ()
    """Patterns of files that were left out."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files)


def encode(manifest: Manifest) -> bytes:
    """Return a manifest as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"


def parse(text: bytes, place: str) -> Manifest:
    """Return a manifest; raises ``ModelCacheError`` naming the place and the field."""
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelCacheError(f"reading {place}: {error}") from None
    seen: set[str] = set()
    for file in manifest.files:
        problem = path_problem(file.path)
        if not problem and file.path in seen:
            problem = "is named twice"
        if problem:
            raise ModelCacheError(f"reading {place}: file {file.path!r} {problem}")
        seen.add(file.path)
    return manifest


def path_problem(path: str) -> str:
    """Return why a file cannot have this path below a model's directory; empty when it can."""
    parts = PurePosixPath(path).parts
    if not parts or len(path) > PATH_CHARS_MAX:
        return f"has {len(path)} characters, allowed are 1 to {PATH_CHARS_MAX}"
    if path.startswith("/") or ".." in parts or "\\" in path or "\0" in path or "/".join(parts) != path:
        return "is not a plain path below the directory of the model"
    if parts[0] == MANIFEST_FILE:
        return "is the manifest itself"
    if path.endswith(PART):
        return f"ends like one that is not whole ({PART})"
    return ""


def name_problem(name: str) -> str:
    """Return why a model cannot have this name in the cache; empty when it can."""
    if not _NAME.fullmatch(name) or len(name) > NAME_CHARS_MAX:
        return f"allowed are 1 to {NAME_CHARS_MAX} letters, digits, '.', '_', '-', '+' and '@', a letter or digit first"
    return ""


def plain_name(text: str) -> str:
    """Return a name for what a source is called: ``org/model`` becomes ``org--model``."""
    return re.sub(r"[^A-Za-z0-9._@+-]", "_", text.strip("/").replace("/", "--")).lstrip("._@+-")[:NAME_CHARS_MAX]


def left_out(path: str, exclude: Sequence[str]) -> bool:
    """Return whether a file is left out by one of the patterns; ``*`` stands for ``/`` too."""
    return any(fnmatchcase(path, pattern) for pattern in exclude)
