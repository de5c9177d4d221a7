"""The rules of Prometheus, tried by its own tool where that is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

PROMETHEUS = Path(__file__).parents[2] / "deploy" / "prometheus"
PROMTOOL = shutil.which("promtool")

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_configuration_and_its_rules_are_valid() -> None:
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")


@pytest.mark.parametrize("name", ["scrape-static.yml", "scrape-kubernetes.yml"])
def test_a_scrape_job_is_valid_below_scrape_configs(name: str, tmp_path: Path) -> None:
    job = (PROMETHEUS / name).read_text()
    # Debian's build leaves out the discovery of Kubernetes; what becomes of its labels is looked at all the same.
    job = job.replace("kubernetes_sd_configs:\n    - role: pod", "static_configs:\n    - targets: [a:1]")
    whole = tmp_path / "prometheus.yml"
    whole.write_text("scrape_configs:\n" + "".join(f"  {line}" for line in job.splitlines(keepends=True)))

    assert "SUCCESS" in promtool("check", "config", "--syntax-only", str(whole))


def test_the_arithmetic_of_the_rules_is_right() -> None:
    assert "SUCCESS" in promtool("test", "rules", "tests/alerts.yml")


def test_every_alert_is_tried_on_series_that_are_made_up() -> None:
    tests = yaml.safe_load((PROMETHEUS / "tests" / "alerts.yml").read_text())["tests"]
    groups = yaml.safe_load((PROMETHEUS / "rules" / "alerts.yml").read_text())["groups"]

    tried = {each["alertname"] for test in tests for each in test["alert_rule_test"] if each["exp_alerts"]}

    assert tried == {rule["alert"] for group in groups for rule in group["rules"]}
