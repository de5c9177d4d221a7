"""What an endpoint picker counts; there is none of it in a router that answers no gateway."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from poolgrid.server.process.instruments import Counter, Gauge, Histogram

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class PickerMetrics:
    """The series of one router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.picks = Counter(
            "poolgrid_router_gateway_requests_total",
            "Requests of gateways over ext-proc, by answer: `picked`, or the code of the error (`busy`, "
            "`no_worker`, `not_ready`, `head_too_large`, `body_too_large`, `bodies_full`, `body_timeout`, "
            "`streams_full`, `policy_failed`).",
            ["outcome"],
            registry=registry,
        )
        self.read = Counter(
            "poolgrid_router_gateway_prompts_total",
            "Picked requests by what was known of the prompt: `tokens`, or why only load counted (`no_body`, "
            "`streamed`, `another API`, `media`, an error code, …).",
            ["known"],
            registry=registry,
        )
        self.elsewhere = Counter(
            "poolgrid_router_gateway_served_elsewhere_total",
            "Requests that the gateway sent to another endpoint than the first choice: a pod did not answer.",
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
            "Requests of gateways that have an endpoint and have not ended.",
            registry=registry,
        )
        self.bookings_lost = Counter(
            "poolgrid_router_gateway_bookings_lost_total",
            "Reservations released without the end of their request, by reason: `no_entry` (none in the gateway's "
            "access log: the log was away for 30 s, an hour passed, or 65,536 waited), `no_stream` (a bug, which is "
            "logged).",
            ["reason"],
            registry=registry,
        )
        self.streams = Gauge(
            "poolgrid_router_gateway_streams",
            "Open streams of gateways: `request`, one per request (limit: 4,096), and `access_log`, one per thread of "
            "Envoy (limit: 1,024).",
            ["kind"],
            registry=registry,
        )
        self.streams_ended = Counter(
            "poolgrid_router_gateway_streams_ended_total",
            "Streams ended by the endpoint picker without an answer, by reason: `refused` (at "
            "4,096), `silent` (no request, or no end after the answer), `protocol` (an "
            "undecodable or misplaced message), `write_timeout` (the gateway read nothing).",
            ["reason"],
            registry=registry,
        )
        self.body_bytes = Gauge(
            "poolgrid_router_gateway_body_bytes",
            "Bytes of requests without an endpoint, headers and bodies. Limit: 256 MiB.",
            registry=registry,
        )
        for outcome in ("picked", "busy", "no_worker", "not_ready"):
            self.picks.labels(outcome)
        for reason in ("no_entry", "no_stream"):
            self.bookings_lost.labels(reason)
