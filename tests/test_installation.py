"""What ``pip install .`` adds to an environment: one name to import, one command, and what they need at run time."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from pathlib import Path

import pytest

import poolgrid

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "poolgrid"
NOT_INSTALLED = ("tests", "lab")


def run(*command: str | Path, cwd: Path) -> str:
    # Nothing of this environment is found by accident, and neither is what lies in the repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    assert "absent from the `packages` configuration" not in done.stderr, "setuptools takes a data directory for code"
    return done.stdout


def files_below(directory: Path) -> set[Path]:
    """Return the files below a directory, also behind links, without bytecode; relative to it."""
    return {
        Path(parent, name).relative_to(directory)
        for parent, _, names in os.walk(directory, followlinks=True)
        if not parent.endswith("__pycache__")
        for name in names
    }


class Installation:
    """An environment of its own in which the package was installed from a copy; dependencies are this one's."""

    def __init__(self, directory: Path) -> None:
        self.elsewhere = directory / "elsewhere"
        self.elsewhere.mkdir()
        self.bin = directory / "venv" / "bin"
        # A pip of its own would take longer than all the rest; ours, where it is there, can install into it.
        pip = importlib.util.find_spec("pip") is not None
        run(sys.executable, "-m", "venv", *(["--without-pip"] if pip else []), directory / "venv", cwd=directory)
        installer = (sys.executable, "-m", "pip", "--python") if pip else ()
        (self.packages,) = (directory / "venv" / "lib").glob("python*/site-packages")
        # A path in such a file is only searched: the editable installation in it is not active.
        (self.packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
        before = set(self.packages.iterdir())
        copy = directory / "copy"
        shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for needed in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / needed, copy)
        # What pip does, in two steps: it would fetch an environment for the first one from the network.
        build = f"from setuptools import build_meta; build_meta.build_wheel({str(directory)!r})"
        run(sys.executable, "-c", build, cwd=copy)
        (wheel,) = directory.glob("*.whl")
        offline = ("--no-index", "--no-deps", "--ignore-installed")
        own = (self.bin / "python",) if pip else (self.bin / "python", "-m", "pip")
        run(*installer, *own, "install", *offline, wheel, cwd=self.elsewhere)
        self.added = {path.name for path in set(self.packages.iterdir()) - before}


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(tmp_path_factory.mktemp("installation"))


def test_the_only_new_name_is_poolgrid(installation: Installation) -> None:
    assert {name for name in installation.added if not name.endswith(".dist-info")} == {"poolgrid"}


def test_the_license_is_installed_and_named(installation: Installation) -> None:
    (about,) = (path for path in installation.packages.glob("poolgrid-*.dist-info") if path.is_dir())

    assert (about / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "License-Expression: Apache-2.0" in (about / "METADATA").read_text().splitlines()


def test_every_file_of_every_package_is_installed_and_no_other(installation: Installation) -> None:
    wanted = {Path("poolgrid", path) for path in files_below(PACKAGE)}
    found = {Path("poolgrid", path) for path in files_below(installation.packages / "poolgrid")}

    assert found == wanted


def test_a_source_distribution_has_all_packages_and_no_tests(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for needed in ("src", "tests"):
        shutil.copytree(ROOT / needed, copy / needed, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for needed in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / needed, copy)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", build, cwd=copy)

    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}

    assert not [name for name in names if name.startswith("tests")]
    assert {
        "src/poolgrid/py.typed",
        "src/poolgrid/server/frontend/models/tiny/tokenizer.json",
        "src/poolgrid/plugins/fleet_page/static/main.js",
    } <= names


@pytest.mark.parametrize("command", [("poolgrid",), ("python", "-m", "poolgrid")], ids=" ".join)
def test_the_command_and_the_module_tell_the_version(installation: Installation, command: tuple[str, ...]) -> None:
    first, *rest = command

    told = run(installation.bin / first, *rest, "--version", cwd=installation.elsewhere)

    assert told == f"poolgrid {poolgrid.__version__}\n"


def test_the_installed_one_is_used_even_in_the_repository(installation: Installation) -> None:
    program = "import poolgrid, poolgrid.server.router.service as s; print(poolgrid.__version__, s.__file__)"

    told = run(installation.bin / "python", "-c", program, cwd=ROOT)

    assert told.split() == [
        poolgrid.__version__,
        str(installation.packages / "poolgrid" / "server" / "router" / "service.py"),
    ]


def test_what_an_installed_command_needs_at_run_time_is_there(installation: Installation) -> None:
    program = (
        "from poolgrid.server.frontend.models import TINY_MODEL_PATH\n"
        "from poolgrid.server.frontend.prompt_model import PromptModel\n"
        "from poolgrid.plugins.trtllm.arguments.contract import contract\n"
        "assert contract()\n"
        "print(PromptModel.load(TINY_MODEL_PATH, 'tiny').name)\n"
    )

    assert run(installation.bin / "python", "-c", program, cwd=installation.elsewhere) == "tiny\n"


def test_the_version_is_written_once() -> None:
    assert poolgrid.__version__ == importlib.metadata.version("poolgrid")
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]


def test_every_directory_of_code_is_installed_or_listed_as_not_installed() -> None:
    code = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    linked = {path.name for path in (PACKAGE / "server").iterdir() if path.is_symlink()}

    assert code == linked | set(NOT_INSTALLED)
    assert all((PACKAGE / "server" / name).resolve() == ROOT / name for name in linked)
