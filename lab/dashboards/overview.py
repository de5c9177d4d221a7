"""Are clients served well? The first board that anybody opens."""

from __future__ import annotations

from lab.dashboards.model import Board, Panel, Query, Row, Threshold, quantile, rate, share
from lab.dashboards.selectors import MODEL, MODELS, NAMESPACE, NAMESPACES

REQUESTS = f"poolgrid_frontend_requests_total{{{NAMESPACE}}}"
FAILED = f'poolgrid_frontend_requests_total{{{NAMESPACE}, status=~"5..", status!="503"}}'
TTFT = f"poolgrid_frontend_time_to_first_token_seconds_bucket{{{MODEL}}}"
ITL = f"poolgrid_frontend_inter_token_latency_seconds_bucket{{{MODEL}}}"


def _judged(target: str, outcome: str = "") -> str:
    chosen = f', outcome="{outcome}"' if outcome else ""
    return f'poolgrid_frontend_target_judgements_total{{{MODEL}, target="{target}"{chosen}}}'


def _latencies(title: str, buckets: str, target: str, means: str, do: str) -> Panel:
    return Panel(
        title,
        "s",
        (
            *(
                Query(f"{quantile(q, buckets, ['model'])} >= 0", f"p{q * 100:g} {{{{model}}}}")
                for q in (0.5, 0.95, 0.99)
            ),
            Query(f'max(poolgrid_frontend_target_seconds{{{NAMESPACE}, target="{target}"}})', "target"),
        ),
        means,
        do,
        "latency-objective",
        width=12,
        dashed="target",
    )


def _met(title: str, target: str) -> Panel:
    return Panel(
        title,
        "percentunit",
        (Query(share(rate(_judged(target, "met")), rate(_judged(target))), "met"),),
        f"Sequences whose {title.split()[0]} was within the target, as a share of all. The objective is 99 %.",
        "Below 99 %: find the leg that takes the time on the Routing dashboard, and check the queue.",
        "latency-objective",
        kind="stat",
        width=4,
        height=5,
        maximum=1,
        decimals=2,
        thresholds=(Threshold(0, "red"), Threshold(0.95, "orange"), Threshold(0.99, "green")),
    )


OVERVIEW = Board(
    "poolgrid-overview",
    "poolgrid: Overview",
    "Latencies against targets, errors, refusals and throughput.",
    (NAMESPACES, MODELS),
    (
        Row(
            "Against the targets",
            (
                _met("TTFT within target", "ttft"),
                _met("ITL within target", "itl"),
                Panel(
                    "Requests that failed",
                    "percentunit",
                    (Query(share(f"({rate(FAILED)} or vector(0))", rate(REQUESTS)), "failed"),),
                    "Requests answered 500, 502 or 504, or whose stream broke, as a share of all. Refusals (429, 503) "
                    "have a panel of their own.",
                    "Anything above 0.1 % spends the error budget: read the routers' logs for the reason codes.",
                    "error-objective",
                    kind="stat",
                    width=4,
                    height=5,
                    decimals=2,
                    thresholds=(Threshold(0.0005, "orange"), Threshold(0.001, "red")),
                ),
                Panel(
                    "Requests refused",
                    "percentunit",
                    (
                        Query(
                            share(
                                f"({rate(f'poolgrid_frontend_refusals_total{{{NAMESPACE}}}')} or vector(0))",
                                rate(REQUESTS),
                            ),
                            "refused",
                        ),
                    ),
                    "Requests answered 401, 403, 413, 429 or 503, as a share of all.",
                    "See Refusals by code below: `busy` means too few workers, `rate_limited` a tenant's own limit.",
                    "queue-filling",
                    kind="stat",
                    width=4,
                    height=5,
                    decimals=2,
                    thresholds=(Threshold(0.01, "orange"), Threshold(0.05, "red")),
                ),
                Panel(
                    "In flight",
                    "short",
                    (Query(f"sum(poolgrid_frontend_in_flight_requests{{{NAMESPACE}}})", "requests"),),
                    "Requests being served, waiting ones included. Behind a global router its front end counts them.",
                    "If it grows at a constant request rate, answers are slower: see the latencies.",
                    "queue-filling",
                    kind="stat",
                    width=4,
                    height=5,
                ),
                Panel(
                    "Workers ready",
                    "short",
                    (Query(f'sum(poolgrid_router_workers{{{NAMESPACE}, state="ready"}})', "workers"),),
                    "Workers of all pools that take requests.",
                    "If some are missing, find them on the Workers dashboard, and the reason with `poolgrid top`.",
                    "no-worker-of-a-role",
                    kind="stat",
                    width=4,
                    height=5,
                    no_value="no worker known",
                    thresholds=(Threshold(0, "red"), Threshold(1, "green")),
                ),
            ),
        ),
        Row(
            "Latency",
            (
                _latencies(
                    "Time to first token",
                    TTFT,
                    "ttft",
                    "From arrival to first token, by model, waiting included.",
                    "If p50 grows too, all requests wait: see Legs of a request on the Routing dashboard. If only "
                    "p99 grows, look for long prompts and a slow worker.",
                ),
                _latencies(
                    "Time between tokens",
                    ITL,
                    "itl",
                    "Time between arrivals of tokens, per token, by model.",
                    "It grows with the batch: compare Requests in the batch on the Workers dashboard. Prefills "
                    "between decode steps raise only p99: use separate decode workers.",
                ),
            ),
        ),
        Row(
            "Traffic",
            (
                Panel(
                    "Requests by status",
                    "reqps",
                    (Query(rate(REQUESTS, ["status"]), "{{status}}"),),
                    "Answers per second by HTTP status. 499: the client disconnected. 500 includes broken streams.",
                    "Many 499: clients time out, often while their requests queue. 5xx: see the logs.",
                    "error-objective",
                    stacked=True,
                ),
                Panel(
                    "Refusals by code",
                    "reqps",
                    (Query(rate(f"poolgrid_frontend_refusals_total{{{NAMESPACE}}}", ["code"]), "{{code}}"),),
                    "Refused requests, by reason code.",
                    "`busy`: add workers, or reduce load. `rate_limited`: see the Tenants dashboard. `no_worker`: "
                    "no worker serves that model.",
                    "queue-filling",
                    no_value="no request was refused",
                ),
                Panel(
                    "Disconnected clients",
                    "reqps",
                    (
                        Query(
                            rate(f"poolgrid_frontend_client_disconnects_total{{{NAMESPACE}}}"),
                            "left before the end",
                        ),
                    ),
                    "Clients that disconnected before their answer was complete.",
                    "Compare their timeouts with the queue and TTFT above.",
                    "latency-objective",
                ),
                Panel(
                    "Token throughput",
                    "short",
                    (
                        Query(rate(f"poolgrid_frontend_prompt_tokens_total{{{NAMESPACE}}}"), "prompt tokens/s"),
                        Query(rate(f"poolgrid_frontend_cached_tokens_total{{{NAMESPACE}}}"), "of them reused/s"),
                        Query(rate(f"poolgrid_frontend_output_tokens_total{{{NAMESPACE}}}"), "output tokens/s"),
                    ),
                    "Tokens per second sent to workers, reused from caches, and generated.",
                    "If output falls at a constant request rate, sequences are shorter or workers slower: see OSL "
                    "and ITL.",
                    "cache-thrashing",
                ),
                Panel(
                    "Prompt and output lengths",
                    "short",
                    tuple(
                        Query(
                            f"{quantile(q, f'poolgrid_frontend_{name}_sequence_tokens_bucket{{{NAMESPACE}}}')} >= 0",
                            f"{word} p{q * 100:g}",
                        )
                        for name, word in (("input", "ISL"), ("output", "OSL"))
                        for q in (0.5, 0.95)
                    ),
                    "Tokens of a prompt and of an answer.",
                    "A shift here explains a shift of latencies: the clients changed, not the fleet.",
                    "latency-objective",
                ),
                Panel(
                    "Rendering and tokenizing",
                    "s",
                    tuple(
                        Query(
                            f"{quantile(q, f'poolgrid_frontend_tokenization_seconds_bucket{{{NAMESPACE}}}')} >= 0",
                            f"p{q * 100:g}",
                        )
                        for q in (0.5, 0.95, 0.99)
                    ),
                    "Time to tokenize a prompt, waiting for a tokenizer thread included. Part of TTFT.",
                    "If it grows: raise `http_workers`, and check that `fastokens` is used.",
                    "latency-objective",
                ),
            ),
        ),
        Row(
            "Processes",
            (
                Panel(
                    "Versions",
                    "short",
                    (
                        Query(
                            f"count by (version, python) (poolgrid_build_info{{{NAMESPACE}}})",
                            "poolgrid {{version}}, Python {{python}}",
                        ),
                    ),
                    "Processes by version.",
                    "Two versions: an upgrade is in progress, or incomplete.",
                    "target-down",
                    kind="bargauge",
                    no_value="nothing is scraped",
                ),
                Panel(
                    "CPU by component",
                    "short",
                    (
                        Query(
                            f"sum by (component) (rate(process_cpu_seconds_total{{{NAMESPACE}, "
                            'job="poolgrid"}[$__rate_interval]))',
                            "{{component}}",
                        ),
                    ),
                    "Cores used by the processes of each kind. A router uses at most one per `http_workers`.",
                    "A router near one core adds to every latency: raise `http_workers`.",
                    "latency-objective",
                    no_value="nothing is scraped",
                ),
                Panel(
                    "Memory by component",
                    "bytes",
                    (
                        Query(
                            f'sum by (component) (process_resident_memory_bytes{{{NAMESPACE}, job="poolgrid"}})',
                            "{{component}}",
                        ),
                    ),
                    "Resident memory. Every store is bounded: docs/production.md, Size.",
                    "If it grows without limit, report it with `poolgrid_event_loop_tasks`.",
                    "target-down",
                    no_value="nothing is scraped",
                ),
            ),
        ),
    ),
)
