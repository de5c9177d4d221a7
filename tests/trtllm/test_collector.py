"""TensorRT-LLM's own metrics are shown beside ours, whatever its version calls the methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from poolgrid.plugins.trtllm.metrics import EngineCollector
from tests.fakes import install_tensorrt_llm
from tests.fakes.tensorrt_llm import metrics as engine_metrics

install_tensorrt_llm()

REQUEST = {"ttft": 0.2, "tpot": 0.01, "e2e": 0.7, "request_queue_time": 0.0, "arrival_timestamp": 1.0}


class Later:
    """The names of the line after 1.2."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.iterations: list[Any] = []

    def log_request_metrics_dict(self, metrics_dict: dict[str, Any]) -> None:
        self.requests.append(metrics_dict)

    def log_iteration_stats(self, stat: Any) -> None:
        self.iterations.append(stat)


class Broken:
    """Fails whenever it is used."""

    def __init__(self, labels: dict[str, str]) -> None:
        pass

    def log_metrics_dict(self, metrics_dict: dict[str, Any]) -> None:
        raise KeyError("ttft")


class Impossible:
    """Wants something that nobody gives it."""

    def __init__(self) -> None:
        raise AssertionError("never reached")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def collector(registry: CollectorRegistry) -> Iterator[EngineCollector]:
    made = EngineCollector(registry, "m")
    yield made
    made.close()


def test_the_metrics_of_1_2_are_on_the_page_with_ours(registry: CollectorRegistry, collector: EngineCollector) -> None:
    collector.observe_request(REQUEST, "length")
    collector.observe_iteration({"iter": 1})

    page = generate_latest(registry).decode()
    labels = 'engine_type="trtllm",finished_reason="length",model_name="m"'
    assert f"trtllm_request_success_total{{{labels}}} 1.0" in page
    assert "trtllm_time_to_first_token_seconds_sum" in page
    assert "python_info" not in page, "nothing else of the process-wide registry"


def test_another_engine_of_the_process_can_have_its_metrics_after_the_first() -> None:
    for _ in range(2):
        page = CollectorRegistry()
        made = EngineCollector(page, "m")
        made.observe_request(REQUEST, "stop")
        assert page.get_sample_value(
            "trtllm_request_success_total", {"model_name": "m", "engine_type": "trtllm", "finished_reason": "stop"}
        )
        made.close()
        assert not any(metric.name.startswith("trtllm_") for metric in [*REGISTRY.collect(), *page.collect()])


def test_the_methods_of_later_versions_are_found(monkeypatch: pytest.MonkeyPatch, registry: CollectorRegistry) -> None:
    monkeypatch.setattr(engine_metrics, "MetricsCollector", Later)
    made = EngineCollector(registry, "m")

    made.observe_request({"finished_reason": "stop"}, "length")
    made.observe_request({}, None)
    made.observe_iteration({"iter": 1})

    assert made._collector.requests == [{"finished_reason": "stop"}, {}]
    assert made._collector.iterations == [{"iter": 1}]
    made.close()


@pytest.mark.parametrize("kind", [Broken, Impossible])
def test_failures_are_logged_once_and_go_no_further(
    monkeypatch: pytest.MonkeyPatch, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture, kind: type
) -> None:
    monkeypatch.setattr(engine_metrics, "MetricsCollector", kind)
    made = EngineCollector(registry, "m")

    for _ in range(2):
        made.observe_request(REQUEST, "stop")
        made.observe_iteration({"iter": 1})

    assert caplog.text.count("TensorRT-LLM's own metrics") == 1
    made.close()
