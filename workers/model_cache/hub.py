"""A model on a hub that speaks Hugging Face's HTTP API.

``huggingface_hub`` lists it and knows who asks, so that ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME`` and
``HF_HUB_OFFLINE`` mean here what they mean elsewhere. Files that its own cache has are taken from there. The others are
fetched here: that library begins a file again that broke off in a process before.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from poolgrid.workers.model_cache.directory import Directory
from poolgrid.workers.model_cache.downloads import PASSING, download, make_client
from poolgrid.workers.model_cache.manifest import ModelCacheError, path_problem, plain_name
from poolgrid.workers.model_cache.sources import CHUNK_BYTES, ListedFile, Listing, Unavailable

NOT_OF_THE_MODEL = frozenset({".gitattributes", ".gitignore"})
"""Files of the repository that no engine reads."""


class Hub:
    """Implements ``Source``."""

    def __init__(self, repository: str, revision: str, timeout_s: float) -> None:
        self._repository = repository
        self._revision = revision
        self._timeout_s = timeout_s
        self._client = make_client(timeout_s)
        self.shown = f"hf://{repository}" + (f"@{revision}" if revision else "")
        self.name = plain_name(repository + (f"@{revision}" if revision else ""))

    def listing(self) -> Listing:
        """Return the files of the revision; offline, those that the hub's own cache on this machine has."""
        from huggingface_hub import HfApi, constants

        if constants.HF_HUB_OFFLINE:
            return self._listed_offline()
        try:
            info = HfApi(endpoint=constants.ENDPOINT).model_info(
                self._repository, revision=self._revision or None, files_metadata=True, timeout=self._timeout_s
            )
        except Exception as error:
            # Its HTTP library, and so what it raises, is another one in each of its major versions.
            raise self._trouble("listing", error) from None
        files: list[ListedFile] = []
        for each in info.siblings or ():
            if each.rfilename in NOT_OF_THE_MODEL:
                continue
            problem = path_problem(each.rfilename)
            if problem:
                raise ModelCacheError(f"{self.shown}: file {each.rfilename!r} {problem}")
            if each.size is None:
                raise ModelCacheError(f"{self.shown}: the hub does not say how large {each.rfilename} is")
            files.append(
                ListedFile(
                    each.rfilename,
                    each.size,
                    "" if each.lfs is None else each.lfs.sha256,
                    "" if each.lfs is not None or each.blob_id is None else each.blob_id,
                )
            )
        return Listing(tuple(sorted(files, key=lambda file: file.path)), info.sha or self._revision)

    def _trouble(self, doing: str, error: Exception) -> ModelCacheError:
        status = getattr(getattr(error, "response", None), "status_code", None)
        said = " ".join(str(error).split()) or type(error).__name__
        final = (status is not None and status not in PASSING) or isinstance(error, ValueError)
        return (ModelCacheError if final else Unavailable)(f"{doing} {self.shown} at {self._endpoint()}: {said}")

    @staticmethod
    def _endpoint() -> str:
        from huggingface_hub import constants

        return str(constants.ENDPOINT)

    def _listed_offline(self) -> Listing:
        """Return what the hub's own cache has; nothing is asked."""
        return Listing(Directory(self._cached()).listing().files, self._cached().name)

    def _cached(self) -> Path:
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(self._repository, revision=self._revision or None, local_files_only=True))
        except Exception as error:
            raise ModelCacheError(
                f"{self.shown}: HF_HUB_OFFLINE is set, and the hub's cache on this machine does not have it: "
                f"{' '.join(str(error).split())}"
            ) from None

    def bring(self, file: ListedFile, listing: Listing, part: Path, told: Callable[[int], None]) -> str:
        """Take a file from the hub's cache of this machine, or fetch it."""
        from huggingface_hub import constants, get_token, hf_hub_url, try_to_load_from_cache

        found = try_to_load_from_cache(self._repository, file.path, revision=listing.revision)
        if isinstance(found, str) and os.path.getsize(found) == file.bytes:
            source = Directory(Path(found).parent)
            sha256 = source.bring(ListedFile(os.path.basename(found), file.bytes), listing, part, told)
        elif constants.HF_HUB_OFFLINE:
            raise ModelCacheError(f"{self.shown}: {file.path} is not in the hub's cache any more")
        else:
            url = hf_hub_url(self._repository, file.path, revision=listing.revision, endpoint=constants.ENDPOINT)
            token = get_token()
            # Where the hub sends to its store, the client leaves it out.
            headers = {"authorization": f"Bearer {token}"} if token else {}
            sha256 = download(self._client, url, headers, file, part, told)
        if file.git_sha1 and _git_sha1(part, file.bytes) != file.git_sha1:
            part.unlink()
            raise Unavailable(f"{self.shown}: {file.path} is not git's object {file.git_sha1}, which the hub names")
        return sha256


def _git_sha1(path: Path, size: int) -> str:
    """Return the name of a file as git's object, by which hubs know small files."""
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as reading:
        while chunk := reading.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
