"""Paths that lead out of the allowed directory, and files that are not what they say: nothing outside is opened."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from pydantic import ValidationError

from poolgrid.server.frontend.media.references import LocalFiles, MediaRefused
from poolgrid.server.frontend.media.settings import MediaSettings
from tests.frontend.media.audit_events import AuditEvents
from tests.frontend.media.loading import loading
from tests.frontend.media.samples import exploit_pickle, png, png_bomb, safetensors

SECRET = b"a secret that is nobody's business"
MEGABYTE = 1024 * 1024
MARKER = Path(tempfile.gettempdir()) / f"poolgrid-exploited-{os.getpid()}"
"""The file that hostile pickles would create."""


def opened_path(event: str, arguments: tuple[object, ...]) -> str | None:
    is_path = event == "open" and isinstance(arguments[0], str | bytes | os.PathLike)
    return os.fsdecode(arguments[0]) if is_path else None  # type: ignore[arg-type]


OPENED = AuditEvents(opened_path)


@pytest.fixture
def media_directory(tmp_path: Path) -> Path:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.png").write_bytes(SECRET)
    allowed = tmp_path / "media"
    (allowed / "below").mkdir(parents=True)
    (allowed / "cat.png").write_bytes(png())
    (allowed / "below" / "dog cat.png").write_bytes(png(color=(1, 2, 3)))
    (allowed / "inside.png").symlink_to(allowed / "cat.png")
    (allowed / "out.png").symlink_to(outside / "secret.png")
    (allowed / "way").symlink_to(outside)
    (allowed / "loop.png").symlink_to(allowed / "loop.png")
    (allowed / "null.png").symlink_to("/dev/null")
    os.mkfifo(allowed / "fifo.png")
    sibling = tmp_path / "media-of-others"
    sibling.mkdir()
    (sibling / "secret.png").write_bytes(SECRET)
    return allowed


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("{root}/../outside/secret.png", "media_path_not_allowed"),
        ("{root}/below/../../outside/secret.png", "media_path_not_allowed"),
        ("file://{root}/../outside/secret.png", "media_path_not_allowed"),
        ("file://{root}/%2e%2e/outside/secret.png", "media_path_not_allowed"),
        ("file://{root}/..%2foutside%2fsecret.png", "media_path_not_allowed"),
        ("{root}/out.png", "media_path_not_allowed"),
        ("{root}/way/secret.png", "media_path_not_allowed"),
        ("{root}-of-others/secret.png", "media_path_not_allowed"),
        ("{root}", "media_path_not_allowed"),
        ("{root}/below", "media_path_not_allowed"),
        ("{root}/null.png", "media_path_not_allowed"),
        ("{root}/fifo.png", "media_path_not_allowed"),
        ("{root}/loop.png", "media_path_not_allowed"),
        ("/etc/passwd", "media_path_not_allowed"),
        ("//etc/passwd", "media_path_not_allowed"),
        ("file:///proc/self/environ", "media_path_not_allowed"),
        ("/proc/self/root{root}/../outside/secret.png", "media_path_not_allowed"),
        ("file://elsewhere.test{root}/cat.png", "media_path_not_allowed"),
        ("file:cat.png", "media_path_not_allowed"),
        ("file://{root}/cat.png%00.txt", "media_path_not_allowed"),
        ("{root}/missing.png", "media_not_found"),
        ("{root}/cat.png/x.png", "media_not_found"),
    ],
)
async def test_what_is_not_a_file_below_the_directory_is_refused_and_nothing_outside_is_opened(
    media_directory: Path, url: str, code: str
) -> None:
    async with loading(allowed_local_media_path=media_directory) as media:
        with OPENED.listening() as opened:
            error = await media.refused(url.format(root=media_directory))

        assert error.code == code, error.message
        assert error.status in (400, 403)
        # Whatever was opened was the directory itself, or a plain name below a descriptor of it.
        assert all(name == str(media_directory) or os.sep not in name for name in opened), opened
        assert not {"secret.png", "outside", "passwd", "environ", "null"} & set(opened)


@pytest.mark.parametrize("url", ["{root}/cat.png", "file://{root}/cat.png", "file://localhost{root}/inside.png"])
async def test_files_below_the_directory_are_read(media_directory: Path, url: str) -> None:
    async with loading(allowed_local_media_path=media_directory) as media:
        (item,) = await media.take(url.format(root=media_directory))
        (other,) = await media.take(f"file://{media_directory}/below/dog%20cat.png")

        assert item.data == png()
        assert other.data == png(color=(1, 2, 3))


async def test_without_an_allowed_directory_no_file_is_read(media_directory: Path) -> None:
    async with loading() as media:
        with OPENED.listening() as opened:
            error = await media.refused(f"{media_directory}/cat.png")

        assert error.code == "media_path_not_allowed"
        assert not opened


def test_a_link_that_is_put_in_place_after_the_check_is_not_followed(
    media_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment between resolving and opening: a directory becomes a link to the outside."""
    files = LocalFiles(media_directory)
    resolved = os.path.realpath
    for name, target in (("below", "outside"), ("cat.png", "outside/secret.png")):

        def swap(path: str, name: str = name, target: str = target) -> str:
            answer = resolved(path)
            (media_directory / name).rename(media_directory / f"{name}.moved")
            (media_directory / name).symlink_to(media_directory.parent / target)
            return answer

        path = media_directory / name if name.endswith(".png") else media_directory / name / "dog cat.png"
        with monkeypatch.context() as patched:
            patched.setattr(os.path, "realpath", swap)
            with pytest.raises(MediaRefused) as caught:
                files.read(str(path), MEGABYTE)

        assert caught.value.code in ("media_path_not_allowed", "media_not_found")


async def test_too_large_files_and_files_that_grow_are_refused(media_directory: Path) -> None:
    (media_directory / "big.png").write_bytes(bytes(MEGABYTE + 1))
    (media_directory / "bomb.png").write_bytes(png_bomb())
    async with loading(allowed_local_media_path=media_directory, max_file_size_mb=1) as media:
        assert (await media.refused(f"{media_directory}/big.png")).code == "media_too_large"
        assert (await media.refused(f"{media_directory}/bomb.png")).code == "media_too_many_pixels"


def test_a_directory_that_would_open_everything_is_not_accepted() -> None:
    for path in ("/", "/nonexistent-directory"):
        with pytest.raises(ValidationError):
            MediaSettings(allowed_local_media_path=Path(path))


GOOD = {
    "embeddings.safetensors": safetensors(),
    "metadata.safetensors": safetensors(
        {"__metadata__": {"format": "pt"}, "a": {"dtype": "BF16", "shape": [4, 4], "data_offsets": [0, 32]}}
    ),
}

HOSTILE = {
    "a pickle in PyTorch's archive": ("x.pt", b"PK\3\4" + exploit_pickle(f"touch {MARKER}"), "media_embeddings_unsafe"),
    "a bare pickle": ("x.pt", exploit_pickle(f"touch {MARKER}"), "media_embeddings_unsafe"),
    "a pickle under another name": (
        "x.safetensors",
        exploit_pickle(f"touch {MARKER}", 4),
        "media_embeddings_unsafe",
    ),
    "a header that claims the world": ("x.safetensors", safetensors(length=2**63), "media_broken"),
    "a header longer than the file": ("x.safetensors", safetensors(length=10_000), "media_broken"),
    "a header that is not JSON": ("x.safetensors", safetensors(b"{nope"), "media_broken"),
    "a header nested without end": ("x.safetensors", safetensors(b"[" * 100_000), "media_broken"),
    "a header that is a list": ("x.safetensors", safetensors([]), "media_broken"),
    "no tensors": ("x.safetensors", safetensors({}), "media_broken"),
    "an unknown dtype": (
        "x.safetensors",
        safetensors({"a": {"dtype": "OBJ", "shape": [8], "data_offsets": [0, 32]}}),
        "media_broken",
    ),
    "a shape that is not its bytes": (
        "x.safetensors",
        safetensors({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 32]}}),
        "media_broken",
    ),
    "a shape that overflows": (
        "x.safetensors",
        safetensors({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 32]}}),
        "media_broken",
    ),
    "bytes beyond the file": (
        "x.safetensors",
        safetensors({"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}),
        "media_broken",
    ),
    "overlapping tensors": (
        "x.safetensors",
        safetensors({name: {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]} for name in "ab"}),
        "media_broken",
    ),
    "bytes that belong to no tensor": ("x.safetensors", safetensors(data=bytes(33)), "media_broken"),
    "nothing": ("x.safetensors", b"", "media_broken"),
    "a picture": ("x.safetensors", png(), "media_broken"),
}


@pytest.mark.parametrize("name", GOOD)
async def test_files_of_embeddings_are_taken(media_directory: Path, name: str) -> None:
    (media_directory / name).write_bytes(GOOD[name])
    async with loading(allowed_local_media_path=media_directory) as media:
        (item,) = await media.take(f"{media_directory}/{name}")

        assert item.kind == "embeddings"
        assert item.media_type == "application/x-safetensors"


@pytest.mark.parametrize("case", HOSTILE)
async def test_hostile_files_of_embeddings_are_refused_and_nothing_in_them_runs(
    media_directory: Path, case: str
) -> None:
    name, content, code = HOSTILE[case]
    (media_directory / name).write_bytes(content)
    MARKER.unlink(missing_ok=True)

    async with loading(allowed_local_media_path=media_directory) as media:
        error = await media.refused(f"{media_directory}/{name}")

        assert (error.status, error.code) == (400, code), error.message
    assert not MARKER.exists()
