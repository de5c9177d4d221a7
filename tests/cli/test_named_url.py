"""Commands that speak to a router find it by its name, when the environment says where names are."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from poolgrid.kernel.pool_grids.grid_document import GridDocument
from poolgrid.kernel.wire.registration import encode_registration
from poolgrid.server.cli.fleet import nats_names
from poolgrid.server.cli.main import app
from poolgrid.server.cli.router_client import other_url_of, url_of
from poolgrid.server.discovery.directory import DirectoryRegistrations
from poolgrid.server.global_router.document.reader import load_document
from poolgrid.server.process.clock import SystemClock
from tests.discovery.registrations import registration

NAME = "dyn://blue.router.http"
COMMANDS = (
    ("top", "--once"),
    ("explain", "r"),
    ("drain", "--all"),
    ("config", "rollback"),
    ("bench", "--start-timeout-ms", "200"),
)


def register(directory: Path, *routers: tuple[int, int, str]) -> None:
    """Register routers: a number, which says who began later, a port on this machine, and a namespace."""

    async def write() -> None:
        store = DirectoryRegistrations(directory, SystemClock())
        await store.open()
        for number, port, pool in routers:
            endpoints = {"http": f"http://127.0.0.1:{port}", "select": "tcp://127.0.0.1:3"}
            made = registration(number, endpoints=endpoints, namespace=pool)
            await store.write(made, encode_registration(made))

    asyncio.run(write())


@pytest.fixture
def names(tmp_path: Path) -> Mapping[str, str]:
    """A directory in which routers are registered that are gone by now, and the environment of who looks there."""
    directory = tmp_path / "names"

    register(directory, (1, 1, "blue"), (2, 2, "blue"), (3, 3, "red"))
    # A URL of NATS is for the journal here, and no matter of names.
    return {"POOLGRID_NAMES": "directory", "POOLGRID_NAMES_DIR": str(directory), "POOLGRID_NATS_URL": "nats://h:1"}


def refusal(environment: Mapping[str, str], *words: str) -> str:
    """Run a command that fails, and return what it says, without the frame that is drawn around it."""
    result = CliRunner().invoke(app, list(words), env={"POOLGRID_NAMES": None, **environment})
    assert result.exit_code != 0, result.output
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_a_name_is_where_its_latest_process_is(command: tuple[str, ...], names: Mapping[str, str]) -> None:
    assert "127.0.0.1:2" in refusal(names, *command, "--url", NAME), "that is whom it asked"


def test_of_several_with_a_name_the_latest_that_can_be_connected_to_is_taken(
    names: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as alive:
        port = alive.getsockname()[1]
        register(Path(names["POOLGRID_NAMES_DIR"]), (1, port, "blue"))

        assert asyncio.run(url_of(NAME)) == f"http://127.0.0.1:{port}", "the later one at port 2 is gone"


def test_in_place_of_a_process_that_does_not_answer_another_one_of_its_name_is_found(
    names: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in names.items():
        monkeypatch.setenv(name, value)

    assert asyncio.run(other_url_of(NAME, "http://127.0.0.1:2")) == "http://127.0.0.1:1"
    assert asyncio.run(other_url_of(NAME, "http://127.0.0.1:1")) == "http://127.0.0.1:2"
    assert asyncio.run(other_url_of(NAME, "http://127.0.0.1:9")) == "http://127.0.0.1:2"


def test_where_no_other_process_has_the_name_it_is_asked_on(
    names: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in names.items():
        monkeypatch.setenv(name, value)

    assert asyncio.run(other_url_of("dyn://red.router.http", "http://127.0.0.1:3")) == "http://127.0.0.1:3"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_without_names_a_name_is_refused_with_what_to_set(command: tuple[str, ...]) -> None:
    said = refusal({}, *command, "--url", NAME)
    assert "POOLGRID_NAMES is none" in said
    assert "set it to directory, nats, kubernetes" in said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dyn://green.router.http", "no process has that name"),
        ("dyn://blue.router.select", "tcp://127.0.0.1:3, which is not HTTP"),
        ("dyn://blue.http", "is not of the form dyn://namespace.component.endpoint"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name: str, said: str, names: Mapping[str, str]) -> None:
    assert said in refusal(names, "config", "rollback", "--url", name)


def document(*names: str) -> GridDocument:
    pools = [{"name": name, "url": f"http://h:{port}"} for port, name in enumerate(names, 1)]
    axes = {"ttft_min_ms": 0, "ttft_max_ms": 9, "ttft_resolution": 1, "itl_min_ms": 0, "itl_max_ms": 9}
    grid = {"pools": pools, **axes, "itl_resolution": len(names), "mapping": [list(names)]}
    return load_document(json.dumps({"version": 1, "mode": "aggregated", "aggregated": grid}).encode()).document


def test_a_pool_has_its_own_name_on_nats_where_that_is_one_there() -> None:
    names = nats_names(document("fast", "slow_b-2", "eu.west/a"))

    assert names == {"fast": "fast", "slow_b-2": "slow_b-2", "eu.west/a": "eu-west-a"}


@pytest.mark.parametrize(
    ("names", "said"),
    [(("a.b", "a/b"), "pool 'a/b' would be 'a-b' on NATS, as 'a.b'"), (("x" * 65,), "at most 64 characters")],
)
def test_names_that_cannot_be_on_nats_are_refused(names: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        nats_names(document(*names))
