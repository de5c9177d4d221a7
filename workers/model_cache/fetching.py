"""Brings a model into a cache, once and whole: from a hub with ``huggingface_hub``, or from a directory.

What ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME``, ``HF_HUB_OFFLINE`` and ``HF_HUB_DOWNLOAD_TIMEOUT`` mean elsewhere they
mean here. Whole files that an earlier attempt has fetched are not fetched again.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import msgspec

from poolgrid.workers.model_cache.cache import (
    FILES_MAX,
    MANIFEST_FILE,
    NAME_CHARS_MAX,
    Manifest,
    ModelCache,
    ModelCacheError,
    ModelFile,
    WrongFile,
    bytes_below,
    path_problem,
    sha256_of,
)

log = logging.getLogger(__name__)

HUB_SCHEME = "hf://"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")

NOT_OF_THE_MODEL = [".gitattributes", ".gitignore"]
"""Files of a hub's repository that no engine reads."""

LIBRARY_FILES = ".cache"
"""What ``huggingface_hub`` keeps in a directory that it fetches into."""

SPARE_BYTES = 64 * 1024 * 1024
"""Stays free on the disk in addition to the model: a file system that is full to its last byte breaks others."""

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Between attempts, after those that the library makes by itself."""

REPORT_S = 0.5
"""Time between two reports of the progress."""

Report = Callable[[str, int, int], None]
"""Gets the phase of the work (``wait``, ``list``, ``fetch``, ``verify``), bytes that are done, and bytes in all."""


def counter(report: Report, phase: str, total: int) -> Callable[[int], None]:
    """Return what adds up bytes and reports them."""
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        report(phase, done, total)

    return count


class UnavailableError(ModelCacheError):
    """The source does not answer, or not as it should; it may soon."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model at one place: a directory, or a repository of a hub."""

    shown: str
    """For people and for the manifest."""
    name: str
    """The model's name in the cache by default."""
    directory: Path | None = None
    repository: str = ""
    revision: str = ""


class ListedFile(NamedTuple):
    """A file that a source has."""

    path: str
    bytes: int
    sha256: str = ""
    """Empty where the source does not say."""


def parse_source(text: str) -> ModelSource:
    """Return the source that a person or a setting names; raises ``ModelCacheError`` when it is none."""
    if text.startswith(("http://", "https://")):
        raise ModelCacheError(
            f"the source of the model is {text!r}: models are not fetched from HTTP servers of files; set HF_ENDPOINT "
            "to a hub or its mirror and give ORG/MODEL, or mount the directory"
        )
    given = Path(text).expanduser()
    if text == "." or (text and not text.startswith(HUB_SCHEME) and (given.is_dir() or text[0] in "/~.")):
        path = given.absolute()
        return ModelSource(str(path), _plain(path.name), directory=path)
    named = text.removeprefix(HUB_SCHEME)
    if not _HUB_NAME.fullmatch(named):
        raise ModelCacheError(
            f"the source of the model is {text!r}: allowed are a directory that is there, and ORG/MODEL or "
            "ORG/MODEL@REVISION on a hub"
        )
    repository, _, revision = named.partition("@")
    return ModelSource(f"{HUB_SCHEME}{named}", _plain(named), repository=repository, revision=revision)


def is_hub_name(model: str) -> bool:
    """Return whether a model is named as on a hub, and no directory here."""
    return "/" in model and _HUB_NAME.fullmatch(model.removeprefix(HUB_SCHEME)) is not None and not Path(model).exists()


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._@+-]", "_", text.strip("/").replace("/", "--")).lstrip("._@+-")[:NAME_CHARS_MAX]


@dataclass(frozen=True)
class ModelFetch:
    """One model on its way from a source into a cache."""

    cache: ModelCache
    source: ModelSource
    name: str
    report: Report
    wait_s: float = 7200.0
    """How long another process may hold the model's lock: it may be fetching all of it."""
    size_max: int = 4 * 2**40
    """Largest model, in bytes: twice what the largest published ones have."""
    exclude: tuple[str, ...] = ()
    """Patterns of files that are left out."""
    check: bool = False
    """Read what is there, and fetch again what is not what it was."""
    pauses_s: Sequence[float] = PAUSES_S

    def look_up(self) -> None:
        """Ask the source whether it has the model, and fetch nothing; raises ``ModelCacheError``."""
        if self.source.directory is None:
            if _is_offline():
                self._cached()
            else:
                self._listed()

    def run(self) -> Manifest:
        """Return the manifest of the model, which is whole then; raises ``ModelCacheError``."""
        whole = None if self.check else self._whole()
        if whole is not None:
            return whole
        self.report("wait", 0, 0)
        with self.cache.locked(self.name, self.wait_s):
            try:
                return self._with_lock()
            except OSError as error:
                place = error.filename or self.cache.directory
                raise ModelCacheError(f"fetching {self.source.shown} to {place}: {error.strerror or error}") from None

    def _known(self) -> Manifest | None:
        """Return the manifest of the model where it is of this source; raises ``ModelCacheError`` where it is not."""
        manifest = self.cache.manifest(self.name)
        path = self.cache.path(self.name)
        if manifest is None:
            if path.exists():
                raise ModelCacheError(
                    f"{path} is there and has no {MANIFEST_FILE}: it was not fetched by poolgrid; move it away, or "
                    "give another name"
                )
        elif (manifest.source, manifest.exclude) != (self.source.shown, self.exclude):
            raise ModelCacheError(
                f"{path} was fetched from {manifest.source}{_without(manifest.exclude)}, and is asked for from "
                f"{self.source.shown}{_without(self.exclude)}: give another name, or remove it"
            )
        return manifest

    def _whole(self) -> Manifest | None:
        manifest = self._known()
        return None if manifest is None or self.cache.wrong_files(self.name, manifest) else manifest

    def _with_lock(self) -> Manifest:
        # Another process may have fetched it meanwhile.
        manifest = self._known()
        if manifest is not None:
            read = counter(self.report, "verify", manifest.total_bytes) if self.check else None
            wrong = self.cache.wrong_files(self.name, manifest, read)
            if not wrong:
                return manifest
            self._take_back(wrong)
        self.report("list", 0, 0)
        made = self._patiently(self._fetch)
        partial = self.cache.partial_path(self.name)
        (partial / MANIFEST_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(made)) + b"\n")
        for each in (*(partial / file.path for file in made.files), partial / MANIFEST_FILE, partial):
            _sync(each)
        partial.rename(self.cache.path(self.name))
        _sync(self.cache.directory)
        return made

    def _take_back(self, wrong: Sequence[WrongFile]) -> None:
        """Make a broken model one that is being fetched, without its wrong files."""
        broken, partial = self.cache.path(self.name), self.cache.partial_path(self.name)
        for each in wrong:
            log.warning("%s: %s %s; it is fetched again", broken, each.path, each.problem)
        if broken.is_symlink():
            raise ModelCacheError(f"{broken} is a symbolic link: a model is fetched into real directories only")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        broken.rename(partial)
        for path in (MANIFEST_FILE, *(each.path for each in wrong)):
            (partial / path).unlink(missing_ok=True)

    def _fetch(self) -> Manifest:
        """Bring all files to the partial directory; raises ``UnavailableError`` for what may be better soon."""
        partial = self.cache.partial_path(self.name)
        partial.mkdir(parents=True, exist_ok=True)
        directory, revision = self.source.directory, ""
        if directory is None and _is_offline():
            directory = self._cached()
            revision = directory.name
        if directory is not None:
            listed = _files_below(directory)
        else:
            listed, revision = self._listed()
        files = [file for file in listed if not any(fnmatchcase(file.path, pattern) for pattern in self.exclude)]
        if not files:
            left_out = f"; {', '.join(self.exclude)} leaves none of them" if listed else ": it is no model"
            raise ModelCacheError(f"{self.source.shown} has {len(listed)} files{left_out}")
        total = sum(file.bytes for file in files)
        _clean(partial, {file.path for file in files})
        self._check_room(partial, total)
        with self._reported(partial, total):
            if directory is None:
                self._download(partial, revision)
            else:
                for file in files:
                    (partial / file.path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(directory / file.path, partial / file.path)
        made = self._summed(partial, files, total)
        shutil.rmtree(partial / LIBRARY_FILES, ignore_errors=True)
        return Manifest(1, self.name, self.source.shown, made, revision, self.exclude)

    def _listed(self) -> tuple[list[ListedFile], str]:
        """Return the files of the hub's revision, and its commit."""
        from huggingface_hub import HfApi

        try:
            info = HfApi().model_info(
                self.source.repository, revision=self.source.revision or None, files_metadata=True
            )
        except Exception as error:
            # Its HTTP library, and so what it raises, is another one in each of its major versions.
            raise self._failure("listing", error) from None
        files = []
        for each in info.siblings or ():
            if each.rfilename in NOT_OF_THE_MODEL:
                continue
            problem = path_problem(each.rfilename) or ("has no size" if each.size is None else "")
            if problem:
                raise ModelCacheError(f"{self.source.shown}: file {each.rfilename!r} {problem}")
            files.append(ListedFile(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs is not None else ""))
        return files, info.sha or self.source.revision

    def _download(self, partial: Path, revision: str) -> None:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        disable_progress_bars()
        ignored = [*NOT_OF_THE_MODEL, *self.exclude]
        try:
            snapshot_download(self.source.repository, revision=revision, local_dir=partial, ignore_patterns=ignored)
        except Exception as error:
            raise self._failure("fetching", error) from None

    def _cached(self) -> Path:
        """Return the model's directory in the hub's own cache of this machine; nothing is asked."""
        from huggingface_hub import snapshot_download

        revision = self.source.revision or None
        try:
            return Path(snapshot_download(self.source.repository, revision=revision, local_files_only=True))
        except Exception as error:
            raise ModelCacheError(
                f"{self.source.shown}: HF_HUB_OFFLINE is set, and the hub's cache on this machine does not have it: "
                f"{' '.join(str(error).split())}"
            ) from None

    def _failure(self, doing: str, error: Exception) -> ModelCacheError:
        from huggingface_hub import constants

        status = getattr(getattr(error, "response", None), "status_code", None)
        message = " ".join(str(error).split()) or type(error).__name__
        is_final = isinstance(error, ValueError) or (status is not None and status < 500 and status not in (408, 429))
        kind = ModelCacheError if is_final else UnavailableError
        return kind(f"{doing} {self.source.shown} at {constants.ENDPOINT}: {message}")

    def _check_room(self, partial: Path, total: int) -> None:
        if total > self.size_max:
            raise ModelCacheError(
                f"{self.source.shown} has {total:,} bytes, allowed are {self.size_max:,}; nothing was fetched"
            )
        missing = max(0, total - bytes_below(partial)) + SPARE_BYTES
        free = shutil.disk_usage(partial).free
        if missing > free:
            raise ModelCacheError(
                f"{self.source.shown} needs {missing:,} more bytes in {self.cache.directory}, free are {free:,}; "
                "nothing was fetched"
            )

    def _summed(self, partial: Path, files: Sequence[ListedFile], total: int) -> tuple[ModelFile, ...]:
        """Return the files with their sums; one that is not what the source lists is dropped and fetched again."""
        made: list[ModelFile] = []
        read = counter(self.report, "verify", total)
        for file in files:
            place = partial / file.path
            if not place.is_file():
                # The library returns what is there where a hub stops answering.
                raise UnavailableError(f"{self.source.shown}: {file.path} did not come")
            sha256 = sha256_of(place, read)
            size = place.stat().st_size
            if size != file.bytes or (file.sha256 and sha256 != file.sha256):
                place.unlink()
                raise UnavailableError(
                    f"{self.source.shown}: {file.path} has {size:,} bytes and the sum {sha256}, expected are "
                    f"{file.bytes:,} and {file.sha256 or 'any'}; it is dropped"
                )
            made.append(ModelFile(file.path, size, sha256))
        return tuple(made)

    def _patiently(self, work: Callable[[], Manifest]) -> Manifest:
        for pause_s in self.pauses_s:
            try:
                return work()
            except UnavailableError as error:
                log.warning("%s; tried again in %.0f s", error, pause_s)
                threading.Event().wait(pause_s)
        return work()

    @contextmanager
    def _reported(self, partial: Path, total: int) -> Iterator[None]:
        """Report how much is there while the block runs."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(REPORT_S):
                self.report("fetch", min(total, bytes_below(partial)), total)

        self.report("fetch", 0, total)
        watcher = threading.Thread(target=watch, name="progress of a fetch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _without(exclude: Sequence[str]) -> str:
    return f" without {', '.join(exclude)}" if exclude else ""


def _files_below(directory: Path) -> list[ListedFile]:
    """Return the files of a directory but hidden ones; links to files are followed: a hub's own cache has such."""
    files: list[ListedFile] = []
    if not directory.is_dir():
        raise ModelCacheError(f"reading {directory}: it is no directory that is there")
    for root, directories, names in os.walk(directory):
        directories[:] = sorted(each for each in directories if not each.startswith("."))
        for name in sorted(names):
            place = Path(root, name)
            if not name.startswith(".") and name != MANIFEST_FILE and place.is_file():
                files.append(ListedFile(place.relative_to(directory).as_posix(), place.stat().st_size))
        if len(files) > FILES_MAX:
            raise ModelCacheError(f"{directory} has more than {FILES_MAX:,} files: it is not one model")
    return files


def _clean(partial: Path, wanted: set[str]) -> None:
    """Remove links, which no fetch makes, parts of files that were cut off, and files that are not of the model."""
    for place in [each for each in partial.rglob("*") if each.is_symlink() or not each.is_dir()]:
        path = place.relative_to(partial).as_posix()
        is_of_library = path.startswith(f"{LIBRARY_FILES}/") and not path.endswith(".incomplete")
        if place.is_symlink() or not (path in wanted or is_of_library):
            place.unlink()


def _sync(path: Path) -> None:
    """Wait until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
