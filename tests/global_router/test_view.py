"""What a global router says of models that several pools serve."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from poolgrid.global_router.service import PoolsView
from poolgrid.process.clock import SystemClock
from poolgrid.wire.card import ChatSpec, MediaSpec
from poolgrid.wire.identifiers import Role
from poolgrid.wire.selection import ModelStatus, PoolStatus, RoleStatus


def view_of(**chats: ChatSpec) -> PoolsView:
    """Return a view of pools, in this order, whose workers were told these."""
    pools: list[Any] = [SimpleNamespace(name="away", status=None)]
    for name, chat in chats.items():
        served = ModelStatus("m", 32, "xxh3-64/1337", 4096, (), (), MediaSpec(item_bytes_max=7), chat)
        pools.append(SimpleNamespace(name=name, status=PoolStatus(1, True, (served,))))
    return PoolsView(cast(Any, SimpleNamespace(all=lambda: pools)), cast(Any, None), SystemClock())


def test_what_workers_were_told_comes_from_every_pool_and_the_first_counts(caplog: pytest.LogCaptureFixture) -> None:
    view = view_of(
        east=ChatSpec("qwen3"), quiet=ChatSpec(), west=ChatSpec("deepseek_r1", "hermes"), south=ChatSpec("qwen3")
    )
    with caplog.at_level(logging.WARNING):
        (served,) = view.models()
        assert view.models() == [served]

    assert served.chat == ChatSpec("qwen3", "hermes")
    (record,) = caplog.records
    assert record.getMessage() == (
        "pool west reports of model 'm': reasoning_parser 'deepseek_r1'; an earlier pool of the document reports "
        "'qwen3', which is used"
    )


def test_pools_whose_workers_were_told_nothing_say_nothing() -> None:
    (served,) = view_of(east=ChatSpec(), west=ChatSpec()).models()

    assert served.chat == ChatSpec()


def test_models_that_serve_tasks_alone_are_left_to_the_routers_of_their_pools() -> None:
    def served(model: str, role: Role) -> ModelStatus:
        return ModelStatus(model, 32, "xxh3-64/1337", 4096, (RoleStatus(role, 1, 0, 0, 0, 8),))

    status = PoolStatus(1, True, (served("flux", Role.IMAGE), served("m", Role.AGGREGATED)))
    pools = SimpleNamespace(all=lambda: [SimpleNamespace(name="east", status=status)])

    assert [each.name for each in PoolsView(cast(Any, pools), cast(Any, None), SystemClock()).models()] == ["m"]
