"""The seeds that failed once, kept in ``seeds.txt``: ``profile seed reason``, a line each."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SEEDS_FILE = Path(__file__).with_name("seeds.txt")


class KeptSeed(NamedTuple):
    """A run that failed once."""

    profile: str
    seed: int
    reason: str


def kept_seeds() -> list[KeptSeed]:
    """Return all that is kept."""
    kept: list[KeptSeed] = []
    for line in SEEDS_FILE.read_text().splitlines():
        if line and not line.startswith("#"):
            profile, seed, reason = line.split(maxsplit=2)
            kept.append(KeptSeed(profile, int(seed), reason))
    return kept


def keep(profile: str, seed: int, reason: str) -> None:
    """Add a run, unless it is there."""
    if all((each.profile, each.seed) != (profile, seed) for each in kept_seeds()):
        with SEEDS_FILE.open("a") as file:
            file.write(f"{profile} {seed} {' '.join(reason.split())[:200]}\n")
