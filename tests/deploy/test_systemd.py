"""The units of ``deploy/systemd`` are what systemd itself takes for sound, tight and in time."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from poolgrid.server.cli.main import app
from poolgrid.server.consolidator.settings import ConsolidatorProcessSettings

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
SOCKETS = sorted((ROOT / "deploy" / "systemd").glob("*.socket"))
CREDENTIALS = ROOT / "deploy" / "systemd" / "credentials.conf"
NATS = ROOT / "deploy" / "systemd" / "nats.conf"
ANALYZE = shutil.which("systemd-analyze")

needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not there (Debian's package systemd)")

EXPOSURE_MAX = {"poolgrid-worker@": 4.5}
"""Of 10; workers see devices and compile kernels. The others keep below 2."""

MARGIN_S = 5
"""A supervisor's patience beyond the drain: handing over takes a second, saying goodbye two."""


def settings_of(unit: Path) -> dict[str, list[str]]:
    """Return each directive with its values; a directive may be given several times."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def variables(unit: Path) -> dict[str, str]:
    return dict(each.split("=", 1) for each in settings_of(unit)["Environment"])


def variables_of(command: str) -> set[str]:
    return {str(parameter.envvar) for parameter in app.commands[command].params}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units as on a machine, but for the program, which is not installed here."""
    place = tmp_path_factory.mktemp("units")
    for unit in UNITS:
        text = unit.read_text()
        assert "ExecStart=/opt/poolgrid/bin/poolgrid " in text
        (place / unit.name).write_text(text.replace("/opt/poolgrid/bin/poolgrid", "/bin/true"))
        drop_in = place / f"{unit.name}.d"
        drop_in.mkdir()
        shutil.copy(CREDENTIALS, drop_in)
        shutil.copy(NATS, drop_in)
    for unit in SOCKETS:
        shutil.copy(unit, place)
    return place


def verified(place: Path) -> str:
    assert ANALYZE is not None
    found = subprocess.run(
        [
            ANALYZE,
            "verify",
            "--recursive-errors=no",
            *sorted(str(each) for kind in ("service", "socket") for each in place.glob(f"*.{kind}")),
        ],
        env={"SYSTEMD_UNIT_PATH": f"{place}:", "PATH": "/usr/bin:/bin"},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return found.stderr + found.stdout


@needs_systemd
def test_systemd_finds_nothing_wrong_with_the_units_and_something_with_a_broken_one(installed: Path) -> None:
    assert verified(installed) == ""

    drop_in = installed / "poolgrid-router.service.d" / "broken.conf"
    drop_in.write_text("[Service]\nWatchdogSeconds=3\n")
    try:
        assert "WatchdogSeconds" in verified(installed)
    finally:
        drop_in.unlink()


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_a_unit_exposes_little(unit: Path) -> None:
    assert ANALYZE is not None
    allowed = EXPOSURE_MAX.get(unit.stem, 2.0)

    found = subprocess.run(
        [ANALYZE, "security", "--offline=true", "--no-pager", f"--threshold={allowed * 10:.0f}", str(unit)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert re.search(r"Overall exposure level for \S+: \d", found.stdout), found.stderr
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_a_command_with_its_own_settings_and_waits_longer_than_they_take(unit: Path) -> None:
    directives = settings_of(unit)
    command = directives["ExecStart"][0].split()[1]
    given = variables(unit)

    assert {name for name in given if name.startswith("POOLGRID_")} <= variables_of(command)
    assert directives["Type"] == ["notify"]
    assert directives["Restart"] == ["on-failure"]
    assert directives["StartLimitIntervalSec"] == ["0"], "it is started again as often as it takes"
    takes_ms = given.get("POOLGRID_SHUTDOWN_TIMEOUT_MS") or given.get("POOLGRID_SHUTDOWN_TIMEOUT_MS") or "5000"
    assert int(directives["TimeoutStopSec"][0]) >= int(takes_ms) / 1000 + MARGIN_S


@pytest.mark.parametrize("unit", SOCKETS, ids=lambda path: path.stem)
def test_a_socket_is_the_one_of_a_service_and_listens_at_one_address(unit: Path) -> None:
    assert unit.with_suffix(".service") in UNITS
    directives = settings_of(unit)
    assert len(directives["ListenStream"]) == 1
    assert "Accept" not in directives, "the service gets the listening socket"


PARTS_OF_A_POOL = ("router", "consolidator", "worker")


@pytest.mark.parametrize(
    ("drop_in", "commands"), [(CREDENTIALS, (*PARTS_OF_A_POOL, "global-router")), (NATS, PARTS_OF_A_POOL)]
)
def test_the_credentials_are_what_every_part_has_options_for(drop_in: Path, commands: tuple[str, ...]) -> None:
    given = variables(drop_in)

    for command in commands:
        assert set(given) <= variables_of(command)
    loaded = {each.partition(":")[0] for each in settings_of(drop_in)["LoadCredential"]}
    assert {value.removeprefix("%d/") for value in given.values()} == loaded


def test_every_variable_that_the_page_shows_is_one_of_its_unit() -> None:
    page = (ROOT / "docs" / "bare_metal.md").read_text().partition("\n## Slurm\n")[0]
    units = {"consolidator.env": "consolidator", "router.env": "router", "worker.env": "worker"}
    shown: dict[str, set[str]] = {command: set() for command in units.values()}
    for block in re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        command = ""
        for line in block.splitlines():
            if line.startswith("#"):
                command = next((unit for name, unit in units.items() if name in line), "")
            elif command and line.startswith("POOLGRID_"):
                shown[command].add(line.partition("=")[0])

    for command, names in shown.items():
        assert names
        assert names <= variables_of(command)


def test_the_settings_of_a_pool_on_nats_that_the_page_shows_are_taken() -> None:
    page = (ROOT / "docs" / "bare_metal.md").read_text()
    shown = page.partition("## A pool on NATS")[2].partition("```text\n")[2].partition("```")[0]
    settings = dict(line.split("=", 1) for line in shown.splitlines() if line.startswith("POOLGRID_"))
    assert set(settings) <= variables_of("consolidator")

    taken = {name.removeprefix("POOLGRID_").lower(): value for name, value in settings.items() if value}
    urls = taken.pop("nats_url").strip('"').split()
    read = ConsolidatorProcessSettings.model_validate({**taken, "nats_url": urls})

    assert read.on_nats
    assert len(read.nats_url) == 3
    assert "POOLGRID_DATA_DIR" in settings, "the unit names a directory, which a pool on NATS does not take"
