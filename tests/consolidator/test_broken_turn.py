"""A turn that fails midway: the state has then moved on without a record of it, and must not be gone on with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq.asyncio

from poolgrid.kernel.consolidation.consolidator import Consolidator, ConsolidatorTurn
from poolgrid.kernel.wire.identifiers import StreamState
from poolgrid.server.consolidator.service import ConsolidatorService
from poolgrid.server.process.tasks import on_fatal
from tests.consolidator.pusher import pusher_at
from tests.consolidator.test_service import Reader, started, truth
from tests.router.fleet_builder import stored


@pytest.fixture
def ended() -> Iterator[list[str]]:
    """What the process was told to end for."""
    names: list[str] = []
    token = on_fatal.set(lambda name, error: names.append(f"{name}: {error}"))
    yield names
    on_fatal.reset(token)


def raising(core: Consolidator, turn: ConsolidatorTurn) -> None:
    """Change the state and write a record of it, then fail: the turn's record never gets to the journal."""
    core.note_stream(next(iter(core.pool.workers)), "kvbm", StreamState.STALE, "made up", turn)
    raise RuntimeError("planted")


def forgetting(core: Consolidator, turn: ConsolidatorTurn) -> None:
    """Lose a record of the turn, without an error."""
    core.note_stream(next(iter(core.pool.workers)), "kvbm", StreamState.STALE, "made up", turn)
    turn.records.clear()


@pytest.mark.parametrize("fault", [raising, forgetting])
async def test_a_turn_that_failed_is_the_last_and_the_next_start_goes_on_from_the_journal(
    fault: Callable[[Consolidator, ConsolidatorTurn], None],
    tmp_path: Path,
    ended: list[str],
    context: zmq.asyncio.Context,
) -> None:
    def refuse_all(service: ConsolidatorService, offset: int) -> None:
        assert not service.ready
        assert f"failed behind record {offset - 1}" in service.trouble
        at = service.offset
        service.take_turn(lambda core, turn: pytest.fail("a turn on a state that the journal does not know"))
        assert service.offset == at

    service = await started(data_dir=tmp_path)
    pusher = await pusher_at(context, service.ingest_endpoint)
    pusher.push([stored([1, 2, 3])])
    await pusher.settle()
    offset = service.offset

    service.take_turn(fault)
    refuse_all(service, offset)
    pusher.push([stored([4], 3)])
    await service.stop()
    assert len(ended) == 1
    assert ended[0].startswith("consolidator: ")

    again = await started(data_dir=tmp_path)
    try:
        assert again.ready
        assert again.offset == offset
        pusher.reconnect(again.ingest_endpoint)
        await pusher.join()
        await pusher.settle()
        reader = Reader()
        again.subscribe(reader)
        assert reader.view == truth(pusher)
    finally:
        pusher.close()
        await again.stop()
