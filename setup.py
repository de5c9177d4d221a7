"""Which packages are installed, and in which form: as they are, or with the path of a request compiled.

The rest of the distribution is declared in ``pyproject.toml``. Packages cannot be: setuptools finds them by itself only
where directories are called as they are imported; here they are all that lie in the directories which
``pyproject.toml`` maps to import names.

``POOLGRID_COMPILE=1 pip install .`` compiles the modules that ``compiled_modules.toml`` names, with mypyc. Who asks for
that gets it or an error, never the other form. Without it nothing of this is looked at, and no compiler is needed.

Rules
    1. Sources are installed in both forms. Python takes the compiled one of two modules of the same name.
    2. Only wheels are compiled. An editable installation would leave libraries in the tree, older than their sources.
    3. Everything is made in a directory that goes again: what an earlier build left would be installed with the rest.
"""

from __future__ import annotations

import os
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import shorten
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

PROJECT = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
DIRECTORIES: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
ASKED = "POOLGRID_COMPILE"
"""The environment variable: 1 compiles, 0 and nothing do not."""

LIBRARY = "poolgrid.compiled"
"""All modules are in one library beside the packages, ``poolgrid/compiled__mypyc``; a small one of each names it."""

MYPY_SETTINGS = """\
[mypy]
mypy_path = {root}/.mypy
explicit_package_bases = true
ignore_missing_imports = true
plugins = pydantic.mypy
"""
"""Extras are not there, so what they would be is not known. How strict the types are to be, CI says."""

WHAT_TO_DO = f"""\
poolgrid was to be compiled ({ASKED}=1), and that failed; the lines above say at what. Nothing was installed.
It takes a C compiler (gcc or clang) and the headers of this Python (Debian's python3-dev, Fedora's python3-devel).
Without {ASKED} the same program is installed as it is, which needs neither and does the same."""


def is_asked_for() -> bool:
    """Return whether the compiled form is to be made; ends the process when that cannot be told or cannot be."""
    asked = os.environ.get(ASKED, "")
    if asked not in ("", "0", "1"):
        sys.exit(f"installing poolgrid: {ASKED} is {asked!r}, allowed are 1 (compile) and 0 or nothing (do not)")
    if asked == "1" and "editable_wheel" in sys.argv:
        sys.exit(
            f"installing poolgrid: {ASKED}=1 compiles wheels, and an editable installation has none; leave out one"
        )
    return asked == "1"


def extensions(table: dict[str, Any], directory: Path) -> list[Extension]:
    """Return the modules of the table as C in a directory."""
    from mypyc.build import mypycify

    settings = directory / "mypy.ini"
    settings.write_text(MYPY_SETTINGS.format(root=Path.cwd()), encoding="utf-8")
    paths = [str(Path(".mypy", *name.split("."))) + ".py" for name in table["compiled"]]
    try:
        # One file of C a module: one gcc for all of them took more than ten minutes.
        made: list[Extension] = mypycify(
            [f"--config-file={settings}", f"--cache-dir={os.devnull}", *paths],
            opt_level="2",
            debug_level="0",
            multi_file=True,
            target_dir=str(directory / "c"),
            group_name=LIBRARY,
        )
    except SystemExit as ended:
        sys.exit(f"{ended.code if isinstance(ended.code, str) else ''}\n{WHAT_TO_DO}")
    for library in made:
        library.include_dirs.append(str(directory / "c" / "poolgrid"))  # where the dot in its name puts its headers
    return made


class Compile(build_ext):
    """Compiles the files of a library beside each other, one for each core, and says what to do where that fails."""

    def build_extension(self, ext: Extension) -> None:
        """Make one library."""
        try:
            ext.extra_objects, ext.sources = self._objects(ext), []
            super().build_extension(ext)
        except Exception as error:
            raise SystemExit(f"{shorten(str(error), 300)}\n{WHAT_TO_DO}") from error

    def _objects(self, ext: Extension) -> list[str]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            try:
                return list(pool.map(lambda source: self._object(ext, source), ext.sources))
            except BaseException:
                pool.shutdown(cancel_futures=True)  # what one file lacks, all lack
                raise

    def _object(self, ext: Extension, source: str) -> str:
        (made,) = self.compiler.compile(
            [source],
            output_dir=self.build_temp,
            include_dirs=ext.include_dirs,
            extra_postargs=ext.extra_compile_args,
            depends=ext.depends,
        )
        return str(made)


def run() -> None:
    """Do what setuptools was asked for."""
    compiled: dict[str, Any] = {}
    Path("build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="compiled-", dir="build") as name:
        directory = Path("build", Path(name).name)  # setuptools takes no absolute paths
        if is_asked_for():
            table = tomllib.loads(Path("compiled_modules.toml").read_text(encoding="utf-8"))
            # Types are those of the libraries that the program will meet.
            compiled["setup_requires"] = [*table["requires"], *PROJECT["project"]["dependencies"]]
            if "bdist_wheel" in sys.argv:
                compiled["ext_modules"] = extensions(table, directory)
                compiled["cmdclass"] = {"build_ext": Compile}
                compiled["options"] = {"build": {"build_base": str(directory / "build")}}
        setup(
            packages=[
                *DIRECTORIES,
                *(f"{name}.{below}" for name, directory in DIRECTORIES.items() for below in find_packages(directory)),
            ],
            **compiled,
        )


run()
