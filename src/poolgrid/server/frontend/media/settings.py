"""What an operator can choose about media; part of the OpenAI surface's settings."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from poolgrid.server.process.settings import Settings

SCHEMES = ("http", "https", "data", "file")
MEGABYTE = 1024 * 1024

REQUEST_BYTES_MAX = 52 * MEGABYTE
"""All media of one request together: what fits into a message to a worker."""

REDIRECTS_MAX = 3
"""Redirects that are followed for one URL; each target is checked again."""

FETCHES_MAX = 32
"""Media that are fetched at a time; more wait within their time-out. Bounds sockets and threads."""

FILE_BYTES_MAX = 50 * MEGABYTE
"""Largest medium, enforced while it streams in: any photograph. Where a model's workers were told less, that holds."""

ITEMS_MAX = 64
"""Media of one request: a long conversation of an agent that looks at a screen."""

FETCH_TIMEOUT_MS = 10_000
"""Longest time for one URL, from resolving its host to the last byte, redirects included: a server that sends one byte
a second is cut off too."""

CACHE_BYTES = 256 * MEGABYTE
"""Fetched media that are kept: a conversation sends its images again with every turn."""

CACHE_TTL_MS = 60_000
"""How long a fetched URL is taken as unchanged."""


class MediaSettings(Settings):
    """Where media may come from, how large they may be, how long they may take."""

    panel: ClassVar[str] = "Media"

    allowed_local_media_path: Path | None = Field(
        default=None,
        description=(
            "Allow media by file path (file:///...) below this directory, after resolving links. Unset = no "
            "local files."
        ),
    )
    media_allowed_schemes: tuple[str, ...] = Field(
        default=("https", "http", "data"),
        description="Allow media by URLs of this scheme: https, http or data. Repeat for more.",
    )
    media_allowed_networks: tuple[str, ...] = Field(
        default=(),
        max_length=256,
        description=(
            "Allow media from this private, loopback or link-local network (CIDR, as 10.1.0.0/16). Repeat for more."
        ),
    )
    media_memory_bytes: ClassVar[int] = 1024 * MEGABYTE
    """Memory for media of requests in flight, twenty of the largest; beyond, requests with media get 429."""

    @field_validator("allowed_local_media_path")
    @classmethod
    def _directory(cls, value: Path | None) -> Path | None:
        if value is None:
            return None
        resolved = value.resolve()
        if not resolved.is_dir():
            raise ValueError(f"{value} is not a directory")
        if resolved == Path(resolved.anchor):
            raise ValueError("/ would let clients read every file of this machine: name a directory with media only")
        return resolved

    @field_validator("media_allowed_schemes")
    @classmethod
    def _schemes(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if value not in SCHEMES[:3]:
                raise ValueError(f"{value!r} is not a scheme that can be allowed; those are http, https and data")
        return values

    @field_validator("media_allowed_networks")
    @classmethod
    def _networks(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            ipaddress.ip_network(value)  # its ValueError says what is wrong
        return values
