"""What the OpenAI surface measures, under ``poolgrid_frontend_``; ``docs/http_api.md`` lists it.

Every value is observed at boundaries: once per request, or once per wake-up of a stream (ITL), never per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from poolgrid.kernel.requests.inference import InferenceBackend
from poolgrid.server.frontend.model_forms import ModelForms
from poolgrid.server.frontend.settings import ITL_TARGET_MS, TTFT_TARGET_MS
from poolgrid.server.process.instruments import OTHER, Counter, Gauge, Histogram

TTFT_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.6, 2.5, 4.0, 6.0, 10.0, 30.0, 120.0,
)  # fmt: skip
"""1 ms (a cached prompt on an idle engine) to 2 min (a full queue of long prompts), about 1.6 apart."""

ITL_BUCKETS_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Decode steps take 5 to 60 ms: fine there, coarse where a pause is a stall."""

SERVED_COLUMNS: Final = (
    "output_tokens",
    "errors",
    *(f"ttft {bound}" for bound in (*TTFT_BUCKETS_S, "Infinity")),
    *(f"itl {bound}" for bound in (*ITL_BUCKETS_S, "Infinity")),
)
"""Names of the totals of ``Application.served``: a bucket of a latency is named by its upper bound in seconds."""

TOKEN_BUCKETS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144, 1_048_576)
"""Powers of two, as context lengths and block sizes are."""

TOKENIZATION_BUCKETS_S = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0,
)  # fmt: skip
"""50 µs (a short question) to seconds (a million tokens)."""


TENANT_LABELS_MAX: Final = 200
"""Tenants with series of their own; later ones share ``other``. Names come from the operator's file, never from
clients, and 200 times five series are what a Prometheus server does not notice."""


MODEL_LABELS_MAX: Final = 100
"""Models with series of their own; later ones share ``other``. Names are those of served models and adapters, of which
a pool may have thousands, and each has 40 series of latencies."""


class ModelSeries(msgspec.Struct):
    """The instruments of one model."""

    ttft: Histogram
    itl: Histogram
    ttft_met: Counter
    ttft_missed: Counter
    itl_met: Counter
    itl_missed: Counter


class TenantSeries(NamedTuple):
    """The instruments of one tenant."""

    requests: Counter
    prompt_tokens: Counter
    output_tokens: Counter


class FrontendMetrics:
    """The instruments of one front end, registered in ``registry``."""

    def __init__(
        self,
        registry: CollectorRegistry,
        ttft_target_ms: float | None = None,
        itl_target_ms: float | None = None,
    ) -> None:
        ttft_target_ms = TTFT_TARGET_MS if ttft_target_ms is None else ttft_target_ms
        itl_target_ms = ITL_TARGET_MS if itl_target_ms is None else itl_target_ms
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.registry = registry
        self.ttft_target_ms = ttft_target_ms
        self.itl_target_ms = itl_target_ms
        self.requests = counter(
            "poolgrid_frontend_requests",
            "Requests answered, by endpoint, HTTP status and streaming. 499: the client disconnected. 500 "
            "includes broken streams.",
            ["endpoint", "status", "streaming"],
        )
        self.guides = counter(
            "poolgrid_frontend_guides",
            "Guides by validation result: `known` (validated before for the same tenant), `accepted`, "
            "`refused` or `busy`. For refused ones the log has tenant and reason.",
            ["outcome"],
        )
        self.kept_responses = counter(
            "poolgrid_frontend_kept_responses",
            "Responses to store for `previous_response_id`, by outcome: `kept`, or `lost` for lack of space or "
            "a write error, which is logged.",
            ["outcome"],
        )
        self.in_flight = gauge(
            "poolgrid_frontend_in_flight_requests",
            "Requests being served, waiting ones included.",
            ["endpoint"],
        )
        self.ttft = histogram(
            "poolgrid_frontend_time_to_first_token_seconds",
            "TTFT of each sequence: from the request's headers to the first output token.",
            ["model"],
            buckets=TTFT_BUCKETS_S,
        )
        self.itl = histogram(
            "poolgrid_frontend_inter_token_latency_seconds",
            "ITL at each arrival of tokens: time since the previous arrival, divided by the number of tokens.",
            ["model"],
            buckets=ITL_BUCKETS_S,
        )
        self.target_judgements = counter(
            "poolgrid_frontend_target_judgements",
            "Sequences that `met` or `missed` the target: `ttft` at the first token, `itl` (mean of the "
            "sequence) at the last one. The base of service objectives.",
            ["model", "target", "outcome"],
        )
        target = gauge(
            "poolgrid_frontend_target_seconds",
            "The targets: `ttft_target_ms` and `itl_target_ms`.",
            ["target"],
        )
        target.labels("ttft").set(ttft_target_ms / 1000)
        target.labels("itl").set(itl_target_ms / 1000)
        self.isl = histogram(
            "poolgrid_frontend_input_sequence_tokens",
            "Prompt tokens of a dispatched request (ISL), each prompt once. A shift explains a shift of TTFT.",
            buckets=TOKEN_BUCKETS,
        )
        self.osl = histogram(
            "poolgrid_frontend_output_sequence_tokens",
            "Output tokens of a sequence (OSL), also of an aborted one.",
            buckets=TOKEN_BUCKETS,
        )
        self.cached_tokens = counter(
            "poolgrid_frontend_cached_tokens",
            "Prompt tokens that workers reported as reused, over all sequences.",
        )
        self.prompt_tokens = counter(
            "poolgrid_frontend_prompt_tokens",
            "Prompt tokens dispatched, over all sequences. The base of cached tokens.",
        )
        self.output_tokens = counter(
            "poolgrid_frontend_output_tokens",
            "Output tokens received from workers. The rate is the throughput of the pool through this process.",
        )
        self.tokenization = histogram(
            "poolgrid_frontend_tokenization_seconds",
            "Time to render and tokenize the prompts of a request, waiting for a tokenizer thread included.",
            buckets=TOKENIZATION_BUCKETS_S,
        )
        self.tokenizations_pending = gauge(
            "poolgrid_frontend_tokenizations_pending",
            "Long prompts in tokenizer threads or waiting for one. At 256 the next one gets 429.",
        )
        self.forwarded_prompts = counter(
            "poolgrid_frontend_forwarded_prompts",
            "Prompts that engine servers answered. `known_by`: `tokens`, or why their text was compared instead: "
            "`template`, `tokenizer-missing`, `tokenizer-busy`, `unknown-part`, `media`, `kept-at-server`, `too-long` "
            "or `other-api`. `ids`: `none`, `sent` along, `refused` and sent again as text; or, sent as text and "
            "compared with those of the engine, `equal`, `different` or `unshown`.",
            ["known_by", "ids"],
        )
        self.disconnects = counter(
            "poolgrid_frontend_client_disconnects",
            "Clients that disconnected before their answer was complete. Often their timeout is shorter than "
            "the queue.",
        )
        self.refusals = counter(
            "poolgrid_frontend_refusals",
            "Requests refused with 401, 403, 413, 429 or 503, by reason code.",
            ["code"],
        )
        self.key_reloads = counter(
            "poolgrid_frontend_api_key_reloads",
            "Changes of the file of API keys, by outcome: `loaded`, or `refused` because it is invalid.",
            ["outcome"],
        )
        self.keys_stale = gauge(
            "poolgrid_frontend_api_keys_stale",
            "1 while the file of API keys is invalid and an older one is in force. Alert on it.",
        )
        self._tenant_requests = counter(
            "poolgrid_frontend_tenant_requests",
            "Requests admitted, by tenant. The first 200 tenants have their own series; later ones share "
            "`other`. No series without API keys.",
            ["tenant"],
        )
        self._tenant_refusals = counter(
            "poolgrid_frontend_tenant_refusals",
            "Requests refused, by tenant and reason code. `rate_limited`: tenants that exceed their quota.",
            ["tenant", "code"],
        )
        self._tenant_prompt_tokens = counter(
            "poolgrid_frontend_tenant_prompt_tokens",
            "Prompt tokens of dispatched requests, by tenant, each prompt once.",
            ["tenant"],
        )
        self._tenant_output_tokens = counter(
            "poolgrid_frontend_tenant_output_tokens", "Output tokens, by tenant.", ["tenant"], registry=registry
        )
        self._tenants: dict[str, TenantSeries] = {}
        self._models: dict[str, ModelSeries] = {}
        self.tokenizers = TokenizationCollector()
        registry.register(self.tokenizers)
        self._requests_by_labels: dict[tuple[str, int, bool], Counter] = {}

    def of_model(self, name: str) -> ModelSeries:
        """Return the instruments of a model, or those that late models share."""
        series = self._models.get(name)
        if series is None:
            label = name if len(self._models) < MODEL_LABELS_MAX else OTHER
            judged = self.target_judgements.labels
            series = ModelSeries(
                self.ttft.labels(label),
                self.itl.labels(label),
                *(judged(label, target, outcome) for target in ("ttft", "itl") for outcome in ("met", "missed")),
            )
            if label == name:
                self._models[name] = series
        return series

    def answered(self, endpoint: str, status: int, streaming: bool) -> None:
        """Count one answer; the label lookup is remembered."""
        key = (endpoint, status, streaming)
        counter = self._requests_by_labels.get(key)
        if counter is None:
            counter = self.requests.labels(endpoint, str(status), "true" if streaming else "false")
            self._requests_by_labels[key] = counter
        counter.value += 1

    def served(self) -> tuple[int, ...]:
        """Return the totals of ``SERVED_COLUMNS`` after the first; errors are answers with status 500 or above."""
        errors = sum(counter.value for (_, status, _), counter in self._requests_by_labels.items() if status >= 500)
        return (int(errors), *self.ttft.totals(), *self.itl.totals())

    def refused(self, code: str, tenant: str = "") -> None:
        """Count a refusal; ``tenant`` is empty when its tenant is unknown, or there are none."""
        self.refusals.labels(code).inc()
        if tenant:
            self._tenant_refusals.labels(self._tenant_label(tenant), code).inc()

    def tenant(self, name: str) -> TenantSeries:
        """Return the instruments of a tenant, or those that late tenants share."""
        series = self._tenants.get(name)
        if series is None:
            label = self._tenant_label(name)
            series = TenantSeries(
                self._tenant_requests.labels(label),
                self._tenant_prompt_tokens.labels(label),
                self._tenant_output_tokens.labels(label),
            )
            if label != OTHER:
                self._tenants[name] = series
        return series

    def _tenant_label(self, name: str) -> str:
        return name if name in self._tenants or len(self._tenants) < TENANT_LABELS_MAX else OTHER


class TokenizationCollector(Collector):
    """Reads, at each scrape, what the tokenizers of the served models computed and what they did not have to."""

    def __init__(self) -> None:
        self._shown: tuple[InferenceBackend, ModelForms] | None = None

    def show(self, backend: InferenceBackend, forms: ModelForms) -> None:
        self._shown = backend, forms

    def collect(self) -> Iterator[Metric]:
        """Yield the counts per model."""
        tokens = CounterMetricFamily(
            "poolgrid_frontend_tokenized_tokens",
            "Prompt tokens that were `computed` or came from the `cache` of prompt segments. If the share of "
            "`cache` is small with conversations, add `http_workers`.",
            labels=["model", "source"],
        )
        used = GaugeMetricFamily(
            "poolgrid_frontend_tokenization_cache_bytes",
            "Memory of the cache of prompt segments.",
            labels=["model"],
        )
        fast = GaugeMetricFamily(
            "poolgrid_frontend_fast_tokenizer",
            "1 if `fastokens` tokenizes prompts of the model, 0 if `tokenizers` does. The reason is logged.",
            labels=["model"],
        )
        backend, forms = self._shown if self._shown is not None else (None, None)
        for served in list(backend.models()) if backend is not None else ():
            form = None if forms is None else forms.of(served)
            encoder = None if form is None else form.model.encoder
            if encoder is not None:
                tokens.add_metric([served.name, "computed"], encoder.encoded_tokens)
                tokens.add_metric([served.name, "cache"], encoder.reused_tokens)
                used.add_metric([served.name], encoder.cache_used_bytes)
                fast.add_metric([served.name], float(encoder.is_fast))
        yield from (tokens, used, fast)
