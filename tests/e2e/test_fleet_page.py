"""The fleet page over a real pool in a real browser. ``make ui`` does more: large pools, frame times, screenshots."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import PATIENT, Process, eventually
from tests.ui.browser import Browser, missing
from tests.ui.checks import (
    everything_has_a_name,
    figures_stand_beside_bars,
    fits_a_phone,
    heading_is_complete,
    no_complaints,
    open_live,
    percentiles_are_right,
    request_opens_by_keyboard,
    service_is_shown,
    service_of_workers_is_right,
    time_before_the_router_is_not_known,
    trouble,
    worker_grid_works_by_keyboard,
    worker_shows_its_service,
)

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(missing()), reason=missing() or "all is here")]


@contextlib.contextmanager
def repeated(work: Callable[[], None]) -> Iterator[None]:
    """Do something again and again while this context lasts; its failure is the context's."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.is_set():
            work()
            is_over.wait(0.5)

    with ThreadPoolExecutor(1) as executor:
        repeating = executor.submit(repeat)
        try:
            yield
        finally:
            is_over.set()
        repeating.result()


LOGGED = "ERROR routing on a state that is no longer current: "


def without_figures(words: str) -> str:
    return re.sub(r"\d+", "N", words)


def test_the_page_shows_a_pool_live_and_works_by_keyboard_and_on_a_phone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Process("up", "--port", "0", "--workers", "2", "--speedup", "50", *PATIENT, log=log) as up:
        up.wait_ready()
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello " * 100}], "max_tokens": 8}

        def ask() -> None:
            assert httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=60).status_code == 200

        for _ in range(3):
            ask()
        with Browser() as browser:
            open_live(browser, up.url)
            browser.wait("both workers", "return document.querySelector('#tiles dd').textContent.startsWith('2 of 2')")
            with repeated(ask):  # its figures are of the last 10 s
                service_is_shown(browser)
                worker_shows_its_service(browser)
            percentiles_are_right(browser)
            service_of_workers_is_right(browser)
            time_before_the_router_is_not_known(browser)
            heading_is_complete(browser, "tiny", up.url)
            figures_stand_beside_bars(browser)
            everything_has_a_name(browser)
            worker_grid_works_by_keyboard(browser)
            request_opens_by_keyboard(browser)
            fits_a_phone(browser)
            no_complaints(browser)
            assert trouble(browser) == ""
            consolidator = up.child("consolidator")
            consolidator.suspend()
            try:
                browser.wait("an alarm", "return !document.getElementById('trouble').hidden")
                eventually("the router logs it", lambda: LOGGED in log.read_text())
                alarm = trouble(browser)
            finally:
                consolidator.resume()
        up.stop()
    logged = log.read_text().partition(LOGGED)[2].splitlines()[0]
    assert without_figures(alarm) == without_figures(logged), "the page says what the log says"
