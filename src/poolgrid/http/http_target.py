"""Where HTTP requests go."""

from __future__ import annotations

from urllib.parse import urlsplit


class HttpTarget:
    """Where requests go: the parts of an endpoint's URL, with or without a trailing ``/v1``."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"reading the URL {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"reading the URL {url!r}: allowed are http://HOST[:PORT] and https://HOST[:PORT]")
        self.secure = parts.scheme == "https"
        self.host = parts.hostname
        self.port = port or (443 if self.secure else 80)
        self.authority = parts.netloc.rpartition("@")[2]
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{self.authority}{self.path}"
