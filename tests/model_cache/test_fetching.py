"""A model is fetched once and whole: from a directory, from a hub."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
from huggingface_hub import constants

from poolgrid.workers.model_cache.cache import (
    MANIFEST_FILE,
    Manifest,
    ModelCache,
    ModelCacheError,
    ModelFile,
    default_directory,
    parse_manifest,
    path_problem,
)
from poolgrid.workers.model_cache.fetching import ModelFetch, parse_source
from tests.model_cache.file_server import COMMIT, FileServer, file_server

WEIGHTS = bytes(range(256)) * 12_000
FILES = {"config.json": b'{"a": 1}\n', "model-1.safetensors": WEIGHTS, "sub/deep.txt": b"deep", "empty": b""}


class Place(NamedTuple):
    cache: ModelCache
    server: FileServer
    told: list[tuple[str, int, int]]

    def fetch(self, source: str, name: str = "model", **more: Any) -> Manifest:
        def report(phase: str, done: int, total: int) -> None:
            self.told.append((phase, done, total))

        return ModelFetch(self.cache, parse_source(source), name, report, pauses_s=(0.001, 0.001), **more).run()

    def content(self, name: str = "model") -> dict[str, bytes]:
        directory = self.cache.path(name)
        found = {each.relative_to(directory).as_posix(): each for each in directory.rglob("*") if each.is_file()}
        return {path: each.read_bytes() for path, each in found.items() if path != MANIFEST_FILE}


@pytest.fixture
def place(tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A cache, and a hub that has the model ``org/model``."""
    server.__init__()  # type: ignore[misc]  # as new, at its address
    server.url = SERVER_URL[0]
    # As they are with HF_ENDPOINT, which is read once.
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    server.serve_model("org/model", FILES)
    return Place(ModelCache(tmp_path / "cache"), server, [])


SERVER_URL = [""]


@pytest.fixture(scope="module")
def server() -> Iterator[FileServer]:
    with file_server() as served:
        SERVER_URL[0] = served.url
        yield served


def written(directory: Path, files: Mapping[str, bytes] = FILES) -> Path:
    for path, content in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
    return directory


def test_a_model_of_a_directory_is_whole_with_its_sums_and_is_fetched_once(place: Place, tmp_path: Path) -> None:
    source = written(tmp_path / "source")
    (source / ".cache").mkdir()
    (source / ".cache" / "lock").touch()

    made = place.fetch(str(source))

    assert place.content() == FILES
    assert {file.path: file.sha256 for file in made.files} == {
        path: hashlib.sha256(content).hexdigest() for path, content in FILES.items()
    }
    assert list(dict.fromkeys(phase for phase, _, _ in place.told)) == ["wait", "list", "fetch", "verify"]
    assert place.told[-1] == ("verify", made.total_bytes, made.total_bytes)
    assert place.cache.names() == ["model"]
    assert place.cache.partials() == []
    shutil.rmtree(source)
    source.mkdir()
    assert place.fetch(str(source)) == made, "nothing of it is asked for again"


@pytest.mark.parametrize("from_hub", [True, False])
def test_files_that_are_excluded_are_neither_fetched_nor_in_the_manifest(
    place: Place, tmp_path: Path, from_hub: bool
) -> None:
    source = "org/model" if from_hub else str(written(tmp_path / "source"))

    made = place.fetch(source, exclude=("sub/*", "empty"))

    assert set(place.content()) == {file.path for file in made.files} == {"config.json", "model-1.safetensors"}
    with pytest.raises(ModelCacheError, match=r"was fetched from .* without sub/\*, empty, and is asked for from"):
        place.fetch(source)


@pytest.mark.parametrize("link", ["config.json", "sub", "poolgrid-model.json"])
@pytest.mark.parametrize("from_hub", [True, False])
def test_a_link_in_the_place_of_a_part_is_removed_and_nothing_is_written_where_it_leads(
    place: Place, tmp_path: Path, link: str, from_hub: bool
) -> None:
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / link).parent.mkdir(exist_ok=True)
    if link != "sub":
        (outside / link).write_bytes(b"a")
    before = {each: each.read_bytes() for each in outside.rglob("*") if each.is_file()}
    partial = place.cache.partial_path("model")
    partial.mkdir(parents=True)
    (partial / link).symlink_to(outside / link)

    place.fetch("org/model" if from_hub else str(written(tmp_path / "source")))

    assert place.content() == FILES
    assert not any(each.is_symlink() for each in place.cache.path("model").rglob("*"))
    assert {each: each.read_bytes() for each in outside.rglob("*") if each.is_file()} == before


@pytest.mark.parametrize("link", [".poolgrid", ".poolgrid/partial", ".poolgrid/partial/model", ".poolgrid/locks"])
def test_a_link_in_the_place_of_a_directory_is_refused_by_name(place: Place, tmp_path: Path, link: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    place.cache.directory.joinpath(link).parent.mkdir(parents=True)
    place.cache.directory.joinpath(link).symlink_to(outside)

    with pytest.raises(ModelCacheError, match=f"{link} is a symbolic link"):
        place.fetch(str(written(tmp_path / "source")))

    assert list(outside.iterdir()) == []


def test_a_broken_model_whose_directory_is_a_link_is_not_written_through_it(place: Place, tmp_path: Path) -> None:
    source = str(written(tmp_path / "source"))
    place.fetch(source)
    outside = place.cache.path("model").rename(tmp_path / "outside")
    place.cache.path("model").symlink_to(outside)
    (outside / "config.json").unlink()

    with pytest.raises(ModelCacheError, match="model is a symbolic link"):
        place.fetch(source)

    assert not (outside / "config.json").exists()


def test_a_model_of_a_hub_has_its_revision_and_its_token_stays_with_the_hub(place: Place) -> None:
    place.server.cuts["/store/model-1.safetensors"] = [1_000_000]
    place.server.statuses[f"/api/models/org/model/tree/{COMMIT}"] = [503]

    made = place.fetch("org/model")

    assert place.content() == FILES
    assert (made.revision, made.source) == (COMMIT, "hf://org/model")
    assert {path.startswith("/store") for path, _, authorization in place.server.asked if authorization} == {False}
    assert ("/api/models/org/model", "", "Bearer hf_of_the_test") in place.server.asked


def test_what_does_not_get_better_is_given_up_and_says_where(place: Place) -> None:
    place.server.statuses["/api/models/org/model"] = [503] * 9
    with pytest.raises(ModelCacheError, match=r"listing hf://org/model at http://127.0.0.1:\d+: .*503"):
        place.fetch("org/model")
    assert place.cache.manifest("model") is None
    place.server.asked.clear()
    with pytest.raises(ModelCacheError, match=r"listing hf://org/other at http://127.0.0.1:\d+: .*404"):
        place.fetch("org/other")
    assert len(place.server.asked) == 1, "what will not change is asked once"


def test_a_file_with_another_content_than_the_hub_says_is_not_taken(place: Place) -> None:
    place.server.files["/store/model-1.safetensors"] = WEIGHTS[::-1]

    with pytest.raises(ModelCacheError, match=r"model-1.safetensors has .* bytes and the sum [0-9a-f]{64}, expected"):
        place.fetch("org/model")

    assert place.cache.names() == []
    place.server.files["/store/model-1.safetensors"] = WEIGHTS
    place.fetch("org/model")
    assert place.content() == FILES


def test_whole_files_of_an_earlier_attempt_are_not_fetched_again(place: Place) -> None:
    partial = place.cache.partial_path("model")
    written(partial, {"model-1.safetensors": WEIGHTS, "sub/deep.txt": b"peed", "stray": b"?"})
    written(partial, {".cache/huggingface/download/x.incomplete": b"?"})

    place.fetch("org/model")

    assert place.content() == FILES
    assert place.server.ranges("/store/model-1.safetensors") == []


@pytest.mark.parametrize("from_hub", [True, False])
def test_a_wrong_file_is_named_and_repaired(place: Place, tmp_path: Path, from_hub: bool) -> None:
    source = "org/model" if from_hub else str(written(tmp_path / "source"))
    made = place.fetch(source)
    file = place.cache.path("model") / "model-1.safetensors"
    file.write_bytes(WEIGHTS[:-1] + b"?")

    assert place.cache.wrong_files("model", made) == []
    (wrong,) = place.cache.wrong_files("model", made, lambda count: None)
    assert wrong.path == "model-1.safetensors"
    assert place.fetch(source, check=True) == made

    assert place.content() == FILES
    place.server.asked.clear()
    assert place.fetch(source, check=True) == made
    assert place.server.asked == [], "all is well: the hub is not asked"


def test_a_file_that_is_missing_or_short_is_fetched_again_without_being_asked_to(place: Place) -> None:
    made = place.fetch("org/model")
    (place.cache.path("model") / "config.json").unlink()
    (place.cache.path("model") / "model-1.safetensors").write_bytes(b"short")

    assert [each.path for each in place.cache.wrong_files("model", made)] == ["config.json", "model-1.safetensors"]
    place.fetch("org/model")

    assert place.content() == FILES


def test_nothing_is_fetched_where_there_is_no_room_or_the_model_is_too_large(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelCacheError, match=r"has 3,072,013 bytes, allowed are 3,072,012; nothing was fetched"):
        place.fetch("org/model", size_max=3_072_012)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with pytest.raises(ModelCacheError, match=r"needs 70,180,877 more bytes in .*/cache, free are 1,000,000; nothing"):
        place.fetch("org/model")

    assert {path for path, _, _ in place.server.asked} == {"/api/models/org/model"}


def test_what_the_hubs_own_cache_has_is_taken_from_there_also_offline(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "hf" / "models--org--model"
    written(own / "snapshots" / COMMIT)
    written(own, {"refs/main": COMMIT.encode()})

    place.fetch("org/model", "online")

    assert place.content("online") == FILES
    assert not [path for path, _, _ in place.server.asked if "/resolve/" in path or path.startswith("/store")]
    place.server.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    made = place.fetch("org/model", "offline")
    assert place.content("offline") == FILES
    assert made.revision == COMMIT
    with pytest.raises(ModelCacheError, match="HF_HUB_OFFLINE is set, and the hub's cache on this machine does not"):
        place.fetch("org/other", "other")
    assert place.server.asked == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("org/model", "org--model"),
        ("hf://org/model@refs/pr/1", "org--model@refs--pr--1"),
        ("gpt2", "gpt2"),
        ("/srv/models/Llama 3", "Llama_3"),
    ],
)
def test_a_model_is_called_as_its_source_is(source: str, name: str) -> None:
    assert parse_source(source).name == name


@pytest.mark.parametrize("source", ["", "a b", "org/model/file", "@main"])
def test_what_is_no_source_is_refused(source: str) -> None:
    with pytest.raises(ModelCacheError, match="allowed "):
        parse_source(source)


def test_mirror_over_http_is_refused_with_alternative() -> None:
    with pytest.raises(ModelCacheError, match="set HF_ENDPOINT to a hub or its mirror"):
        parse_source("https://mirror.example/models/llama")


@pytest.mark.parametrize("path", ["../up", "/etc/passwd", "a/../../b", "a//b", "a\\b", "", "./a", MANIFEST_FILE, "a/."])
def test_a_manifest_names_nothing_outside_of_its_model(path: str) -> None:
    assert path_problem(path)
    listed = Manifest(1, "m", "s", (ModelFile(path or "x", 1, "0" * 64),))
    if path:
        with pytest.raises(ModelCacheError, match=r"reading somewhere: file '.*' is"):
            parse_manifest(msgspec.json.encode(listed), "somewhere")


@pytest.mark.parametrize("name", ["", "..", ".poolgrid", "a/b", "x" * 201, "a b"])
def test_a_models_name_is_a_directory_of_the_cache(place: Place, name: str) -> None:
    with pytest.raises(ModelCacheError, match="the model's name is"):
        place.cache.path(name)


def test_the_cache_is_where_the_user_says_or_where_users_keep_caches() -> None:
    assert default_directory({"POOLGRID_MODEL_CACHE_DIR": "/m", "XDG_CACHE_HOME": "/x"}) == Path("/m")
    assert default_directory({"XDG_CACHE_HOME": "/x"}) == Path("/x/poolgrid/models")
    assert default_directory({"HOME": "/home/u"}) == Path("/home/u/.cache/poolgrid/models")
