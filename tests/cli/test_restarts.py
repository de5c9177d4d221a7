"""Parts of `poolgrid up` that die: when they come back, and where."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
from itertools import accumulate, pairwise
from pathlib import Path

import click
import pytest
import zmq
from click.testing import CliRunner

from poolgrid.server.cli.options import arguments_of, with_settings
from poolgrid.server.cli.part import Part, PartFailed, handed_on, part_environment, stop_parts
from poolgrid.server.cli.service_process import start_status
from poolgrid.server.process.nats_settings import EventPlaneSettings
from poolgrid.server.process.restart_pace import DEATHS_LOUD, JITTER, PAUSE_MAX_S, PAUSE_MIN_S, STEADY_S, RestartPace
from poolgrid.server.transport.bound_socket import ReservedPorts, bind

HOST = "127.0.0.1"


def test_pauses_double_up_to_a_bound_and_never_end() -> None:
    pace = RestartPace("worker-0")
    pauses = [pace.died(0.0) for _ in range(1000)]
    assert all(PAUSE_MIN_S * (1 - JITTER) <= pause <= PAUSE_MAX_S * (1 + JITTER) for pause in pauses)
    for number, (pause, following) in enumerate(pairwise(pauses[:7])):
        assert following > pause, f"after death {number}"
    assert min(pauses[10:]) >= PAUSE_MAX_S * (1 - JITTER)
    assert [pace.deaths, pace.is_loud] == [1000, True]
    # Eleven deaths that took seconds ended everything; now the eleventh comes after half a minute at the earliest.
    assert list(accumulate(pauses))[10] > 30


def test_a_part_that_lived_for_long_is_back_at_once() -> None:
    pace = RestartPace("worker-0")
    for _ in range(DEATHS_LOUD):
        pace.died(STEADY_S / 2)
    assert pace.is_loud
    assert pace.died(STEADY_S) <= PAUSE_MIN_S * (1 + JITTER)
    assert not pace.is_loud


def test_parts_that_die_together_do_not_come_back_together_and_every_run_is_the_same() -> None:
    def run() -> list[float]:
        return [RestartPace(f"worker-{number}").died(0.0) for number in range(20)]

    assert run() == run()
    assert len(set(run())) == 20


def test_a_held_port_is_its_parts_and_nobody_elses_who_does_not_insist() -> None:
    ports = ReservedPorts(HOST)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        port = ports.hold()
        for _ in range(3):  # a part that dies and comes back
            with bind(HOST, port, "port") as part:
                part.listen()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((HOST, port))
        context.socket(zmq.ROUTER).bind(f"tcp://{HOST}:{port}")
        assert ports.hold(port) == port, "somebody listens: the part itself will say what is wrong with it"
    finally:
        ports.close()
        context.destroy(linger=0)


def test_a_part_whose_port_a_stranger_took_comes_back_when_the_stranger_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def until_failed(times: int) -> None:
        while sum("before it was ready" in each.getMessage() for each in caplog.records) < times:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def scenario() -> None:
        ports = ReservedPorts(HOST)
        port = ports.hold()
        part = Part("consolidator", ["consolidator", "--ingest-port", str(port)], part_environment())
        try:
            async with asyncio.timeout(60):
                await part.start()
                before = part.word("ingest")
                assert before.endswith(f":{port}")
                part.watch()
                part.signal(signal.SIGKILL)
                with contextlib.closing(await _listen_as_soon_as_it_can(port)):
                    await until_failed(2)
                part.ready_words = []
                while not part.ready_words:  # noqa: ASYNC110 - the part is watched by a task of its own
                    await asyncio.sleep(0.02)
                assert part.word("ingest") == before
        finally:
            await stop_parts([part])
            ports.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    said = [record.getMessage() for record in caplog.records]
    assert any("ended with status -9: starting it again in 0." in line for line in said)


async def _listen_as_soon_as_it_can(port: int) -> socket.socket:
    """Insist on a port as few do; its part listens until it is dead."""
    while True:
        stranger = socket.socket()
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            stranger.bind((HOST, port))
            stranger.listen()
            return stranger
        except OSError:
            stranger.close()
            await asyncio.sleep(0.005)


async def test_a_part_that_does_not_start_the_first_time_is_an_error() -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        part = Part("consolidator", ["consolidator", "--ingest-port", str(port)], part_environment())
        with pytest.raises(PartFailed, match="ended with status 1 before it was ready"):
            await part.start()
        await stop_parts([part])


async def test_a_part_that_dies_before_it_is_ready_is_seen_though_its_child_keeps_its_pipe_open(tmp_path: Path) -> None:
    dying = f"""
        import os, subprocess
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
        os._exit(9)
    """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(dying))
    part = Part("consolidator", ["consolidator"], {**part_environment(), "PYTHONPATH": str(tmp_path)})
    try:
        async with asyncio.timeout(30):
            with pytest.raises(PartFailed, match="ended with status 9 before it was ready"):
                await part.start()
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
        await stop_parts([part])


async def test_a_part_that_died_more_often_than_its_bound_is_given_up_and_its_words_are_in_its_log(
    tmp_path: Path,
) -> None:
    log_file = tmp_path / "c.log"
    arguments = ["consolidator", "--ingest-port", "0", "--log-level", "info"]
    part = Part("c", arguments, part_environment(), log_file=log_file, restarts_max=0)
    try:
        async with asyncio.timeout(60):
            await part.start()
            part.watch()
            part.signal(signal.SIGKILL)
            assert await part.given_up() == f"c has ended with status -9; its own words are in {log_file}"
    finally:
        await stop_parts([part])
    assert "consolidator" in log_file.read_text()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("--policy foo: unknown"), 2),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/no"), 2),
        (PermissionError(errno.EACCES, "Permission denied", "/data"), 2),
        (PartFailed("router ended with status 2 before it was ready", 2), 2),
        (PartFailed("router was not ready within 60 s"), 1),
        (OSError(errno.EADDRINUSE, "Address already in use"), 1),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), 1),
        (RuntimeError("the engine broke"), 1),
    ],
)
def test_only_what_a_restart_cannot_help_is_status_2(error: Exception, status: int) -> None:
    assert start_status(error) == status


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("router", "--policy", "foo"), "--policy foo: unknown, allowed are kv,"),
        (("router", "--model-path", "/absent"), "--model-path /absent: not a directory"),
        (("router", "--api-keys", "/absent"), "--api-keys /absent: no such file"),
        (("router", "--feed-endpoint", "tcp://127.0.0.1:1"), "--feed-endpoint and --query-endpoint go together"),
        (("global-router",), "--config: must be given"),
        (("up", "--part-option", "router.index-budget-bytes=1"), "router ended with status 2 before it was ready"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_a_wrong_configuration_ends_the_process_with_status_2_and_its_reason_last(
    tmp_path: Path, arguments: tuple[str, ...], line: str
) -> None:
    command = [sys.executable, "-m", "poolgrid", *arguments, "--port", "0"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert ended.returncode == 2
    assert line in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_a_password_of_nats_is_handed_on_in_the_environment_and_all_else_as_an_argument() -> None:
    settings = EventPlaneSettings(event_plane="nats", nats_url=("nats://u:hunter2@a:4222", "nats://b:4222"))
    words, environment = handed_on(["worker", *arguments_of(settings), "--host", "::1"], {"A": "b"})

    assert "hunter2" not in " ".join(words)
    assert words == ["worker", "--nats-replicas=1", "--event-plane=nats", "--nats-pool=default", "--host", "::1"]
    assert environment == {"A": "b", "POOLGRID_NATS_URL": "nats://u:hunter2@a:4222 nats://b:4222"}
    found: list[EventPlaneSettings] = []
    command = click.command()(with_settings(EventPlaneSettings)(found.append))
    assert CliRunner().invoke(command, words[1:4], env=environment).exit_code == 0
    assert found == [settings]

    for plain in (["--nats-url", "nats://b:4222", "x"], ["--nats-url=nats://b:4222"], ["worker"]):
        assert handed_on(plain, {}) == (plain, {})
