"""The fleet page in Chromium, over real pools and over one that is larger than this machine.

    python -m tests.ui                all parts
    python -m tests.ui pool large     some
    python -m tests.ui --pictures     and write the pictures of the documentation, docs/images/fleet_page*

The exit status is 0 when all holds, 1 when something does not, 2 when there is no browser to try it with.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from PIL import Image

from poolgrid.server.frontend.access import key_file
from poolgrid.server.frontend.access.key_file import Key, KeyDocument, Tenant
from tests.e2e import processes
from tests.e2e.processes import Process, running_pool
from tests.ui import checks
from tests.ui.browser import Browser, missing
from tests.ui.busy import (
    DRAINED,
    FLEET_TALKERS,
    FRAME_S,
    KILLED,
    RECORDED_BEFORE_S,
    RECORDED_S,
    Recording,
    busy_pool,
    spilling_document,
)
from tests.ui.busy import (
    WORKERS as BUSY_WORKERS,
)

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
FLEET = ROOT / "pool_configs" / "aggregated_four_classes.json"

READY_TIMEOUT_S = 300.0
"""A fleet of four pools starts slowly on a machine that has other work to do."""

FULL_STRIP_S = 300.0
"""How long a pool runs before its picture: the strip of times covers five minutes."""

PHONE_HEIGHT = 1500

WORKERS, RATE = 500, 60
MEASURED_S = 30
FRAME_P50_MS, FRAME_P99_MS = 20.0, 50.0
"""What is called without stutter: at 60 frames a second hardly ever more than two of them missed."""

PAGE_CPU_MAX = 0.4
"""Part of a core that the page's process may take, however busy the machine is."""

MAIN_THREAD_MAX = 0.2
"""Part of a core for the page's main thread, by its own clock: 60 frames and four changes a second take half of that,
and a change then fits between two frames."""

QUIET_LOAD = 1.5
"""Load per core above which a frame is late because somebody else has the core."""

KEY = "pg-of-the-operator"

SO_FAR = """
const said = document.querySelector('.requests')?.closest('section').querySelector('.count').textContent ?? '';
return Number((said.match(/^[\\d,]+/) ?? ['0'])[0].replaceAll(',', '')) >= arguments[0];
"""
"""Whether so many requests have come, by the page's own count."""


class Pictures:
    """Where pictures go; nowhere unless they are wanted."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted

    def take(self, browser: Browser, name: str, part: str = "") -> None:
        """Write what is to be seen, or a part of it."""
        if not self.wanted:
            return
        if not part:
            browser.run("document.activeElement.blur(); scrollTo(0, 0)")
        settled(browser)
        # A page has few colours: a third of the bytes, and nobody sees the difference.
        with Image.open(io.BytesIO(browser.screenshot(part))) as picture:
            smaller = picture.convert("RGB").quantize(
                256, Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE
            )
        smaller.save(IMAGES / f"{name}.png", optimize=True)


@contextmanager
def talking(url: str, count: int, *more: str) -> Iterator[None]:
    """Have conversations while the block runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ui.talkers", url, str(count), *more], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def enough_requests(browser: Browser, count: int) -> None:
    browser.wait(f"{count} requests", SO_FAR, count, timeout_s=300)


def settled(browser: Browser) -> None:
    """Let what is asked for be drawn."""
    browser.run("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def pool(pictures: Pictures) -> str:
    """A pool of four real workers: live, by keyboard and on a phone."""
    with running_pool("--port", "0", workers=4, speedup=4.0) as up, talking(up.url, 12), Browser() as browser:
        checks.open_live(browser, up.url)
        enough_requests(browser, 120)
        checks.everything_has_a_name(browser)
        stops = checks.stops_of_tab(browser)
        for wanted in ("slider", "grid Workers", "row"):
            assert any(wanted in stop for stop in stops), f"Tab never comes to {wanted}: {stops}"
        checks.worker_grid_works_by_keyboard(browser)
        checks.request_opens_by_keyboard(browser)
        browser.run("scrollTo(0, 0); document.querySelectorAll('.requests .row:not(.head)')[6].click()")
        browser.wait("its legs are shown", "return !!document.querySelector('#sheet svg.timeline rect')")
        browser.press(checks.ESCAPE)
        checks.seconds_are_read_by_keyboard(browser)
        checks.fits_a_phone(browser)
        checks.no_complaints(browser)
    return f"{len(stops)} stops of Tab"


def reconnect(pictures: Pictures) -> str:
    """The router is killed and started again: the page says so, and comes back by itself."""
    with running_pool("--port", "0", workers=2, speedup=20.0) as up, Browser() as browser:
        checks.open_live(browser, up.url)
        up.child("router").kill()
        browser.wait("the loss is shown", "return document.getElementById('link').dataset.state === 'lost'")
        browser.wait("it is live again", checks.LIVE, timeout_s=120)
        checks.time_before_the_router_is_not_known(browser)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello " * 100}], "max_tokens": 8}
        assert httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=60).is_success
        browser.wait(
            "the request is shown", "return !!document.querySelector('.requests .row[tabindex=\"0\"]:not([hidden])')"
        )
        said = [each for each in browser.complaints() if "net::ERR" not in each]
        assert not said, said
    return "lost, and live again"


def several(pictures: Pictures) -> str:
    """One of two HTTP processes before a worker with room for one: the page shows who was queued there."""
    group = ("router", "--port", "0", "--http-workers", "2", "--worker-queue-factor", "1")
    small = ("--max-batch-size", "1", "--vocabulary-size", "4096", "--speedup", "4")
    with Process(*group) as router:
        ingest = router.wait_ready().word("ingest")
        admin = router.word("admin").partition(",")[0]
        with (
            Process(
                "worker", "--worker-id", "w", "--served-model-name", "tiny", "--consolidator", ingest, *small
            ).wait_ready(),
            talking(admin, 8),
            Browser() as browser,
        ):
            checks.open_live(browser, admin)
            enough_requests(browser, 60)
            foot = "return document.getElementById('foot').textContent"
            assert "process 1 of 2" in browser.run(foot)
            queued = checks.request_that_was_queued(browser)
            browser.press(checks.ESCAPE)
            checks.no_complaints(browser)
    return queued


def keys(pictures: Pictures) -> str:
    """With API keys: the page asks for one, a wrong one is told why, a good one opens it and is in no address."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "keys.json"
        tenant = Tenant(keys=(Key(key_file.hash_key(KEY)),), operator=True)
        key_file.write(path, KeyDocument(1, "5" * 64, {"ops": tenant}))
        with Process("router", "--port", "0", "--api-keys", str(path)).wait_ready() as router, Browser() as browser:
            browser.open(f"{router.url}/ui")
            shown = "return document.getElementById('key').open"
            browser.wait("it asks for a key", shown)
            browser.press("pg-wrong", checks.ENTER)
            fault = "return document.getElementById('key-fault').textContent"
            assert "key" in browser.wait("a wrong key is told", fault)
            browser.press(KEY, checks.ENTER)
            browser.wait("it is live", checks.LIVE)
            addresses = browser.run("return performance.getEntriesByType('resource').map((each) => each.name)")
            assert addresses
            assert not any("pg-" in each for each in [*addresses, browser.driver.current_url])
            assert not browser.driver.get_cookies()
            said = [each for each in browser.complaints() if "401" not in each]
            assert not said, said
    return "no key in any of its addresses"


def busy(pictures: Pictures) -> str:
    """A pool at 70 % load: one worker drains, one is killed, requests queue, and no stream breaks."""
    with busy_pool() as pool, Browser(1600, 900) as browser:
        checks.open_live(browser, pool.url)
        enough_requests(browser, 100)
        if pictures.wanted:
            checks.time_passes(browser, FULL_STRIP_S)
        pool.drain(DRAINED)
        recording = Recording(browser)
        before_s = RECORDED_BEFORE_S if pictures.wanted else FRAME_S
        recording.run(before_s, f"{BUSY_WORKERS} workers under load; {DRAINED} drains")
        pool.kill(KILLED)
        checks.worker_has_state(browser, KILLED, "unreachable")
        recording.run(1.0 if pictures.wanted else FRAME_S, f"kill -9 {KILLED}")
        checks.worker_has_state(browser, DRAINED, "draining")
        checks.requests_moved(browser)
        after = f"kill -9 {KILLED}: its streams continue on other workers"
        if pictures.wanted:
            recording.run(RECORDED_S, after)
        checks.requests_wait(browser)
        checks.heading_is_complete(browser, "tiny", pool.url)
        checks.figures_stand_beside_bars(browser)
        pictures.take(browser, "fleet_page")
        browser.scheme("dark")
        pictures.take(browser, "fleet_page_dark")
        browser.scheme("light")
        if pictures.wanted:
            recording.run(RECORDED_S, after)
        checks.fits_a_phone(browser)
        browser.size(390, PHONE_HEIGHT, mobile=True)
        pictures.take(browser, "fleet_page_phone")
        browser.size(1600, 900)
        moved = checks.request_that_moved(browser, KILLED)
        pictures.take(browser, "fleet_page_request", "#sheet")
        browser.press(checks.ESCAPE)
        checks.request_that_was_queued(browser)
        pictures.take(browser, "fleet_page_queued", "#sheet")
        browser.press(checks.ESCAPE)
        checks.no_complaints(browser)
        if pictures.wanted:
            recording.write(IMAGES / "fleet_page_kill.webp")
        broken = pool.broken()
        assert not broken, broken
    return moved


def fleet(pictures: Pictures) -> str:
    """A global router over four pools, one of them too slow: cells, pools, and a spill with its pool's decision."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        document = spilling_document(directory / "grid.json", FLEET)
        up = stack.enter_context(Process("up", "--pools", str(document), "--port", "0"))
        up.wait_ready()
        with talking(up.url, FLEET_TALKERS, "busy-targets"), Browser(1600, 900) as browser:
            checks.open_live(browser, up.url)
            enough_requests(browser, 100)
            spilled = checks.request_that_spilled(browser)
            if pictures.wanted:
                checks.time_passes(browser, FULL_STRIP_S)
            checks.request_that_spilled(browser)
            pictures.take(browser, "fleet_page_global_request", "#sheet")
            browser.press(checks.ESCAPE)
            pictures.take(browser, "fleet_page_global")
            checks.heading_is_complete(browser, "tiny", up.url)
            checks.figures_stand_beside_bars(browser)
            checks.everything_has_a_name(browser)
            browser.run("document.querySelector('.grid').focus()")
            browser.press(checks.RIGHT, checks.DOWN, checks.ENTER)
            browser.wait("the cell is open", "return document.getElementById('sheet').open")
            browser.press(checks.ESCAPE)
            checks.request_opens_by_keyboard(browser, 20)  # the newest have no pool yet
            checks.fits_a_phone(browser)
            checks.no_complaints(browser)
        assert up.stop()[0] == 0
    return spilled


def large(pictures: Pictures) -> str:
    """500 workers at 60 requests a second: the time between frames."""
    command = [sys.executable, "-m", "tests.ui.large_pool", str(WORKERS), str(RATE)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[1]
        with Browser() as browser:
            checks.open_live(browser, url)
            enough_requests(browser, 5 * RATE)
            browser.record_frames()
            cpu_s, before = browser.cpu_s(), browser.main_thread_s()
            # The page is asked nothing meanwhile: each question would be work between two frames.
            browser.run("return new Promise((done) => setTimeout(done, arguments[0]))", 1000 * MEASURED_S)
            gaps, tasks = browser.frame_gaps_ms(), browser.long_tasks_ms()
            measured_s = sum(gaps) / 1000
            share = (browser.cpu_s() - cpu_s) / measured_s
            after = browser.main_thread_s()
            main_thread = {name: (value - before[name]) / measured_s for name, value in after.items()}
            gaps.sort()
            browser.size(1600, 1300)
            pictures.take(browser, "fleet_page_large", "#main-column .panel")
            checks.worker_grid_works_by_keyboard(browser)
            checks.no_complaints(browser)
    finally:
        process.kill()
        process.wait()
    p50, p99 = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]
    figures = (
        f"{len(gaps)} frames: p50 {p50:.1f} ms, p99 {p99:.1f} ms, longest {gaps[-1]:.0f} ms; {len(tasks)} tasks of "
        f"more than 50 ms ({sum(tasks):.0f} ms in all); the page's process takes {100 * share:.0f} % of a core, its "
        f"main thread {1000 * main_thread['all']:.0f} ms a second (script {1000 * main_thread['script']:.0f}, style "
        f"{1000 * main_thread['style']:.0f}, layout {1000 * main_thread['layout']:.0f}); load "
        f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    )
    if share > PAGE_CPU_MAX:
        raise AssertionError(f"{figures}; allowed is {100 * PAGE_CPU_MAX:.0f} % of a core")
    if main_thread["all"] > MAIN_THREAD_MAX:
        raise AssertionError(f"{figures}; allowed are {1000 * MAIN_THREAD_MAX:.0f} ms a second for the main thread")
    if os.getloadavg()[0] > QUIET_LOAD * (os.cpu_count() or 1):
        return f"{figures}: too many others wait for a core, so the times between frames are not judged"
    if p50 > FRAME_P50_MS or p99 > FRAME_P99_MS:
        raise AssertionError(f"{figures}; allowed are p50 {FRAME_P50_MS:.0f} ms and p99 {FRAME_P99_MS:.0f} ms")
    return figures


PARTS: dict[str, Callable[[Pictures], str]] = {
    each.__name__: each for each in (pool, busy, reconnect, several, keys, fleet, large)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the parts that are asked for."""
    parser = argparse.ArgumentParser("python -m tests.ui", description="The fleet page in Chromium.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all by default")
    parser.add_argument("--pictures", action="store_true", help="write docs/images/fleet_page*")
    asked = parser.parse_args(arguments)
    unknown = [name for name in asked.parts if name not in PARTS]
    if unknown or missing():
        sys.stderr.write(f"no part {', '.join(unknown)}\n" if unknown else f"nothing was tried: {missing()}\n")
        return 2
    processes.READY_TIMEOUT_S = READY_TIMEOUT_S
    pictures = Pictures(asked.pictures)
    failed = 0
    for name in asked.parts or PARTS:
        try:
            sys.stdout.write(f"{name}: {PARTS[name](pictures)}\n")
        except AssertionError as error:
            failed += 1
            sys.stdout.write(f"{name} FAILED: {error}\n")
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
