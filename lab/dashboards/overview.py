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
        "Below 99 %: look which leg takes the time on the Routing board, and whether requests queue.",
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
    "What clients get: latencies against their targets, errors, refusals, throughput.",
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
                    "Requests being served now, those that wait included. Behind a global router its own front end has "
                    "them.",
                    "If it grows while the rate of requests does not, answers have become slower: see the latencies.",
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
                    "If some are missing, the Workers board says which, and `poolgrid top` why.",
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
                    "From the arrival of a request to its first token, by model, waiting included.",
                    "If p50 grows too, everybody waits: see Legs of a request on the Routing board. If only p99 does, "
                    "look for long prompts and for one slow worker.",
                ),
                _latencies(
                    "Time between tokens",
                    ITL,
                    "itl",
                    "Between two arrivals of tokens of a sequence, for each token, by model.",
                    "It grows with the batch: compare Requests in the batch on the Workers board. Prefills between "
                    "decode steps show as p99 alone: decode workers of their own mend that.",
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
                    "Answers per second by HTTP status. 499 is a client that left, 500 also a stream that broke.",
                    "Many 499: clients time out before their answer, often while they queue. 5xx: see the logs.",
                    "error-objective",
                    stacked=True,
                ),
                Panel(
                    "Refusals by code",
                    "reqps",
                    (Query(rate(f"poolgrid_frontend_refusals_total{{{NAMESPACE}}}", ["code"]), "{{code}}"),),
                    "Requests that were not served, by reason code.",
                    "`busy`: more workers, or lower load. `rate_limited`: the Tenants board. `no_worker`: nobody "
                    "serves that model.",
                    "queue-filling",
                    no_value="no request was refused",
                ),
                Panel(
                    "Clients that left",
                    "reqps",
                    (
                        Query(
                            rate(f"poolgrid_frontend_client_disconnects_total{{{NAMESPACE}}}"),
                            "left before the end",
                        ),
                    ),
                    "Clients that closed their connection before their answer was complete.",
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
                    "Tokens per second that went to workers, were reused from caches, and came back.",
                    "If output falls while requests do not, sequences are shorter or workers slower: see OSL and ITL.",
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
                    "A shift here explains a shift of latencies: it is the clients that changed, not the fleet.",
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
                    "Time to make token ids of a prompt, a wait for a tokenizer thread included. It is part of TTFT.",
                    "If it grows: more `tokenizer_threads`, the `fast` extra, or more `http_workers`.",
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
                    "Processes by what they run.",
                    "Two versions at a time: an upgrade is under way, or was left half done.",
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
                    "Cores that the processes of each kind use. A router uses one at most, for each of its "
                    "`http_workers`.",
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
                    "Resident memory. Every store has a bound: docs/operations.md, Memory of a router.",
                    "If it grows without end, report it, with `poolgrid_event_loop_tasks`.",
                    "target-down",
                    no_value="nothing is scraped",
                ),
            ),
        ),
    ),
)
