"""Equal media meet on one encode worker, a popular one does not pile up, and a worker's end moves only what it had."""

from __future__ import annotations

import numpy as np

from poolgrid.router.core.candidates import Candidates, RoutingRequest
from poolgrid.router.core.inputs import WorkerWanted
from poolgrid.router.core.kv_policy import KvAware
from poolgrid.router.core.policy import LOAD_BOUND, MediaAffinity
from poolgrid.wire.card import MediaSpec
from poolgrid.wire.identifiers import Stage, WorkerId, WorkerKey
from tests.router.fleet_builder import Pool, decided, make_card

MEDIA = range(400)


def _request(media: int, request_id: str = "r") -> RoutingRequest:
    return RoutingRequest(request_id, "m", 64, 16, 4, stage=Stage.ENCODE, media=(media,), media_kinds=("image",))


def _candidates(loads: dict[str, int]) -> Candidates:
    zero = np.zeros(len(loads))
    workers = tuple(WorkerKey(WorkerId(name)) for name in loads)
    return Candidates(workers, zero, zero, np.array(list(loads.values()), np.float64), zero, zero, zero)


def _chosen(media: int, loads: dict[str, int], request_id: str = "r") -> str:
    candidates = _candidates(loads)
    return str(candidates.workers[MediaAffinity().choose(_request(media, request_id), candidates).row])


def test_a_medium_goes_to_the_same_worker_whoever_asks_and_media_spread_over_all() -> None:
    idle = dict.fromkeys("abcd", 0)
    homes = [_chosen(media, idle) for media in MEDIA]

    assert homes == [_chosen(media, idle, f"other {media}") for media in MEDIA]
    assert min(homes.count(name) for name in idle) > len(MEDIA) / 4 * 0.6


def test_one_popular_medium_is_spread_when_its_worker_is_above_its_share() -> None:
    loads = dict.fromkeys("abcd", 0)
    for _ in range(100):
        loads[_chosen(7, loads)] += 1

    assert max(loads.values()) <= LOAD_BOUND * 25 + 2
    assert _chosen(7, dict.fromkeys("abcd", 0)) == max(loads, key=lambda name: loads[name])


def test_among_equal_workers_equal_media_meet_though_their_requests_differ() -> None:
    pool = Pool()
    selector = pool.selector(KvAware())
    pool.join(*"abcd", card=make_card(media=MediaSpec(("image",))))

    homes: list[str] = []
    for media in range(20):
        chosen = set()
        for number in range(5):
            request = RoutingRequest(f"r{number}", "m", 64, 16, 4, media=(media,), media_kinds=("image",))
            chosen.add(str(decided(selector.select(WorkerWanted(request, [], 0.0, 0))).worker))
        homes.extend(chosen)
    assert len(homes) == 20
    assert set(homes) == set("abcd")
