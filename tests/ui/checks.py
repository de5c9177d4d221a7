"""What must hold of the page in a browser, whatever pool is behind it."""

from __future__ import annotations

import contextlib

from poolgrid import __version__
from tests.ui.browser import Browser

LIVE = "return document.getElementById('link').dataset.state === 'live'"

OVERFLOW = """
const wide = [];
const clipped = (each) => {
  for (let at = each.parentElement; at; at = at.parentElement)
    if (getComputedStyle(at).overflowX !== 'visible' && at !== document.body && at !== document.documentElement)
      return at.getBoundingClientRect().right <= document.documentElement.clientWidth + 1;
  return false;
};
for (const each of document.querySelectorAll('main *, header *')) {
  const box = each.getBoundingClientRect();
  if (box.width && box.right > document.documentElement.clientWidth + 1 && !clipped(each))
    wide.push(each.tagName + '.' + each.className + ' ' + Math.round(box.right));
}
return { page: document.documentElement.scrollWidth - document.documentElement.clientWidth, wide: wide.slice(0, 5) };
"""

UNNAMED = """
const unnamed = [];
for (const each of document.querySelectorAll('button, a[href], input, select, [tabindex="0"], [role=grid]')) {
  const name = each.getAttribute('aria-label') || each.textContent.trim() || each.getAttribute('title')
    || each.labels?.[0]?.textContent;
  if (!name && each.offsetParent !== null) unnamed.push(each.outerHTML.slice(0, 120));
}
return unnamed;
"""

TAB = "\ue004"
ENTER = "\ue007"
ESCAPE = "\ue00c"
RIGHT, DOWN, LEFT, END, HOME = "\ue014", "\ue015", "\ue012", "\ue010", "\ue011"


def open_live(browser: Browser, url: str) -> None:
    """Open the page of a router and wait until it is live."""
    browser.open(f"{url}/ui")
    browser.wait("the page is live", LIVE)


def no_complaints(browser: Browser) -> None:
    """Nothing was said on the console that is an error."""
    complaints = browser.complaints()
    assert not complaints, complaints


def fits_a_phone(browser: Browser) -> None:
    """Nothing is wider than a phone of 390 points, and nothing has to be scrolled sideways."""
    browser.size(390, 844, mobile=True)
    browser.wait("the page has a phone's width", "return document.documentElement.clientWidth === 390")
    browser.run("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    # What draws itself again for another width does so in its own time.
    fits = f"const found = (() => {{{OVERFLOW}}})(); return found.page <= 0 && !found.wide.length"
    with contextlib.suppress(AssertionError):
        browser.wait("nothing is too wide", fits)
    found = browser.run(OVERFLOW)
    assert found["page"] <= 0, found
    assert not found["wide"], found


def everything_has_a_name(browser: Browser) -> None:
    """Whatever takes the focus says what it is."""
    unnamed = browser.run(UNNAMED)
    assert not unnamed, unnamed


def stops_of_tab(browser: Browser, limit: int = 40) -> list[str]:
    """Return what the focus goes through from the beginning of the page, up to the first stop that comes again."""
    # The order begins at the top of the page again.
    browser.run("document.querySelector('.skip').focus(); document.activeElement.blur(); scrollTo(0, 0)")
    stops: list[str] = []
    for _ in range(limit):
        browser.press(TAB)
        at = browser.focus()
        if at in stops or at.startswith("body"):
            break
        stops.append(at)
    return stops


def worker_grid_works_by_keyboard(browser: Browser) -> None:
    """Arrows go from worker to worker, Enter opens one, Escape closes it and gives the focus back."""
    browser.run("document.querySelector('.grid[aria-label=Workers]').focus()")
    first = browser.run("return document.getElementById('worker-cell').textContent")
    browser.press(RIGHT)
    name = "return document.getElementById('worker-cell').textContent.split(',')[0]"
    browser.wait("the next worker is marked", f"{name} !== arguments[0]", first.split(",")[0])
    browser.press(ENTER)
    browser.wait("the worker's sheet is open", "return document.getElementById('sheet').open")
    browser.press(ESCAPE)
    browser.wait("the sheet is closed", "return !document.getElementById('sheet').open")
    browser.wait(
        "the focus is where it was", "return document.activeElement.getAttribute('aria-label')?.includes('Workers')"
    )


def request_opens_by_keyboard(browser: Browser, downwards: int = 1) -> None:
    """Enter on a row opens the request: its decision, its candidates, its legs as a timeline."""
    row = "document.querySelector('.requests .row[tabindex=\"0\"]:not([hidden])')"
    browser.wait("there are requests", f"return !!{row}")
    browser.run(f"{row}.focus()")
    browser.press(*[DOWN] * downwards, ENTER)
    browser.wait("its decision is shown", "return !!document.querySelector('#sheet .tree details')")
    browser.wait("its legs are shown", "return !!document.querySelector('#sheet svg.timeline rect')")
    browser.press(ESCAPE)
    browser.wait("the sheet is closed", "return !document.getElementById('sheet').open")


def seconds_are_read_by_keyboard(browser: Browser) -> None:
    """Arrows on the strip go from second to second and read each."""
    browser.run("document.querySelector('#strip canvas').focus()")
    at = "return document.querySelector('#strip canvas').getAttribute('aria-valuetext')"
    browser.press(END)
    last = str(browser.run(at))
    assert " request" in last, last
    browser.press(LEFT, LEFT)
    browser.wait("an earlier second is read", f"{at} !== arguments[0]", last)


def open_requests(browser: Browser, what: str, holds: str) -> str:
    """Open requests of the list until a script returns words of one that is loaded; return them, and leave it open."""
    loaded = "return !!document.querySelector('#sheet .tree, #sheet .note.bad')"
    for _ in range(4):
        for number in range(24):
            row = f"document.querySelectorAll('.requests .row:not(.head):not([hidden])')[{number}]"
            browser.run(f"{row}?.click()")
            browser.wait("its decision is shown", loaded)
            if words := browser.run(holds):
                return str(words)
            browser.press(ESCAPE)
            browser.wait("the sheet is closed", "return !document.getElementById('sheet').open")
    raise AssertionError(f"no request {what}")


def request_that_was_queued(browser: Browser) -> str:
    """Open a request that has waited for a worker with room; return what its timeline says of that."""
    return open_requests(
        browser,
        "was queued",
        "const words = document.querySelector('#sheet svg.timeline')?.getAttribute('aria-label') ?? '';"
        " return words.includes('queued in the router') ? words : ''",
    )


def request_that_spilled(browser: Browser) -> str:
    """Open a request that another pool took than that of its cell, because that one misses its target."""
    rows = "[...document.querySelectorAll('.requests .row[tabindex]:not([hidden])')]"
    row = f"{rows}.filter((row) => row.textContent.includes(', spill') && !row.textContent.includes('flight'))"
    browser.wait("a request spills", f"const [row] = {row}.slice(-1); row?.click(); return !!row", timeout_s=300)
    browser.wait("the pool's own decision is shown", "return !!document.querySelector('#sheet .tree table')")
    words = str(browser.run("return document.querySelector('#sheet .tree details > summary').textContent"))
    assert " by spill" in words, words
    return words


def request_that_moved(browser: Browser, worker: str) -> str:
    """Open a request that ran on a worker that was killed and continued on another one."""
    open_worker(browser, worker)
    count = browser.wait("its last requests", "return document.querySelectorAll('#sheet li > a').length")
    for number in range(count):
        browser.run("document.querySelectorAll('#sheet li > a')[arguments[0]].click()", number)
        browser.wait("its legs are shown", "return !!document.querySelector('#sheet .tree details')")
        legs = browser.run("return document.querySelector('#sheet svg.timeline')?.getAttribute('aria-label') ?? ''")
        if len(str(legs).split("; ")) > 1:
            return str(legs)
        browser.press(ESCAPE)
        open_worker(browser, worker)
    raise AssertionError(f"no request of {worker} continued on another worker")


def open_worker(browser: Browser, worker: str) -> None:
    """Open a worker by keyboard."""
    browser.run("document.querySelector('.grid[aria-label=Workers]').focus()")
    browser.press(HOME)
    for _ in range(64):
        if str(browser.run("return document.getElementById('worker-cell').textContent")).startswith(f"{worker},"):
            browser.press(ENTER)
            browser.wait("the worker's sheet is open", "return document.getElementById('sheet').open")
            return
        browser.press(RIGHT)
    raise AssertionError(f"{worker} is not in the grid")


def worker_has_state(browser: Browser, worker: str, state: str) -> None:
    """The grid says of a worker that it drains, or is unreachable."""
    browser.run("document.querySelector('.grid[aria-label=Workers]').focus()")
    words = "document.getElementById('worker-cell').textContent"
    for attempt in range(100):
        browser.press(HOME if attempt % 8 == 0 else RIGHT)
        if browser.run(f"return {words}.startsWith(arguments[0])", f"{worker}, {state}"):
            browser.run("document.activeElement.blur()")
            return
    raise AssertionError(f"{worker} never is {state}")


FIGURE = """
const tile = [...document.querySelectorAll('.tile')]
  .find((each) => each.firstChild.textContent.startsWith(arguments[0]));
return Number(tile.querySelector('dd').firstChild.data.replaceAll(',', ''));
"""


def heading_is_complete(browser: Browser, model: str, url: str) -> None:
    """The heading has the model, the address and the version."""
    words = browser.wait("the model in the heading", "return document.getElementById('name').textContent")
    for part in (model, url.partition("://")[2], f"version {__version__}"):
        assert part in str(words), (part, words)


BAR_OVERLAPS = """
return [...document.querySelectorAll('.share')].filter((share) => share.offsetParent && share.querySelector('span'))
  .filter((share) => {
    const words = document.createRange();
    words.selectNodeContents(share.querySelector('span'));
    return share.querySelector('b').getBoundingClientRect().right > words.getBoundingClientRect().left;
  }).map((share) => share.textContent);
"""


def figures_stand_beside_bars(browser: Browser) -> None:
    """No bar reaches into the figure that belongs to it."""
    with contextlib.suppress(AssertionError):
        browser.wait("every bar ends before its figure", f"return !(() => {{{BAR_OVERLAPS}}})().length")
    overlaps = browser.run(BAR_OVERLAPS)
    assert not overlaps, overlaps


MOVES = """
const tile = [...document.querySelectorAll('#served .tile')]
  .find((each) => each.firstChild.textContent.startsWith('moves'));
return Number.parseInt(tile.querySelector('p').textContent);
"""
"""Of five minutes: the figure above it covers ten seconds, which a busy machine takes to look."""


def time_passes(browser: Browser, seconds: float) -> None:
    """Let a pool run for so long."""
    from_ms = browser.run("return performance.now()")
    passed = "return performance.now() > arguments[0]"
    browser.wait("time passes", passed, from_ms + 1000 * seconds, timeout_s=seconds + 60)


def requests_moved(browser: Browser) -> None:
    """Requests of a killed worker are counted as moves, and none as an error."""
    browser.wait("moves", MOVES)
    assert browser.run(FIGURE, "errors") == 0


def requests_wait(browser: Browser) -> None:
    """The queue has requests that wait for a worker with room."""
    browser.wait("a queue", FIGURE, "queue")


QUANTILES = """
return import('/ui/served.js').then(({ quantile }) => arguments[0].map(([counts, share]) => {
  const found = quantile(counts, [0.1, 0.2, 0.4, Infinity], share);
  return Number.isNaN(found) ? null : found;
}));
"""


def percentiles_are_right(browser: Browser) -> None:
    """A percentile lies within the bucket that has it, above the last bound at that bound; of nothing there is none."""
    table = [
        ([0, 0, 0, 0], 0.5, None),
        ([4, 0, 0, 0], 0.5, 0.05),
        ([0, 10, 0, 0], 0.5, 0.15),
        ([1, 0, 1, 0], 0.99, 0.396),
        ([0, 0, 0, 3], 0.5, 0.4),
        ([99, 0, 0, 1], 0.99, 0.1),
        ([98, 0, 0, 2], 0.99, 0.4),
    ]
    found = browser.run(QUANTILES, [[counts, share] for counts, share, _ in table])
    for (counts, share, wanted), value in zip(table, found, strict=True):
        same = value is None if wanted is None else value is not None and abs(value - wanted) < 1e-9
        assert same, (counts, share, value, wanted)


SERVICE = """
return import('/ui/served.js').then(({ serviceByWorker }) => {
  const requests = arguments[0].map(([worker, time_ms, ttft, isl]) => (
    { worker, time_ms, prefilled_ms: ttft && time_ms + ttft, isl }));
  return [...serviceByWorker(requests, 100000)]
    .map(([worker, of]) => [worker, of.p50, of.p99, of.requests, of.tokens]);
});
"""


def service_of_workers_is_right(browser: Browser) -> None:
    """A worker's figures are of its requests of the last minute, from the choice to the first token."""
    requests = [("a", 30_000, 900, 10), ("a", 50_000, 30, 100), ("a", 60_000, 50, 300), ("b", 99_000, None, 600)]
    found = browser.run(SERVICE, requests)
    assert found == [["a", 30, 50, 2 / 60, 400 / 60], ["b", None, None, 1 / 60, 10]], found


def worker_shows_its_service(browser: Browser) -> None:
    """The cell of a worker that has requests says its latency and throughput, and so does its open part."""
    browser.run("scrollTo(0, 0); document.querySelector('.grid').focus()")
    cell = "return /TTFT [\\d.]+ m?s, [\\d.]+ .s/.test(document.getElementById('worker-cell').textContent)"
    for key in (HOME, RIGHT) * 20:  # one of the two has them within a second
        browser.press(key)
        with contextlib.suppress(AssertionError):
            browser.wait("TTFT and throughput in a cell", cell, timeout_s=0.5)
            break
    browser.press(ENTER)
    browser.wait(
        "TTFT and throughput of a worker",
        "const said = document.getElementById('sheet').textContent;"
        "return /TTFT from the choice, last minutep50 [\\d.]+ m?s/.test(said)"
        " && /last minute[\\d.]+ requests.s/.test(said)",
        timeout_s=30,
    )
    browser.press(ESCAPE)
    browser.run("document.querySelector('.grid').focus()")
    browser.press(HOME)


def trouble(browser: Browser) -> str:
    """Return the words of the alarm; empty when there is none."""
    said = browser.run("const it = document.getElementById('trouble'); return it.hidden ? '' : it.textContent")
    return str(said)


def service_is_shown(browser: Browser) -> None:
    """Latencies and tokens have figures of the last ten seconds, and a strip over five minutes that is drawn."""
    for name in ("TTFT p50, last 10 s", "output tokens, last 10 s"):
        browser.wait(
            f"a figure of {name}",
            "const tile = [...document.querySelectorAll('#served .tile')]"
            ".find((each) => each.firstChild.textContent === arguments[0]);"
            "return /[1-9]/.test(tile.querySelector('dd').firstChild.data)",
            name,
        )
    strips = {"ttft": "p99 at most", "itl": "p99 at most", "tokens": "at most", "errors": "at most 0"}
    for strip, words in strips.items():
        browser.wait(
            f"the strip of {strip}",
            "return document.querySelector(`canvas[data-strip=${arguments[0]}]`)"
            ".getAttribute('aria-label').includes(arguments[1])",
            strip,
            words,
        )


def time_before_the_router_is_not_known(browser: Browser) -> None:
    """The strip says of the time before the router began that it is not known, and not that nothing came."""
    browser.run("document.querySelector('#strip canvas').focus()")
    browser.press(HOME)
    said = "document.querySelector('#strip canvas').getAttribute('aria-valuetext')"
    browser.wait("the beginning of the strip", f"return {said}.includes('not known')")
    browser.press(END)
    browser.wait("its end", f"return !{said}.includes('not known')")
