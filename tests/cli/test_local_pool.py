"""Which workers `poolgrid up` starts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from poolgrid.cli.local_pool import UpSettings


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ["worker-0", "worker-1", "worker-2", "worker-3"]),
        ({"workers": 1, "encode": 1}, ["worker-0", "encode-0"]),
        ({"prefill": 1, "decode": 2}, ["prefill-0", "decode-0", "decode-1"]),
        ({"workers": 1, "decode": 1}, ["worker-0", "decode-0"]),
    ],
)
def test_workers_are_named_after_their_roles(given: dict[str, Any], names: list[str]) -> None:
    assert list(UpSettings(**given).workers_by_name()) == names


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prefill": 2}, "prefill is 2 and decode is 0"),
        ({"workers": 0}, "workers and decode are 0"),
        ({"workers": 0, "encode": 1}, "workers and decode are 0"),
    ],
)
def test_a_pool_that_could_not_answer_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        UpSettings(**given)
