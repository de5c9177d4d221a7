"""Models by their names on a hub (ORG/MODEL): taken from ``huggingface_hub``'s cache, or fetched into it.

What ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME``, ``HF_HUB_OFFLINE`` and ``HF_HUB_DOWNLOAD_TIMEOUT`` mean elsewhere they
mean here. A file that is whole is not fetched again, and of several processes that fetch a file one does.

    python -m poolgrid.server.workers.model_hub ORG/MODEL     writes progress to standard error, then the directory
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

TOKENIZER: Final = "tokenizer.json"

WEIGHTS: Final = ["*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*"]
"""Files that a router does not need."""

REPORT_S: Final = 0.5
"""Time between two reports of the progress."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")

Report = Callable[[int, int], None]
"""Gets the bytes that are there, and those in all."""


class ModelHubError(RuntimeError):
    """A model could not be fetched or found; says what, where and why."""


class ProgressLine(msgspec.Struct, frozen=True):
    """What the process of a fetch writes now and then."""

    bytes: int
    total_bytes: int


def is_hub_name(model: str) -> bool:
    """Return whether a model is named as on a hub, and no directory here."""
    return _HUB_NAME.fullmatch(model) is not None and not Path(model).exists()


def fetch(model: str, *, weights: bool = True, report: Report | None = None) -> Path:
    """Return the directory of a model that a hub has; raises ``ModelHubError``.

    Without an answer of the hub it is what the cache has of it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    repository, revision = _parts(model)
    if report is not None:
        disable_progress_bars()
    try:
        with _reported(model, report):
            return Path(snapshot_download(repository, revision=revision, ignore_patterns=None if weights else WEIGHTS))
    except Exception as error:
        # Its HTTP library, and so what it raises, is another one in each of its major versions.
        raise _failure("fetching", model, error) from None


def look_up(model: str) -> None:
    """Ask the hub whether it has a model, or the cache where the hub must not be asked; raises ``ModelHubError``."""
    from huggingface_hub import HfApi, constants, snapshot_download

    repository, revision = _parts(model)
    try:
        if constants.HF_HUB_OFFLINE:
            snapshot_download(repository, revision=revision, local_files_only=True)
        else:
            HfApi().model_info(repository, revision=revision)
    except Exception as error:
        raise _failure("looking for", model, error) from None


def cached(model: str) -> Path | None:
    """Return the directory of a model whose tokenizer is on this machine already; asks no hub."""
    from huggingface_hub import try_to_load_from_cache

    if not is_hub_name(model):
        return None
    repository, revision = _parts(model)
    try:
        found = try_to_load_from_cache(repository, TOKENIZER, revision=revision)
    except ValueError:
        return None  # no name of Hugging Face's hub
    return Path(found).parent if isinstance(found, str) else None


def _parts(model: str) -> tuple[str, str | None]:
    repository, _, revision = model.partition("@")
    return repository, revision or None


def _failure(doing: str, model: str, error: Exception) -> ModelHubError:
    from huggingface_hub import constants

    message = " ".join(str(error).split()) or type(error).__name__
    advice = "A directory with config.json and tokenizer.json needs no hub."
    return ModelHubError(f"{doing} {model} at {constants.ENDPOINT}: {message} {advice}")


@contextmanager
def _reported(model: str, report: Report | None) -> Iterator[None]:
    """Report how much of a model is there while the block runs."""
    if report is None:
        yield
        return
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    blobs = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=_parts(model)[0], repo_type="model"), "blobs")
    over = threading.Event()

    def watch() -> None:
        total = _bytes_in_all(model)
        while not over.wait(REPORT_S):
            report(_bytes_below(blobs), total)

    watcher = threading.Thread(target=watch, name="progress of a fetch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()


def _bytes_in_all(model: str) -> int:
    """Return the size of a model; 0 when it is not to be had, which the fetch itself reports."""
    from huggingface_hub import HfApi

    repository, revision = _parts(model)
    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    except Exception:
        return 0
    return sum(each.size or 0 for each in info.siblings or ())


def _bytes_below(directory: Path) -> int:
    total = 0
    for place in directory.glob("*"):
        try:
            total += place.stat().st_size
        except OSError:
            continue  # renamed meanwhile: it is whole
    return total


def main(model: str) -> int:
    """Fetch a model for a process that waits for it; return the exit status."""

    def report(done: int, total: int) -> None:
        sys.stderr.write(msgspec.json.encode(ProgressLine(done, total)).decode() + "\n")
        sys.stderr.flush()

    try:
        path = fetch(model, report=report)
    except ModelHubError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
