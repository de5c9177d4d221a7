"""Files over HTTP, gone on with where they broke off."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx

from poolgrid.workers.model_cache.manifest import ModelCacheError
from poolgrid.workers.model_cache.sources import CHUNK_BYTES, ListedFile, Unavailable
from poolgrid.workers.model_cache.unfollowed import open_unfollowed

CONNECTIONS_MAX = 32
"""Open at a time to all servers of a source: more than files are fetched at a time."""

REDIRECTS_MAX = 10
"""A hub sends to its store, which may send on."""

PASSING = frozenset({408, 425, 429, *range(500, 600)})
"""Answers that may be others soon."""


def make_client(timeout_s: float) -> httpx.Client:
    """Return a client that gives a server up after ``timeout_s`` without a byte."""
    return httpx.Client(
        timeout=timeout_s,
        follow_redirects=True,
        max_redirects=REDIRECTS_MAX,
        limits=httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX),
        # What is fetched is what its sum says; a server must not pack it on the way.
        headers={"accept-encoding": "identity"},
    )


def download(
    client: httpx.Client,
    url: str,
    headers: Mapping[str, str],
    file: ListedFile,
    part: Path,
    told: Callable[[int], None],
) -> str:
    """Bring a file to ``part``, from where what is there ends; return its SHA-256.

    Raises ``Unavailable`` when the connection fails or the answer is too short, ``ModelCacheError`` when the server
    refuses.
    """
    digest = hashlib.sha256()
    have = _taken_over(part, file.bytes, digest.update, told)
    if have == file.bytes and part.exists():
        return digest.hexdigest()
    asked = {**headers, **({"range": f"bytes={have}-"} if have else {})}
    try:
        with client.stream("GET", url, headers=asked) as answer:
            if have and answer.status_code == 200:
                # The server knows no ranges.
                told(-have)
                have, digest = 0, hashlib.sha256()
            elif have and answer.status_code == 416:
                part.unlink(missing_ok=True)
                told(-have)
                raise Unavailable(f"GET {url}: what was fetched before does not fit what is there now; it is dropped")
            elif answer.status_code != (206 if have else 200):
                raise refusal(url, answer.status_code)
            with open(part, "ab" if have else "wb", opener=open_unfollowed) as written:
                for chunk in answer.iter_raw():
                    have += len(chunk)
                    if have > file.bytes:
                        raise ModelCacheError(f"GET {url}: more than the {file.bytes:,} bytes that it should have")
                    digest.update(chunk)
                    written.write(chunk)
                    told(len(chunk))
    except httpx.HTTPError as error:
        raise Unavailable(f"GET {url}: {_said(error)}") from None
    if have < file.bytes:
        raise Unavailable(f"GET {url}: the answer ended after {have:,} of {file.bytes:,} bytes")
    return digest.hexdigest()


def refusal(url: str, status: int) -> ModelCacheError:
    """Return what a status other than the expected one means."""
    kind = Unavailable if status in PASSING else ModelCacheError
    return kind(f"GET {url}: status {status}")


def _said(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _taken_over(part: Path, size: int, digest: Callable[[bytes], None], told: Callable[[int], None]) -> int:
    """Return how much of a file is there; it is hashed. What is longer than the file is dropped."""
    try:
        have = part.stat().st_size
    except FileNotFoundError:
        return 0
    if have > size:
        part.unlink()
        return 0
    with open(part, "rb", opener=open_unfollowed) as reading:
        while chunk := reading.read(CHUNK_BYTES):
            digest(chunk)
            told(len(chunk))
    return have
