"""The document of a global router that runs as several processes: what is done to one of them is done to all.

Rules
    1. A changed file is seen by each process by itself; so is SIGHUP, which all of them get.
    2. A reload or a rollback that somebody asks one process for is passed on to the others. A rollback also leaves the
       document that is in force then in the group's directory, with the state of the document's file.
    3. A process that starts takes that document if the file is still in that state: a rollback stands until the file
       changes, also for who was not there. A reload removes it.
    4. Revisions are counted by each process. One that was started again has no documents from before.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from poolgrid.global_router.configuration import Configuration, Version
from poolgrid.global_router.core.document.history import Reload
from poolgrid.process.process_group import ANSWER_TIMEOUT_S, Answer, GroupMember
from poolgrid.process.tasks import wait_from_thread

log = logging.getLogger(__name__)

FILE_NAME = "document.json"
ADOPT = "adopt"
RELOAD = "reload"
DONE = b"done"


class RolledBack(msgspec.Struct):
    """What a rollback leaves for others."""

    seen: Version | None
    """The state of the document's file."""
    document: dict[str, Any]


class ConfigurationGroup:
    """One process's part in it; ``member`` is ``None`` for a process that is alone."""

    def __init__(self, configuration: Configuration, member: GroupMember | None) -> None:
        self._configuration = configuration
        self._member = member
        self._path: Path | None = None if member is None else member.place.directory / FILE_NAME

    def answers(self) -> dict[str, Answer]:
        """Return what siblings may ask of this process; called on its event loop."""
        loop = asyncio.get_running_loop()

        async def do(what: str) -> None:
            if what == RELOAD:
                await self._configuration.reload()
            else:
                await self.adopt()

        def answer(what: str) -> Answer:
            def run() -> bytes:
                wait_from_thread(loop, do(what), f"{what} for another process", ANSWER_TIMEOUT_S)
                return DONE

            return run

        return {ADOPT: answer(ADOPT), RELOAD: answer(RELOAD)}

    async def adopt(self) -> None:
        """Take over what a rollback left, if the document's file is still in the state that it was in then."""
        if self._path is None:
            return
        try:
            left = msgspec.json.decode(await asyncio.to_thread(self._path.read_bytes), type=RolledBack)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.error("taking over a rollback from %s: %s; the document in force stays", self._path, error)
            return
        if left.seen != self._configuration.seen:
            await self._configuration.reload()  # the file has changed, and this process has not seen it yet
        if left.seen == self._configuration.seen:
            await self._configuration.propose(msgspec.json.encode(left.document), "rollback of another process")

    async def reload(self) -> Reload | None:
        """Read the file, here and in all other processes; return what became of it here."""
        self.forget()
        outcome = await self._configuration.reload()
        await self._pass_on(RELOAD)
        return outcome

    async def rollback(self) -> Reload:
        """Put the previous document in force, here and in all other processes; return what became of it here."""
        outcome = await self._configuration.rollback()
        if outcome.outcome == "rolled-back" and self._path is not None:
            document = self._configuration.active.document.model_dump(mode="json", exclude_defaults=True)
            left = msgspec.json.encode(RolledBack(self._configuration.seen, document))
            await asyncio.to_thread(_write, self._path, left)
            await self._pass_on(ADOPT)
        return outcome

    def forget(self) -> None:
        """Remove what a rollback left."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def _pass_on(self, what: str) -> None:
        if self._member is None:
            return
        answers = await asyncio.to_thread(self._member.ask_siblings, what)
        if answers.count(DONE) < self._member.place.size - 1:
            log.warning("%s: %d of %d other processes did so", what, answers.count(DONE), self._member.place.size - 1)


def _write(path: Path, content: bytes) -> None:
    """Replace a file in one step."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)
