"""What is done to the document of one process is done to that of all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from poolgrid.global_router.configuration import Configuration
from poolgrid.global_router.configuration_group import FILE_NAME, ConfigurationGroup
from poolgrid.global_router.core.choice.grid import GridRequest
from poolgrid.global_router.document_file import read_document_file
from poolgrid.process.process_group import GroupMember, GroupPlace
from tests.global_router.documents import POOL_CONFIGS, aggregated, changed
from tests.global_router.fake_fleet import FakeClock


def version(ttft_ms: float) -> str:
    return json.dumps(changed(aggregated(), ("defaults",), {"ttft_target_ms": ttft_ms, "itl_target_ms": 0}))


A, B = version(100), version(900)
"""Documents that send a request without hints to the pools ``a`` and ``b``."""


class Member:
    """One process of three, as far as the document goes."""

    def __init__(self, directory: Path, path: Path, index: int) -> None:
        self.configuration = Configuration(read_document_file(path), path, FakeClock())
        self.member = GroupMember(GroupPlace(directory, index, 3))
        self.group = ConfigurationGroup(self.configuration, self.member)

    async def start(self) -> Member:
        await self.member.start(self.group.answers())
        await self.group.adopt()
        return self

    def pool(self) -> str:
        return self.configuration.active.grid.select("aggregated", GridRequest(0)).pool


class Scene:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "grid.json"
        self.path.write_text(A)
        self.members: list[Member] = []

    async def add(self) -> Member:
        made = await Member(self.directory, self.path, len(self.members)).start()
        self.members.append(made)
        return made

    def pools(self) -> list[str]:
        return [member.pool() for member in self.members]

    async def change_file(self, text: str) -> None:
        self.path.write_text(text)
        for member in self.members:
            await member.configuration.reload()


def run(tmp_path: Path, scenario: Callable[[Scene], Awaitable[None]]) -> None:
    async def whole() -> None:
        scene = Scene(tmp_path)
        try:
            async with asyncio.timeout(20):
                await scenario(scene)
        finally:
            for member in scene.members:
                await member.member.stop()

    asyncio.run(whole())


def test_a_rollback_of_one_is_a_rollback_of_all_and_of_who_starts_later(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        first, _ = await scene.add(), await scene.add()
        await scene.change_file(B)
        assert scene.pools() == ["b", "b"]

        outcome = await first.group.rollback()
        await scene.add()

        assert outcome.outcome == "rolled-back"
        assert scene.pools() == ["a", "a", "a"]
        assert scene.members[2].configuration.active.source == "rollback of another process"

    run(tmp_path, scenario)


def test_a_rollback_ends_when_the_file_changes_also_for_who_starts_then(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        first = await scene.add()
        await scene.change_file(B)
        await first.group.rollback()
        await scene.change_file(version(850))
        await scene.add()

        assert scene.pools() == ["b", "b"]

    run(tmp_path, scenario)


def test_a_process_that_has_not_seen_the_changed_file_yet_takes_the_rollback_all_the_same(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        first, second = await scene.add(), await scene.add()
        scene.path.write_text(B)
        await first.configuration.reload()

        await first.group.rollback()

        assert scene.pools() == ["a", "a"]
        assert second.configuration.active.revision == 3
        assert await second.configuration.reload() is not None

    run(tmp_path, scenario)


def test_a_reload_of_one_is_a_reload_of_all(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        first, second = await scene.add(), await scene.add()
        await scene.change_file(B)
        await first.group.rollback()
        assert scene.pools() == ["a", "a"]

        await second.group.reload()
        await scene.add()

        assert scene.pools() == ["b", "b", "b"]
        assert not (scene.directory / FILE_NAME).exists()

    run(tmp_path, scenario)


@pytest.mark.parametrize("left", [b"", b"{", b'{"seen": [1], "document": {}}', b'{"seen": null, "document": []}'])
def test_a_rollback_that_cannot_be_read_changes_nothing(tmp_path: Path, left: bytes) -> None:
    async def scenario(scene: Scene) -> None:
        (scene.directory / FILE_NAME).write_bytes(left)
        member = await scene.add()

        assert member.pool() == "a"
        assert member.configuration.active.revision == 1

    run(tmp_path, scenario)


@pytest.mark.parametrize("path", POOL_CONFIGS, ids=lambda path: path.stem)
def test_the_document_that_is_passed_on_is_the_one_in_force(tmp_path: Path, path: Path) -> None:
    text = path.read_text()

    async def scenario(scene: Scene) -> None:
        scene.path.write_text(text)
        first, second = await scene.add(), await scene.add()
        await scene.change_file(A)
        assert scene.pools() == ["a", "a"]
        await first.group.rollback()

        assert first.configuration.active.document == second.configuration.active.document
        assert first.configuration.active.document == read_document_file(path).document

    run(tmp_path, scenario)


def test_a_process_that_is_alone_asks_nobody(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        alone = Configuration(read_document_file(scene.path), scene.path, FakeClock())
        group = ConfigurationGroup(alone, None)
        scene.path.write_text(B)

        reloaded = await group.reload()
        assert reloaded is not None
        assert (reloaded.outcome, (await group.rollback()).outcome) == ("replaced", "rolled-back")
        assert [each.name for each in scene.directory.iterdir()] == ["grid.json"]

    run(tmp_path, scenario)
