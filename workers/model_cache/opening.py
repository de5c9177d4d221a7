"""Which source a person or a setting means: a directory, an HTTP mirror, or a model of a hub."""

from __future__ import annotations

import re
from pathlib import Path

from poolgrid.workers.model_cache.directory import Directory
from poolgrid.workers.model_cache.hub import Hub
from poolgrid.workers.model_cache.manifest import ModelCacheError
from poolgrid.workers.model_cache.mirror import Mirror
from poolgrid.workers.model_cache.sources import Source

HUB_SCHEME = "hf://"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")


def open_source(text: str, timeout_s: float) -> Source:
    """Return the source that a person or a setting names; raises ``ModelCacheError`` when it is none."""
    if text.startswith(("http://", "https://")):
        return Mirror(text, timeout_s)
    given = Path(text).expanduser()
    if (
        text
        and not text.startswith(HUB_SCHEME)
        and (given.is_dir() or text.startswith(("/", "./", "../", "~")) or text == ".")
    ):
        return Directory(given)
    named = text.removeprefix(HUB_SCHEME)
    if not _HUB_NAME.fullmatch(named):
        raise ModelCacheError(
            f"the source of the model is {text!r}: allowed are a directory that is there, the http:// or https:// URL "
            "of a mirror, and ORG/MODEL or ORG/MODEL@REVISION on a hub"
        )
    repository, _, revision = named.partition("@")
    return Hub(repository, revision, timeout_s)
