"""What the log says of traffic: a line a request on demand, a line every ten seconds, nothing of what anybody wrote."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

import pytest

from poolgrid.server.frontend.traffic import (
    EndedRequest,
    TokenTotals,
    Totals,
    Traffic,
    report_line,
    report_traffic,
    request_line,
)
from tests.clock import HandClock
from tests.frontend.fake_backend import FakeBackend
from tests.frontend.server import application, in_process

LOGGER = "poolgrid.server.frontend.traffic"
SECRET = "nobody may read this"


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    """Put the level back that an access log sets."""
    logger = logging.getLogger(LOGGER)
    before = logger.level
    yield
    logger.setLevel(before)


def ended(**fields: object) -> EndedRequest:
    given = EndedRequest(
        name="mine", endpoint="completions", status=200, error="", streaming=False, model="tiny", tenant="",
        account=TokenTotals(160, 128, 7), ttft_ms=12.4, duration_ms=80.6, workers="w-1",
    )  # fmt: skip
    return given._replace(**fields)  # type: ignore[arg-type]


def test_the_line_of_a_request_names_counts_and_times() -> None:
    assert request_line(ended(streaming=True, tenant="acme")) == (
        "request mine completions 200 stream model=tiny tenant=acme isl=160 cached=128 osl=7 ttft_ms=12 total_ms=81 "
        "worker=w-1"
    )
    refused = request_line(ended(status=404, error="model_not_found", model="x osl=9", ttft_ms=None, workers=""))
    assert refused.startswith("request mine completions 404 error=model_not_found model='x osl=9' isl=160 ")


def test_the_line_about_all_is_of_the_interval_alone_and_silence_has_none() -> None:
    before = Totals(10, 0, TokenTotals(1000, 500, 100))
    now = Totals(22, 4, TokenTotals(1000 + 30_720, 500 + 15_360, 100 + 768))

    assert report_line(before, now, 1, 10.0) == (
        "last 10 s: 12 requests, 30,720 prompt tokens (3,072/s, 50.0% cached), 768 output tokens (77/s); "
        "now 4 running, of which 1 waiting"
    )
    assert report_line(now, now._replace(running=0), 0, 10.0) is None
    assert "1 request, 0 prompt tokens (0/s, none cached)" in (report_line(now, now._replace(ended=23), 0, 10.0) or "")


def serve(caplog: pytest.LogCaptureFixture, access_log: bool) -> list[str]:
    """Return what the log says while four requests are served, one of them refused."""

    async def go() -> None:
        app = application(FakeBackend(), access_log=access_log)
        async with in_process(app) as client:
            for fields in ({}, {"stream": True}, {"n": 2}, {"model": "other"}):
                body = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], **fields}
                await client.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"})

    with caplog.at_level(logging.WARNING):
        caplog.handler.setLevel(logging.NOTSET)  # the logger's own level decides
        asyncio.run(go())
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def test_on_demand_each_request_is_a_line_whatever_the_log_level(caplog: pytest.LogCaptureFixture) -> None:
    lines = serve(caplog, access_log=True)

    assert [line.split(" isl=")[0].removesuffix(" model=tiny") for line in lines] == [
        "request mine chat_completions 200",
        "request mine chat_completions 200 stream",
        "request mine chat_completions 200",
        "request mine chat_completions 404 error=model_not_found",
    ]
    for line in lines[:3]:
        assert " ttft_ms=" in line
        assert " worker=" in line
        assert not line.split(" osl=")[1].startswith("0 ")
    assert SECRET not in caplog.text


def test_requests_under_way_count_and_an_idle_front_end_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    traffic = Traffic(False, lambda: over)
    got, over = TokenTotals(100, 0, 0), TokenTotals()

    class Running:
        def account(self) -> TokenTotals:
            return got

        def line(self) -> EndedRequest:
            return ended()

    one = Running()

    looks: asyncio.Queue[None] = asyncio.Queue()

    def waiting() -> int:
        looks.put_nowait(None)
        return 0

    async def go() -> None:
        nonlocal got, over
        report = asyncio.ensure_future(report_traffic(traffic, waiting, HandClock(), 0.01))
        await looks.get()
        await looks.get()
        assert caplog.records == []
        traffic.running.add(one)
        got = TokenTotals(100, 64, 9)
        await looks.get()
        await looks.get()  # what was looked at before is said by now
        assert traffic.totals() == Totals(0, 1, got)
        traffic.end(one)
        over = got
        report.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await report

    with caplog.at_level(logging.INFO, LOGGER):
        asyncio.run(go())
    assert "100 prompt tokens" in caplog.text
    assert "64.0% cached" in caplog.text
    assert "9 output tokens" in caplog.text
    assert traffic.totals() == Totals(1, 0, got)
