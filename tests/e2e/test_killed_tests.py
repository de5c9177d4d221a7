"""What tests start of poolgrid ends with them, also when they are killed."""

from __future__ import annotations

import pytest

from tests.killed_tests import assert_it_ends_with_tests_that_are_killed

pytestmark = pytest.mark.e2e

ONLY_A_POOL = """
from tests.e2e.processes import running_pool

with running_pool(workers=1):
    wait_to_be_killed()
"""


def test_the_pool_of_tests_that_are_killed_ends_too() -> None:
    assert_it_ends_with_tests_that_are_killed(lambda each: "worker" in each.cmdline(), ONLY_A_POOL)
