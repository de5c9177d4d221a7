"""What an endpoint picker counts; there is none of it in a router that answers no gateway."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from poolgrid.process.instruments import Counter, Gauge, Histogram

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class PickerMetrics:
    """The series of one router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.picks = Counter(
            "poolgrid_router_gateway_requests_total",
            "Requests that gateways asked about over ext-proc, by what they were told: `picked`, or the code of the "
            "error that the client got (`busy`, `no_worker`, `not_ready`, `head_too_large`, `body_too_large`, "
            "`bodies_full`, `body_timeout`, `streams_full`, `policy_failed`).",
            ["outcome"],
            registry=registry,
        )
        self.read = Counter(
            "poolgrid_router_gateway_prompts_total",
            "What was known of the prompts of picked requests: `tokens`, by which the cache counts, or why only load "
            "counted (`no_body`, `streamed`, `another API`, `media`, the code of an error in the body, …).",
            ["known"],
            registry=registry,
        )
        self.elsewhere = Counter(
            "poolgrid_router_gateway_served_elsewhere_total",
            "Requests that the gateway sent to another endpoint than the first it was told: a pod did not answer.",
            registry=registry,
        )
        self.seconds = Histogram(
            "poolgrid_router_gateway_pick_seconds",
            "Time from the last byte of a request's body to the answer for the gateway, tokenization included.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "poolgrid_router_gateway_in_flight",
            "Requests of gateways that have an endpoint and no end yet; each is load on the books.",
            registry=registry,
        )
        self.bookings_lost = Counter(
            "poolgrid_router_gateway_bookings_lost_total",
            "Bookings that no open stream of a gateway held, a fault of the endpoint picker. Each was ended at the "
            "next renewal and logged.",
            registry=registry,
        )
        self.streams = Gauge(
            "poolgrid_router_gateway_streams",
            "Open streams of gateways, one for each of their requests. The limit is `ext_proc_streams`.",
            registry=registry,
        )
        self.streams_ended = Counter(
            "poolgrid_router_gateway_streams_ended_total",
            "Streams that the endpoint picker ended without an answer for the client, by reason: `refused` (as many as "
            "`ext_proc_streams` have a request in work), `silent` (no request came, or the gateway did not end the "
            "stream after its answer), `protocol` (a message that cannot be read, or not at this place), "
            "`write_timeout` (the gateway took nothing of an answer).",
            ["reason"],
            registry=registry,
        )
        self.body_bytes = Gauge(
            "poolgrid_router_gateway_body_bytes",
            "Bytes of requests without an endpoint, headers and bodies. The limit is `ext_proc_body_bytes`.",
            registry=registry,
        )
        for outcome in ("picked", "busy", "no_worker", "not_ready"):
            self.picks.labels(outcome)
