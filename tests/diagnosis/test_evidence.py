"""Evidence from answers that pass a router by, and the split of computed tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from poolgrid.kernel.decision.decision import DecisionLog
from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.kernel.wire.events import RequestFinished, RequestStarted
from poolgrid.server.diagnosis.causes import Cause
from poolgrid.server.diagnosis.evidence import UncachedSplit, split_uncached
from poolgrid.server.router.examiner import Examiner
from tests.observability_proof.verdicts import FAULTS, NOT_CAUSED, OF_TEXT
from tests.router.fleet_builder import Pool, decided

TOKENS = st.integers(0, 10_000)


@given(TOKENS, TOKENS, TOKENS, TOKENS, TOKENS)
def test_split_adds_up_to_what_was_computed(isl: int, seen: int, best: int, promised: int, reported: int) -> None:
    parts = astuple(split_uncached(isl, seen, best, promised, reported))

    assert min(parts) >= 0
    assert sum(parts) == max(0, isl - reported)


def test_each_lost_token_has_one_cause() -> None:
    assert split_uncached(1000, 800, 640, 320, 160) == UncachedSplit(cold=200, routing=320, eviction=160, mismatch=160)
    assert split_uncached(1000, 0, 0, 0, 0) == UncachedSplit(cold=1000, routing=0, eviction=0, mismatch=0)


def test_usage_behind_a_gateway_shows_another_tokenizer() -> None:
    pool = Pool()
    (worker,) = pool.join("a")
    log = DecisionLog(100)
    examiner = Examiner(pool.projection, log.of_dispatch)
    selector = pool.selector(KvAware())
    for number in range(12):
        isl = 160 + 16 * number
        path = list(range(number * 100, number * 100 + isl // 16))
        request = RoutingRequest(f"r-{number}", "m", isl, 16, isl // 16)
        decision = decided(selector.select(WorkerWanted(request, path, 0.0, number * 1000)))
        log.add(decision)
        examiner.gateway_reported(decision, path, 0, isl * 21 // 20)

    verdict = examiner.verdict(worker)

    assert verdict.cause is Cause.TOKENIZER
    assert verdict.first_request == "r-0"


@pytest.mark.parametrize("is_late", [False, True])
def test_usage_of_a_forwarded_answer_shows_another_template(is_late: bool) -> None:
    """The worker reports the router's own length at the start, which may come behind the end of a short answer."""
    pool = Pool()
    (worker,) = pool.join("a")
    log = DecisionLog(100)
    examiner = Examiner(pool.projection, log.of_dispatch)
    selector = pool.selector(KvAware())
    pool.say(worker, RequestStarted("of another router", 16, 0, 1))
    for number in range(12):
        isl = 160 + 16 * number
        path = list(range(number * 100, number * 100 + isl // 16))
        request = RoutingRequest(f"r-{number}", "m", isl, 16, isl // 16)
        decision = decided(selector.select(WorkerWanted(request, path, 0.0, number * 1000)))
        selector.book(decision, path, 0.0)
        log.add(decision)
        started = RequestStarted(f"r-{number}", isl, 0, isl // 16, cached_later=True)
        if not is_late:
            pool.say(worker, started)
        examiner.gateway_reported(decision, path, 0, isl + 4)
        if is_late:
            pool.say(worker, started)
        pool.say(worker, RequestFinished(f"r-{number}", "stop", 0))

    verdict = examiner.verdict(worker)

    assert verdict.cause is Cause.TEMPLATE
    assert verdict.requests == 12


DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_lists_every_verdict_with_its_meaning_and_what_to_change() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    page = text.partition("\n### Verdicts\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| ([a-z-]+) \| (.+) \| (.*) \|$", page, flags=re.M)

    assert rows == [(cause.value, cause.meaning, cause.fix) for cause in Cause]


def test_every_verdict_is_caused_in_the_proof_or_has_a_reason_why_not() -> None:
    caused = {fault.cause for fault in FAULTS} | {cause for cause, _, _ in OF_TEXT} | {Cause.COLD, Cause.FOREIGN}

    assert caused | NOT_CAUSED.keys() == set(Cause)
    assert not caused & NOT_CAUSED.keys()
