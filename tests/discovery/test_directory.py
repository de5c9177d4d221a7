"""Names in a directory: real files, real leases, and files of others."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from poolgrid.kernel.wire.registration import encode_registration
from poolgrid.plugins.simulated.settings import SimulatedWorkerSettings
from poolgrid.server.discovery.directory import SWEEP_AFTER_S, DirectoryRegistrations
from poolgrid.server.discovery.discovery import Discovery
from poolgrid.server.discovery.registry import DiscoveryUnavailable, Scope
from poolgrid.server.global_router.settings import GlobalRouterSettings
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.router.settings import RouterSettings
from tests.discovery.registrations import registration
from tests.discovery.waiting import HTTP, until, until_found


def names_in(directory: Path, lease_s: int = 5) -> Discovery:
    return Discovery(DirectoryRegistrations(directory, SystemClock()), "blue", lease_s, SystemClock())


async def test_who_registers_is_found_and_who_closes_is_gone(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "names"
    one, other = names_in(directory), names_in(directory)
    await one.open()
    await other.open()
    news = asyncio.Event()
    other.follow(Scope("blue", "router"), news.set)

    await one.register("router", "r1", {"http": "http://127.0.0.1:1"})

    assert await until_found(other, 1) == ["http://127.0.0.1:1"]
    assert news.is_set()
    assert directory.stat().st_mode & 0o777 == 0o700
    [file] = directory.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    await one.close()
    await until_found(other, 0)
    assert not list(directory.iterdir())
    await other.close()


async def test_a_renewal_touches_a_file_that_is_there_and_writes_one_that_was_removed(tmp_path: Path) -> None:
    store = DirectoryRegistrations(tmp_path, SystemClock())
    made = registration()
    data = encode_registration(made)
    path = tmp_path / f"{made.key}.json"
    await store.write(made, data)
    inode = path.stat().st_ino
    os.utime(path, (1, 1))

    await store.write(made, data)

    assert path.stat().st_ino == inode
    assert path.stat().st_mtime > 1
    path.unlink()
    await store.write(made, data)
    assert path.read_bytes() == data


async def test_links_pipes_directories_and_large_files_hold_nobody_up(tmp_path: Path) -> None:
    store = DirectoryRegistrations(tmp_path, SystemClock())
    made = registration()
    await store.write(made, encode_registration(made))
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "blue.router.1.json").symlink_to(secret)
    os.mkfifo(tmp_path / "blue.router.2.json")
    (tmp_path / "blue.router.3.json").mkdir()
    (tmp_path / "blue.router.4.json").write_bytes(b" " * 1_000_000)

    found = {each.key: each for each in await store.look([Scope("blue")])}

    assert set(found) == {made.key, "blue.router.4"}
    assert len(found["blue.router.4"].data) < 5000
    assert await store.look([Scope("green")]) == []


def test_what_was_left_behind_long_ago_is_swept_by_whoever_registers(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = DirectoryRegistrations(tmp_path, SystemClock())
        old, half, other = (tmp_path / name for name in ("blue.router.0.json", ".blue.router.0.new", "note.txt"))
        for path in (old, half, other):
            path.write_text("{}")
            long_ago = path.stat().st_mtime - SWEEP_AFTER_S - 10
            os.utime(path, (long_ago, long_ago))
        await store.write(made, encode_registration(made))

    made = registration()
    asyncio.run(scenario())
    assert {path.name for path in tmp_path.iterdir()} == {f"{made.key}.json", "note.txt"}


def test_a_directory_into_which_everybody_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)

    with pytest.raises(ValueError, match="mode 0777"):
        asyncio.run(DirectoryRegistrations(tmp_path, SystemClock()).open())


def test_a_directory_that_is_gone_is_an_error_that_passes_and_nobody_loses_a_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        directory = tmp_path / "names"
        one, other = names_in(directory), names_in(directory)
        await one.open()
        other.follow(Scope("blue", "router"), lambda: None)
        await one.register("router", "r1", {"http": "http://127.0.0.1:1"})
        await until_found(other, 1)

        directory.rename(tmp_path / "elsewhere")
        await until(lambda: bool(other.trouble))

        assert other.addresses(HTTP) == ["http://127.0.0.1:1"]
        (tmp_path / "elsewhere").rename(directory)
        await until(lambda: not other.trouble)
        assert other.addresses(HTTP) == ["http://127.0.0.1:1"]
        await one.close()
        await other.close()

    asyncio.run(scenario())
    with pytest.raises(DiscoveryUnavailable):
        asyncio.run(DirectoryRegistrations(tmp_path / "none", SystemClock()).look([Scope()]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"names": "directory"}, "names_dir"),
        ({"names_dir": "x"}, "names_dir"),
        ({"names": "directory", "names_dir": "x", "namespace": "a.b"}, "namespace is 'a.b'"),
        ({"names": "directory", "names_dir": "x", "host": "0.0.0.0"}, "advertise_host"),
        (
            {"feed_endpoint": "dyn://a.consolidator.feed", "query_endpoint": "dyn://a.consolidator.query"},
            "names is none",
        ),
        ({"feed_endpoint": "dyn://a.consolidator.feed", "query_endpoint": "tcp://h:1"}, "feed_endpoint"),
    ],
)
def test_settings_that_would_find_nobody_are_refused(fields: dict[str, str], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RouterSettings.model_validate(fields)


def test_a_worker_looks_for_the_consolidator_of_its_namespace_unless_it_was_given_one() -> None:
    named = {"names": "directory", "names_dir": "x", "namespace": "blue"}

    def name(**fields: object) -> str:
        return SimulatedWorkerSettings.model_validate({**named, **fields}).consolidator_name

    assert name() == "dyn://blue.consolidator.ingest"
    assert name(consolidator="dyn://green.consolidator.ingest") == "dyn://green.consolidator.ingest"
    assert name(consolidator="tcp://127.0.0.1:1") == ""
    assert name(names="none", names_dir=None) == ""


def test_a_pools_url_may_be_a_name_where_there_are_names() -> None:
    fields = {"config": "x", "pool_url": ["a=dyn://blue.router.select"]}

    with pytest.raises(ValidationError, match="names is none"):
        GlobalRouterSettings.model_validate(fields)
    settings = GlobalRouterSettings.model_validate({**fields, "names": "directory", "names_dir": "x"})
    assert settings.pool_urls() == {"a": "dyn://blue.router.select"}
