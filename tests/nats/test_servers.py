"""What tests start of NATS ends with them."""

from __future__ import annotations

import pytest

from tests.killed_tests import assert_it_ends_with_tests_that_are_killed
from tests.nats.servers import BINARY, MISSING

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not BINARY, reason=MISSING)]

ONLY_A_SERVER = """
from tests.nats.servers import one_server

with one_server():
    wait_to_be_killed()
"""


def test_the_nats_server_of_tests_that_are_killed_ends_too() -> None:
    assert_it_ends_with_tests_that_are_killed(lambda each: each.name() == "nats-server", ONLY_A_SERVER)
