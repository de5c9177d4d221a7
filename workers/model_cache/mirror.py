"""A model on an HTTP server: the directory of a cache, served by any server of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import httpx

from poolgrid.workers.model_cache.downloads import download, make_client, refusal
from poolgrid.workers.model_cache.manifest import MANIFEST_BYTES_MAX, MANIFEST_FILE, ModelCacheError, parse
from poolgrid.workers.model_cache.sources import ListedFile, Listing, Unavailable, name_of_place


class Mirror:
    """Implements ``Source``."""

    def __init__(self, url: str, timeout_s: float) -> None:
        try:
            parts = urlsplit(url)
            host = parts.hostname
        except ValueError:
            host = None
        if not host or parts.query or parts.fragment or parts.username:
            raise ModelCacheError(
                f"the URL of the mirror is {url!r}: allowed is http(s)://HOST[:PORT]/PATH, without user and question"
            )
        self._url = url.rstrip("/")
        self._client = make_client(timeout_s)
        self.shown = self._url
        self.name = name_of_place(unquote(parts.path)) or name_of_place(host)

    def listing(self) -> Listing:
        """Return what the mirror's manifest names."""
        url = f"{self._url}/{MANIFEST_FILE}"
        text = b""
        try:
            with self._client.stream("GET", url) as answer:
                if answer.status_code == 404:
                    raise ModelCacheError(
                        f"GET {url}: status 404. A mirror is a directory that `poolgrid model fetch` has made, served "
                        "by any HTTP server"
                    )
                if answer.status_code != 200:
                    raise refusal(url, answer.status_code)
                for chunk in answer.iter_bytes():
                    text += chunk
                    if len(text) > MANIFEST_BYTES_MAX:
                        raise ModelCacheError(f"GET {url}: more than {MANIFEST_BYTES_MAX:,} bytes")
        except httpx.HTTPError as error:
            raise Unavailable(f"GET {url}: {error or type(error).__name__}") from None
        manifest = parse(text, url)
        files = tuple(ListedFile(file.path, file.bytes, file.sha256) for file in manifest.files)
        return Listing(files, manifest.revision)

    def bring(self, file: ListedFile, listing: Listing, part: Path, told: Callable[[int], None]) -> str:
        return download(self._client, f"{self._url}/{quote(file.path)}", {}, file, part, told)
