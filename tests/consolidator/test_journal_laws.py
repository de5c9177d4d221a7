"""The laws of journals, on a directory and on a stream, both in memory; ``test_nats_journal`` has real servers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.consolidator.journal_kinds import InDirectory, InFakeStream, JournalKind
from tests.consolidator.journal_laws import JournalLaws


class TestJournalLaws(JournalLaws):
    """On what is kept in memory."""

    @pytest.fixture(params=[InDirectory, InFakeStream], ids=["directory", "stream"])
    def kind(self, request: pytest.FixtureRequest) -> JournalKind:
        make: Callable[[], JournalKind] = request.param
        return make()
