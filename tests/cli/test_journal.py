"""`poolgrid journal ...` on real directories."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from poolgrid.server.cli.main import app
from poolgrid.server.consolidator.journal.posix_disk import PosixDisk
from tests.consolidator.journal_builder import encoded, fold, write
from tests.consolidator.test_journal_inspection import from_the_future

RUNNER = CliRunner()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A closed journal of 40 records in several segments, with one snapshot."""
    disk = PosixDisk(tmp_path / "journal")
    journal = write(disk, 30, segment_bytes=500)
    journal.write_snapshot(fold(30).freeze())
    while journal.next_offset < 40:
        journal.append(encoded(journal.next_offset, 2), 50_000)
    journal.close()
    return tmp_path / "journal"


def run(*arguments: object, status: int = 0) -> str:
    result = RUNNER.invoke(app, ["journal", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.stderr


def lines(*arguments: object) -> list[dict[str, object]]:
    return [json.loads(line) for line in run(*arguments).splitlines()]


def test_ls_names_every_file_and_every_stream(directory: Path) -> None:
    answer = json.loads(run("ls", directory, "--json"))

    assert answer["segments"][0]["first_offset"] == 0
    assert answer["segments"][-1]["next_offset"] == 40
    assert [snapshot["offset"] for snapshot in answer["snapshots"]] == [30]
    assert [(row["worker"], row["source"], row["epoch"], row["next_seq"]) for row in answer["streams"]] == [
        ("w", "worker", 1, 39)
    ]
    assert answer["streams"][0]["blocks"] == 78
    assert "00000000000000000030.snapshot" in run("ls", directory)


def test_cat_prints_records_chosen_by_offset_time_kind_and_worker(directory: Path) -> None:
    every = lines("cat", directory)

    assert [row["offset"] for row in every] == list(range(40))
    assert every[3]["events"] == [
        {
            "type": "BlocksStored",
            "parent": None,
            "sequence_hashes": ["0000000000000006", "0000000000000007"],
            "tier": "device",
            "group": 0,
        }
    ]
    assert [row["offset"] for row in lines("cat", directory, "--from", "10", "--to", "13")] == [10, 11, 12]
    # Record n is recorded at 2,000 + n ms.
    assert [row["offset"] for row in lines("cat", directory, "--from", "1970-01-01T00:00:02.036")] == [37, 38, 39]
    assert [row["offset"] for row in lines("cat", directory, "--type", "WorkerJoined")] == [0]
    assert lines("cat", directory, "--worker", "somebody") == []
    assert len(lines("cat", directory, "--worker", "w/0")) == 40
    assert "neither an offset nor a time" in run("cat", directory, "--from", "yesterday", status=2)


def test_verify_is_silent_about_nothing(directory: Path) -> None:
    assert run("verify", directory).startswith("sound: 40 records, 1 snapshot (1 of them compared")

    damaged = sorted(directory.glob("*.segment"))[1]
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(data)

    said = run("verify", directory, status=1)
    first = int(damaged.name.split(".")[0])
    assert f"journal file {damaged.name}, byte" in said
    assert f"record {first}" in said
    assert "restore the file from a copy" in said
    assert len(lines("cat", directory, "--to", first)) == first


def test_verify_names_a_torn_tail_unless_the_journal_is_being_written(directory: Path) -> None:
    last = sorted(directory.glob("*.segment"))[-1]
    last.write_bytes(last.read_bytes()[:-3])

    assert "a torn tail" in run("verify", directory, status=1)

    disk = PosixDisk(directory)
    assert "is being written" in run("verify", directory)
    disk.close()


def test_state_at_an_offset_and_at_a_time(directory: Path) -> None:
    at_offset = json.loads(run("state", directory, "--at", 21, "--json"))
    at_time = json.loads(run("state", directory, "--at", "1970-01-01T00:00:02.020Z", "--json"))

    assert at_offset == at_time
    assert at_offset["offset"] == 21
    assert at_offset["workers"][0]["blocks"] == {"device": 40, "host": 0, "disk": 0}
    assert "40" in run("state", directory, "--at", 21)
    assert "ends before" in run("state", directory, "--at", 41, status=1)


def test_records_from_the_future_are_shown_and_counted(directory: Path) -> None:
    disk = PosixDisk(directory)
    journal = write(disk, 40)
    journal.append(from_the_future(40), 0)
    journal.close()

    result = RUNNER.invoke(app, ["journal", "cat", str(directory), "--from", "40"])

    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row.get("unknown") for row in rows] == [["LeaseGranted"], ["BlocksPinned"], None]
    assert rows[2]["extra_fields"] == 3
    assert "skipped 1 of the unknown kind LeaseGranted" in result.stderr
    assert json.loads(run("verify", directory, "--json"))["unknown"] == {"LeaseGranted": 1, "BlocksPinned": 1}


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    assert "it is no journal" in run("ls", tmp_path, status=2)
    assert "is not a directory" in run("verify", tmp_path / "absent", status=2)


@pytest.mark.parametrize("columns", ["80", "50", ""])
def test_what_people_read_is_never_cut(directory: Path, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    listed = run("ls", directory)
    found = json.loads(run("ls", directory, "--json"))
    for each in (*found["segments"], *found["snapshots"]):
        assert each["file"] in listed
    assert f"{len(found['segments'])} segments and 1 snapshot" in listed
    state = run("state", directory)
    assert "1 worker rank" in state
    for text in (listed, state, run("verify", directory)):
        assert "…" not in text
    assert not columns or max(map(len, (listed + state).splitlines())) <= int(columns)


def test_a_command_that_finds_no_nats_server_leaves_no_connection_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poolgrid.plugins.nats.plane.CONNECT_TIMEOUT_S", 0.2)

    before = set(threading.enumerate())

    said = run("verify", "nats://127.0.0.1:1/default", status=1)

    assert "no NATS server answers at nats://127.0.0.1:1" in said
    for thread in set(threading.enumerate()) - before:
        if thread.name == "NATS":
            thread.join(10.0)
            assert not thread.is_alive()
