"""What the limit of open files means for connections to workers."""

from __future__ import annotations

import resource

import pytest

from poolgrid.serving.links import FILES_PER_LINK, LINKS_MAX, links_that_fit

Limits = tuple[int, int]


@pytest.mark.parametrize(
    ("limits", "after", "fit"),
    [
        ((1024, 4096), 4096, 512),
        ((1024, 2**20), 2 * FILES_PER_LINK * LINKS_MAX, LINKS_MAX),
        ((2**20, 2**20), 2**20, LINKS_MAX),
        ((1024, resource.RLIM_INFINITY), 2 * FILES_PER_LINK * LINKS_MAX, LINKS_MAX),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), resource.RLIM_INFINITY, LINKS_MAX),
        ((4, 4), 4, 1),
    ],
)
def test_links_have_half_of_the_open_files_and_the_limit_is_raised_for_them(
    monkeypatch: pytest.MonkeyPatch, limits: Limits, after: int, fit: int
) -> None:
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: now.__setitem__(0, given))
    assert links_that_fit() == fit
    assert now[0] == (after, limits[1])
