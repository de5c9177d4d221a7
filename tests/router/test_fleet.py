"""What is derived from the fleet is always that of the fleet as it is."""

from __future__ import annotations

from poolgrid.router.core.fleet import Fleet
from poolgrid.wire.identifiers import Role
from tests.router.fleet_builder import make_card, worker_key


def test_models_and_roles_follow_every_change() -> None:
    fleet = Fleet()
    assert fleet.models() == {}

    b = fleet.join(worker_key("b"), 1, make_card())
    a = fleet.join(worker_key("a"), 1, make_card())
    assert fleet.models() == {"m": [a, b]}
    assert fleet.models() is fleet.models(), "sorted once per change"

    renewed = fleet.join(worker_key("b"), 2, make_card(role=Role.DECODE))
    assert fleet.models() == {"m": [a, renewed]}
    assert fleet.serving("m") == [a]
    assert fleet.serving("m", (Role.DECODE,)) == [renewed]

    fleet.drain(worker_key("a"))
    assert fleet.serving("m") == [a]
    assert a.draining

    fleet.leave(worker_key("a"))
    assert fleet.models() == {"m": [renewed]}
    assert fleet.serving("other") == []
