"""A model is fetched once and whole: from a directory, a mirror, a hub."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from huggingface_hub import constants

from poolgrid.workers.model_cache.cache import ModelCache, default_directory
from poolgrid.workers.model_cache.fetching import Fetching, FetchLimits
from poolgrid.workers.model_cache.manifest import (
    MANIFEST_FILE,
    Manifest,
    ModelCacheError,
    ModelFile,
    encode,
    parse,
    path_problem,
)
from poolgrid.workers.model_cache.opening import open_source
from poolgrid.workers.model_cache.unfollowed import make_unfollowed, open_unfollowed
from tests.model_cache.file_server import COMMIT, FileServer, file_server

WEIGHTS = bytes(range(256)) * 12_000
FILES = {"config.json": b'{"a": 1}\n', "model-1.safetensors": WEIGHTS, "sub/deep.txt": b"deep", "empty": b""}
LIMITS = FetchLimits(attempts=3, pause_min_s=0.001)


class Told:
    """Implements ``Progress``."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int]] = []
        self.bytes: dict[str, int] = {}

    def phase(self, name: str, total_bytes: int) -> None:
        self.phases.append((name, total_bytes))

    def moved(self, count: int) -> None:
        name = self.phases[-1][0]
        self.bytes[name] = self.bytes.get(name, 0) + count


class Place(NamedTuple):
    cache: ModelCache
    server: FileServer
    told: Told

    def fetch(self, source: str, name: str = "model", **more: Any) -> Manifest:
        made = Fetching(self.cache, open_source(source, 20.0), name, self.told, more.pop("limits", LIMITS), **more)
        return made.run()

    def content(self, name: str = "model") -> dict[str, bytes]:
        directory = self.cache.path(name)
        found = {each.relative_to(directory).as_posix(): each for each in directory.rglob("*") if each.is_file()}
        return {path: each.read_bytes() for path, each in found.items() if path != MANIFEST_FILE}


@pytest.fixture
def place(tmp_path: Path, server: FileServer) -> Place:
    server.__init__()  # type: ignore[misc]  # as new, at its address
    server.url = SERVER_URL[0]
    return Place(ModelCache(tmp_path / "cache"), server, Told())


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


def mirrored(server: FileServer, files: Mapping[str, bytes] = FILES, path: str = "/models/m") -> str:
    listed = tuple(ModelFile(name, len(each), hashlib.sha256(each).hexdigest()) for name, each in files.items())
    server.files[f"{path}/{MANIFEST_FILE}"] = encode(Manifest(1, "m", "elsewhere", listed))
    server.files.update({f"{path}/{name}": content for name, content in files.items()})
    return f"{server.url}{path}"


def test_a_model_of_a_directory_is_whole_with_its_sums_and_is_fetched_once(place: Place, tmp_path: Path) -> None:
    source = written(tmp_path / "source")
    (source / ".cache").mkdir()
    (source / ".cache" / "lock").touch()

    made = place.fetch(str(source))

    assert place.content() == FILES
    assert {file.path: file.sha256 for file in made.files} == {
        path: hashlib.sha256(content).hexdigest() for path, content in FILES.items()
    }
    assert place.told.phases == [("wait", 0), ("list", 0), ("fetch", made.total_bytes)]
    assert place.told.bytes == {"fetch": made.total_bytes}
    assert place.cache.names() == ["model"]
    assert place.cache.partials() == []
    shutil.rmtree(source)
    source.mkdir()
    assert place.fetch(str(source)) == made, "nothing of it is asked for again"


def test_files_that_are_excluded_are_neither_fetched_nor_in_the_manifest(place: Place, tmp_path: Path) -> None:
    made = place.fetch(str(written(tmp_path / "source")), exclude=("sub/*", "empty"))

    assert set(place.content()) == {file.path for file in made.files} == {"config.json", "model-1.safetensors"}
    with pytest.raises(ModelCacheError, match=r"was fetched from .* without sub/\*, empty, and is asked for from"):
        place.fetch(str(tmp_path / "source"))


@pytest.mark.parametrize("link", ["config.json", "config.json.poolgrid-part", "sub", "poolgrid-model.json"])
@pytest.mark.parametrize("mirror", [True, False])
def test_a_link_in_the_place_of_a_part_is_removed_and_nothing_is_written_where_it_leads(
    place: Place, tmp_path: Path, link: str, mirror: bool
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

    place.fetch(mirrored(place.server) if mirror else str(written(tmp_path / "source")))

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


def test_a_link_that_comes_while_a_file_is_fetched_is_not_followed(tmp_path: Path) -> None:
    partial = tmp_path / ".poolgrid" / "partial" / "model"
    make_unfollowed(partial / "sub")
    (tmp_path / "outside").mkdir()
    (partial / "sub").rmdir()
    (partial / "sub").symlink_to(tmp_path / "outside")
    (partial / "file").symlink_to(tmp_path / "outside" / "file")
    for path in ("sub/file", "file"):
        with (
            pytest.raises(ModelCacheError, match="is a symbolic link"),
            open(partial / path, "wb", opener=open_unfollowed),
        ):
            pass
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_download_that_breaks_off_goes_on_where_it_ended(place: Place) -> None:
    url = mirrored(place.server)
    path = "/models/m/model-1.safetensors"
    place.server.cuts[path] = [1_000_000, 500_000, 100, 200, 300]

    made = place.fetch(url)

    assert place.content() == FILES
    assert place.server.ranges(path) == [
        "",
        "bytes=1000000-",
        "bytes=1500000-",
        "bytes=1500100-",
        "bytes=1500300-",
        "bytes=1500600-",
    ]
    assert place.told.bytes["fetch"] == made.total_bytes


def test_a_server_without_ranges_is_asked_for_all_of_it_again(place: Place) -> None:
    url = mirrored(place.server)
    place.server.knows_ranges = False
    place.server.cuts["/models/m/model-1.safetensors"] = [1_000_000]

    made = place.fetch(url)

    assert place.content() == FILES
    assert place.told.bytes["fetch"] == made.total_bytes


def test_a_server_that_has_a_bad_moment_is_asked_again(place: Place) -> None:
    url = mirrored(place.server)
    place.server.statuses = {f"/models/m/{MANIFEST_FILE}": [503], "/models/m/config.json": [429, 500]}

    place.fetch(url)

    assert place.content() == FILES


def test_what_does_not_get_better_is_given_up_and_says_where(place: Place) -> None:
    url = mirrored(place.server)
    place.server.statuses["/models/m/config.json"] = [503] * 9

    with pytest.raises(ModelCacheError, match=r"GET http://.*/models/m/config.json: status 503; given up after 3 att"):
        place.fetch(url)
    assert place.cache.manifest("model") is None
    place.server.statuses.clear()
    del place.server.files["/models/m/config.json"]
    with pytest.raises(ModelCacheError, match=r"GET http://.*/models/m/config.json: status 404$"):
        place.fetch(url)
    with pytest.raises(ModelCacheError, match=r"status 404. A mirror is a directory that `poolgrid model fetch`"):
        place.fetch(f"{place.server.url}/elsewhere")


def test_a_file_with_another_content_than_the_manifest_says_is_not_taken(place: Place) -> None:
    url = mirrored(place.server)
    place.server.files["/models/m/model-1.safetensors"] = WEIGHTS[::-1]

    with pytest.raises(
        ModelCacheError, match=r"model-1.safetensors has the sum [0-9a-f]{64}, expected is .*; given up"
    ):
        place.fetch(url)

    assert place.cache.names() == []
    place.server.files["/models/m/model-1.safetensors"] = WEIGHTS
    place.fetch(url)
    assert place.content() == FILES


def test_what_an_earlier_attempt_fetched_is_held_against_its_sum_and_kept(place: Place) -> None:
    url = mirrored(place.server)
    partial = place.cache.partial_path("model")
    written(partial, {"config.json": FILES["config.json"], "sub/deep.txt": b"peed", "stray": b"?"})
    written(partial, {"model-1.safetensors.poolgrid-part": WEIGHTS[:70_000]})

    place.fetch(url)

    assert place.content() == FILES
    assert place.server.ranges("/models/m/config.json") == []
    assert place.server.ranges("/models/m/sub/deep.txt") == [""]
    assert place.server.ranges("/models/m/model-1.safetensors") == ["bytes=70000-"]


def test_a_wrong_file_is_named_and_mended_alone(place: Place) -> None:
    url = mirrored(place.server)
    made = place.fetch(url)
    file = place.cache.path("model") / "model-1.safetensors"
    file.write_bytes(WEIGHTS[:-1] + b"?")
    place.server.asked.clear()

    assert place.cache.wrong_sizes("model", made) == []
    (wrong,) = place.cache.wrong_files("model", made, lambda count: None)
    assert wrong.path == "model-1.safetensors"
    assert place.fetch(url, check=True) == made

    assert place.content() == FILES
    assert {path for path, _, _ in place.server.asked} == {
        f"/models/m/{MANIFEST_FILE}",
        "/models/m/model-1.safetensors",
    }
    place.server.asked.clear()
    assert place.fetch(url, check=True) == made
    assert place.server.asked == [], "all is well: nobody is asked"


def test_a_file_that_is_missing_or_short_is_fetched_again_without_being_asked_to(place: Place) -> None:
    url = mirrored(place.server)
    made = place.fetch(url)
    (place.cache.path("model") / "config.json").unlink()
    (place.cache.path("model") / "model-1.safetensors").write_bytes(b"short")

    assert [each.path for each in place.cache.wrong_sizes("model", made)] == ["config.json", "model-1.safetensors"]
    place.fetch(url)

    assert place.content() == FILES


def test_nothing_is_fetched_where_there_is_no_room_or_the_model_is_too_large(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = mirrored(place.server)

    with pytest.raises(ModelCacheError, match=r"has 3,072,013 bytes, allowed are 3,072,012; nothing was fetched"):
        place.fetch(url, limits=FetchLimits(size_max=3_072_012))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with pytest.raises(ModelCacheError, match=r"needs 70,180,877 more bytes in .*/cache, free are 1,000,000; nothing"):
        place.fetch(url)

    assert {path for path, _, _ in place.server.asked} == {f"/models/m/{MANIFEST_FILE}"}


@pytest.fixture
def hub(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    # As they are with HF_ENDPOINT, which is read once.
    template = place.server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", place.server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    place.server.serve_model("org/model", FILES)
    return place


def test_a_model_of_a_hub_has_its_revision_and_its_token_stays_with_the_hub(hub: Place) -> None:
    hub.server.cuts["/store/model-1.safetensors"] = [1_000_000]

    made = hub.fetch("org/model")

    assert hub.content() == FILES
    assert (made.revision, made.source) == (COMMIT, "hf://org/model")
    assert hub.server.ranges("/store/model-1.safetensors") == ["", "bytes=1000000-"]
    told = {path.startswith("/store") for path, _, authorization in hub.server.asked if authorization}
    assert told == {False}
    assert ("/api/models/org/model", "", "Bearer hf_of_the_test") in hub.server.asked


def test_a_small_file_is_held_against_the_object_of_git_that_the_hub_names(hub: Place) -> None:
    hub.server.files[f"/org/model/resolve/{COMMIT}/config.json"] = b'{"a": 2}\n'

    with pytest.raises(ModelCacheError, match=r"config.json is not git's object [0-9a-f]{40}.*given up after 3"):
        hub.fetch("org/model")

    assert hub.cache.names() == []


def test_a_model_that_the_hub_does_not_have_is_asked_for_once(hub: Place) -> None:
    with pytest.raises(ModelCacheError, match=r"listing hf://org/other at http://127.0.0.1:\d+: .*404"):
        hub.fetch("org/other")

    assert len(hub.server.asked) == 1


def test_what_the_hubs_own_cache_has_is_taken_from_there_also_offline(
    hub: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "hf" / "models--org--model"
    written(own / "snapshots" / COMMIT)
    written(own, {"refs/main": COMMIT.encode()})

    hub.fetch("org/model", "online")

    assert hub.content("online") == FILES
    assert [path for path, _, _ in hub.server.asked] == ["/api/models/org/model"]
    hub.server.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    made = hub.fetch("org/model", "offline")
    assert hub.content("offline") == FILES
    assert made.revision == COMMIT
    with pytest.raises(ModelCacheError, match="HF_HUB_OFFLINE is set, and the hub's cache on this machine does not"):
        hub.fetch("org/other", "other")
    assert hub.server.asked == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("org/model", "org--model"),
        ("hf://org/model@refs/pr/1", "org--model@refs--pr--1"),
        ("gpt2", "gpt2"),
        ("https://mirror.example/models/Llama-3.1-8B/", "Llama-3.1-8B"),
        ("/srv/models/Llama 3", "Llama_3"),
    ],
)
def test_a_model_is_called_as_its_source_is(source: str, name: str) -> None:
    assert open_source(source, 1.0).name == name


@pytest.mark.parametrize(
    "source", ["", "a b", "org/model/file", "https://", "http://u:p@host/m", "http://h/m?x", "@main"]
)
def test_what_is_no_source_is_refused(source: str) -> None:
    with pytest.raises(ModelCacheError, match="allowed "):
        open_source(source, 1.0)


@pytest.mark.parametrize("path", ["../up", "/etc/passwd", "a/../../b", "a//b", "a\\b", "", "./a", MANIFEST_FILE, "a/."])
def test_a_manifest_names_nothing_outside_of_its_model(path: str) -> None:
    assert path_problem(path)
    listed = Manifest(1, "m", "s", (ModelFile(path or "x", 1, "0" * 64),))
    if path:
        with pytest.raises(ModelCacheError, match=r"reading somewhere: file '.*' (is|has|ends)"):
            parse(encode(listed), "somewhere")


@pytest.mark.parametrize("name", ["", "..", ".poolgrid", "a/b", "x" * 201, "a b"])
def test_a_models_name_is_a_directory_of_the_cache(place: Place, name: str) -> None:
    with pytest.raises(ModelCacheError, match="the model's name is"):
        place.cache.path(name)


def test_the_cache_is_where_the_user_says_or_where_users_keep_caches() -> None:
    assert default_directory({"POOLGRID_MODEL_CACHE_DIR": "/m", "XDG_CACHE_HOME": "/x"}) == Path("/m")
    assert default_directory({"XDG_CACHE_HOME": "/x"}) == Path("/x/poolgrid/models")
    assert default_directory({"HOME": "/home/u"}) == Path("/home/u/.cache/poolgrid/models")
