"""Which packages are installed: all that lie in the directories which ``pyproject.toml`` maps to import names.

The rest of the distribution is declared there. This one thing cannot be: setuptools finds packages by itself only
where directories are called as they are imported.
"""

import tomllib
from pathlib import Path

from setuptools import find_packages, setup

DIRECTORIES = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]

setup(
    packages=[
        *DIRECTORIES,
        *(f"{name}.{below}" for name, directory in DIRECTORIES.items() for below in find_packages(directory)),
    ]
)
