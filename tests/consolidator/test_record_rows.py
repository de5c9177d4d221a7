"""What an export says of an event is all that the event says."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from poolgrid.consolidator.journal.inspection import event_row
from poolgrid.wire.events import AnyEvent, Event
from tests.wire.test_wire_frames import GOLDEN


def events_in(value: Any) -> list[Any]:
    if isinstance(value, Event):
        return [value]
    if isinstance(value, msgspec.Struct):
        return [event for name in value.__struct_fields__ for event in events_in(getattr(value, name))]
    if isinstance(value, list | tuple):
        return [event for item in value for event in events_in(item)]
    return []


EVENTS = {type(event): event for event in events_in(list(GOLDEN.values()))}


def test_there_is_an_example_of_every_kind() -> None:
    assert set(EVENTS) == set(get_args(AnyEvent))


@pytest.mark.parametrize("kind", get_args(AnyEvent), ids=lambda kind: kind.__name__)
def test_a_line_of_an_event_has_all_its_fields_and_states_by_name(kind: type) -> None:
    row = event_row(EVENTS[kind])

    assert set(row) == {"type", *EVENTS[kind].__struct_fields__}
    assert not isinstance(row.get("state"), int)
    assert not isinstance(row.get("tier"), int)
