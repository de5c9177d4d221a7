"""Chromium without a screen, driven by Selenium; nothing that it does leaves this machine."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import shutil
import tempfile
from types import TracebackType
from typing import Any

import psutil

BINARIES = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)

WAIT_S = 120.0
START_ATTEMPTS = 3
"""The driver gives a browser a minute to start, in which a busy machine may not manage."""

MAIN_THREAD = {
    "TaskDuration": "all",
    "ScriptDuration": "script",
    "RecalcStyleDuration": "style",
    "LayoutDuration": "layout",
}

FRAME_RECORDER = """
window.frameGaps = [];
let before = performance.now();
const tick = (now) => { window.frameGaps.push(now - before); before = now; requestAnimationFrame(tick); };
requestAnimationFrame((now) => { before = now; requestAnimationFrame(tick); });
"""

LONG_TASKS = """
window.longTasks = [];
new PerformanceObserver((list) => { for (const each of list.getEntries()) window.longTasks.push(each.duration); })
  .observe({ type: "longtask" });
"""


def missing() -> str:
    """Return what is not here to run a browser with; empty when all is."""
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed (pip install -e '.[dev]')"
    if not _binary():
        return "there is no Chromium (apt-get install chromium)"
    if shutil.which(DRIVER) is None:
        return "there is no chromedriver (apt-get install chromium-driver)"
    return ""


def _binary() -> str:
    return next((found for name in BINARIES if (found := shutil.which(name))), "")


class Browser:
    """One browser with one page."""

    def __init__(self, width: int = 1440, height: int = 1000) -> None:
        from selenium import webdriver
        from selenium.common.exceptions import WebDriverException
        from selenium.webdriver.chrome.service import Service

        self._profile = tempfile.TemporaryDirectory(prefix="poolgrid-ui-")
        options = webdriver.ChromeOptions()
        options.binary_location = _binary()
        for option in (*OPTIONS, f"--user-data-dir={self._profile.name}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        for attempt in range(START_ATTEMPTS):
            try:
                self.driver = webdriver.Chrome(options=options, service=Service(shutil.which(DRIVER)))
                break
            except WebDriverException:
                if attempt == START_ATTEMPTS - 1:
                    raise
        self.driver.set_page_load_timeout(WAIT_S)
        self.driver.set_script_timeout(WAIT_S)
        self.driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        self.size(width, height)

    def size(self, width: int, height: int, mobile: bool = False) -> None:
        """Make the page so large; a phone has more pixels to a point."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 2 if mobile else 1, "mobile": mobile},
        )

    def scheme(self, name: str) -> None:
        """Prefer ``dark`` or ``light``."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def open(self, url: str) -> None:
        """Go to an address."""
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page; it returns with ``return``."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, what: str, script: str, *arguments: Any, timeout_s: float = WAIT_S) -> Any:
        """Wait until a script returns something true, and return it; one that fails finds something not there yet."""
        from selenium.common.exceptions import JavascriptException, TimeoutException
        from selenium.webdriver.support.ui import WebDriverWait

        try:
            return WebDriverWait(self.driver, timeout_s, 0.05, [JavascriptException]).until(
                lambda driver: driver.execute_script(script, *arguments)
            )
        except TimeoutException:
            raise AssertionError(f"never came true in the page: {what}; {self.complaints()}") from None

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, wherever the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        actions = ActionChains(self.driver)
        for key in keys:
            actions.send_keys(key)
        actions.perform()

    def focus(self) -> str:
        """Return what has the focus: tag, role and name."""
        found: str = self.run(
            "const at = document.activeElement; return [at.tagName.toLowerCase(), at.id, at.getAttribute('role'),"
            " at.getAttribute('aria-label') || at.textContent.slice(0, 60)].filter(Boolean).join(' ')"
        )
        return found

    def complaints(self) -> list[str]:
        """Return what the console said that is an error, and forget it."""
        said = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [str(entry["message"]) for entry in said if entry["level"] in ("SEVERE", "ERROR")]

    def screenshot(self, part: str = "", fast: bool = False) -> bytes:
        """Return what is to be seen: the page, or the part that a CSS selector names; as PNG, or ``fast`` as JPEG."""
        asked: dict[str, Any] = {"format": "png", "captureBeyondViewport": False}
        if fast:
            asked |= {"format": "jpeg", "quality": 92, "optimizeForSpeed": True}
        if part:
            box = self.run(
                "const part = document.querySelector(arguments[0]), box = part.getBoundingClientRect();"
                "document.activeElement.blur();"
                "const ends = [...part.querySelectorAll('*')].map((each) => each.getBoundingClientRect())"
                ".filter((each) => each.height && each.height < box.height - 150).map((each) => each.bottom);"
                "return [box.x, box.y, box.width, Math.min(box.height, innerHeight - box.y, Math.max(...ends) + 18)]",
                part,
            )
            asked["clip"] = {**dict(zip(("x", "y", "width", "height"), box, strict=True)), "scale": 1}
        return base64.b64decode(self.driver.execute_cdp_cmd("Page.captureScreenshot", asked)["data"])

    def record_frames(self) -> None:
        """Begin to record the time between frames, tasks of more than 50 ms, and what the main thread does."""
        # By the thread's own clock: others on the machine do not lengthen that.
        self.driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        self.run(LONG_TASKS + FRAME_RECORDER)

    def frame_gaps_ms(self) -> list[float]:
        """Return the times between frames so far."""
        found: list[float] = json.loads(self.run("return JSON.stringify(window.frameGaps)"))
        return found

    def long_tasks_ms(self) -> list[float]:
        """Return how long tasks took that took more than 50 ms."""
        found: list[float] = json.loads(self.run("return JSON.stringify(window.longTasks)"))
        return found

    def main_thread_s(self) -> dict[str, float]:
        """Return the processor time of the page's main thread so far: in all, and what takes most of it."""
        found = self.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return {MAIN_THREAD[each["name"]]: each["value"] for each in found if each["name"] in MAIN_THREAD}

    def cpu_s(self) -> float:
        """Return the processor time of the process that runs the page."""
        found = 0.0
        for process in psutil.Process(self.driver.service.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "--type=renderer" in process.cmdline():
                    times = process.cpu_times()
                    found = max(found, times.user + times.system)
        return found

    def close(self) -> None:
        """End the browser and forget its profile."""
        self.driver.quit()
        self._profile.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
