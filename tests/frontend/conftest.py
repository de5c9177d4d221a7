"""What tests of the front end share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.frontend.server import close_shared_front_ends


@pytest.fixture(scope="module", autouse=True)
def shared_front_ends() -> Iterator[None]:
    """Close the applications that a module's tests shared."""
    yield
    close_shared_front_ends()
