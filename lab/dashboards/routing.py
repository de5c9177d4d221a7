"""Do the routers choose well? Reuse against what could be reused, reasons, staleness, trust, spread."""

from __future__ import annotations

from lab.dashboards.model import Board, Panel, Query, Row, Threshold, quantile, rate, share
from lab.dashboards.selectors import NAMESPACE, NAMESPACES, POOL, POOLS

PROMPT = rate(f"poolgrid_router_prompt_tokens_total{{{POOL}}}")


def _of_prompts(metric: str) -> str:
    return share(rate(f"poolgrid_router_{metric}_total{{{POOL}}}"), PROMPT)


LEGS = (
    f"histogram_quantile(0.95, sum by (le, leg) (rate(poolgrid_router_leg_seconds_bucket{{{POOL}}}[$__rate_interval]) "
    f"or rate(poolgrid_global_router_leg_seconds_bucket{{{NAMESPACE}}}[$__rate_interval]))) >= 0"
)
WAITS = (
    f"histogram_quantile(0.95, sum by (le, cause) (rate(poolgrid_router_queue_seconds_bucket{{{POOL}}}"
    f"[$__rate_interval]) or rate(poolgrid_global_router_queue_seconds_bucket{{{NAMESPACE}}}[$__rate_interval]))) >= 0"
)

ROUTING = Board(
    "poolgrid-routing",
    "poolgrid: Routing",
    "Cache reuse of the pools' routers, and the reasons of their decisions.",
    (NAMESPACES, POOLS),
    (
        Row(
            "Reuse of caches",
            (
                Panel(
                    "Reuse, as a share of prompt tokens",
                    "percentunit",
                    (
                        Query(_of_prompts("achievable_tokens"), "achievable"),
                        Query(_of_prompts("overlap_found_tokens"), "found"),
                        Query(_of_prompts("overlap_realised_tokens"), "reused"),
                    ),
                    "Achievable: reuse of one infinite cache shared by all workers. Found: reuse predicted by the "
                    "index for the chosen workers. Reused: real reuse.",
                    "Achievable well above found: blocks are evicted (Workers dashboard), or are on other workers "
                    "(Spread, below). Found above reused: events are late, or blocks are evicted while requests "
                    "queue.",
                    "cache-thrashing",
                    width=12,
                    maximum=1,
                ),
                Panel(
                    "Reused, of what was achievable",
                    "percentunit",
                    (
                        Query(
                            share(
                                rate(f"poolgrid_router_overlap_realised_tokens_total{{{POOL}}}"),
                                rate(f"poolgrid_router_achievable_tokens_total{{{POOL}}}"),
                            ),
                            "reused / achievable",
                        ),
                    ),
                    "1 is perfect routing into large enough caches.",
                    "Below 0.7 for hours: run `poolgrid what-if` on the recorded decisions to find better "
                    "weights; if there are none, the caches are too small.",
                    "cache-thrashing",
                    kind="stat",
                    width=4,
                    thresholds=(Threshold(0, "red"), Threshold(0.5, "orange"), Threshold(0.7, "green")),
                    no_value="nothing to reuse",
                ),
                Panel(
                    "Computed prompt tokens, by cause",
                    "percentunit",
                    (
                        Query(
                            f"sum by (cause) (rate(poolgrid_router_uncached_tokens_total{{{POOL}}}[$__rate_interval])) "
                            f"/ scalar({PROMPT} > 0)",
                            "{{cause}}",
                        ),
                    ),
                    "Prompt tokens that workers computed, as a share of all. Cold: never sent before. Routing: another "
                    "worker held them. Eviction: no worker holds them any more. Mismatch: promised and not reused.",
                    "Routing: a policy with more weight on overlap. Eviction: more KV memory. Mismatch: run "
                    "`poolgrid doctor`.",
                    "reuse-parted",
                ),
                Panel(
                    "Verdicts of the doctor",
                    "short",
                    (
                        Query(
                            f"count by (cause) (max by (worker, cause) (poolgrid_router_reuse_verdict{{{POOL}}}))",
                            "{{cause}}",
                        ),
                    ),
                    "Workers by verdict on their reuse: `agrees`, `cold-workload`, `unknown`, or a fault.",
                    "A fault: run `poolgrid doctor`.",
                    "reuse-parted",
                    no_value="no worker is known",
                ),
                Panel(
                    "Error of the prediction",
                    "percentunit",
                    tuple(
                        Query(
                            f"{quantile(q, f'poolgrid_router_prediction_error_ratio_bucket{{{POOL}}}')} >= 0",
                            f"p{q * 100:g}",
                        )
                        for q in (0.5, 0.95)
                    )
                    + tuple(
                        Query(
                            share(
                                rate(f'poolgrid_router_prediction_error_tokens_total{{{POOL}, direction="{word}"}}'),
                                PROMPT,
                            ),
                            f"reused {word} than predicted",
                        )
                        for word in ("less", "more")
                    ),
                    "Difference between predicted and real reuse, as a share of the prompt.",
                    "Less than predicted: small caches, or late events. More: missing events; see gaps on the "
                    "Events dashboard.",
                    "reuse-parted",
                ),
            ),
        ),
        Row(
            "Decisions",
            (
                Panel(
                    "Decisions by reason",
                    "reqps",
                    (Query(rate(f"poolgrid_router_decisions_total{{{POOL}}}", ["reason"]), "{{reason}}"),),
                    "Reasons of choices. `-predicted`: the worker's events are untrusted. `-behind`: the router "
                    "was catching up.",
                    "Mostly `tie`: cold caches or short prompts. `-predicted`, `-behind` for long: see Staleness.",
                    "reuse-parted",
                    stacked=True,
                ),
                Panel(
                    "Legs by stage and reason",
                    "reqps",
                    (
                        Query(
                            rate(f"poolgrid_router_legs_total{{{POOL}}}", ["stage", "reason"]), "{{stage}}: {{reason}}"
                        ),
                    ),
                    "Dispatched stages of a pool's router. Behind a global router see the Pools dashboard.",
                    "`no_prefill_worker`: prefill workers are missing.",
                    "no-worker-of-a-role",
                    stacked=True,
                ),
                Panel(
                    "Time of a decision",
                    "s",
                    tuple(
                        Query(
                            f"{quantile(q, f'poolgrid_router_decision_seconds_bucket{{{POOL}}}')} >= 0", f"p{q * 100:g}"
                        )
                        for q in (0.5, 0.99)
                    ),
                    "From hashing the prompt to the send.",
                    "Several ms: very long prompts, hundreds of workers, or a router that shares its core.",
                    "latency-objective",
                ),
                Panel(
                    "Legs of a request, p95",
                    "s",
                    (Query(LEGS, "{{leg}}"),),
                    "Time of waiting, prefill, KV transfer and decode.",
                    "Find the leg that grew: queue: add workers; prefill: prefill workers or reuse; transfer: the "
                    "network between workers; decode: batch size.",
                    "latency-objective",
                ),
                Panel(
                    "Waiting by cause, p95",
                    "s",
                    (Query(WAITS, "{{cause}}"),),
                    "Wait of requests that had to wait, by cause.",
                    "`workers_full`, `pools_full`: add workers. `unreachable`: network, or hanging workers. "
                    "`worker_lost`: crashes. `held`: normal, requests wait for the best worker; near "
                    "4 s it means overload.",
                    "queue-filling",
                    no_value="nobody waited",
                ),
                Panel(
                    "Moves to another worker",
                    "reqps",
                    (
                        Query(rate(f"poolgrid_router_migrations_total{{{POOL}}}", ["cause"]), "{{cause}}"),
                        Query(rate(f"poolgrid_router_crowded_choices_total{{{POOL}}}"), "chosen anew: crowded"),
                        Query(rate(f"poolgrid_router_poison_requests_total{{{POOL}}}"), "ended: workers lost twice"),
                    ),
                    "Requests that lost their worker, before or during their output. Each costs a prefill.",
                    "A steady rate: workers die or refuse; see the consolidator's lease expiries.",
                    "stream-broken",
                    no_value="none moved",
                ),
            ),
        ),
        Row(
            "Staleness, trust and spread",
            (
                Panel(
                    "Behind the journal",
                    "short",
                    (Query(f"max by (pool) (poolgrid_router_behind_records{{{POOL}}})", "records {{pool}}"),),
                    "Journal records that the router has not applied. 0 is up to date.",
                    "Above 0 for a minute: the router lacks CPU, or the feed is slow.",
                    "journal-trouble",
                    no_value="no router is scraped",
                ),
                Panel(
                    "Age of events by worker",
                    "s",
                    (Query(f"poolgrid_router_event_lag_seconds{{{POOL}}}", "{{worker}}"),),
                    "Age of a worker's last events when they were recorded.",
                    "One worker: its host's clock (see Clocks) or network. All: the consolidator.",
                    "clock-skew",
                    no_value="no worker is known",
                ),
                Panel(
                    "Untrusted workers",
                    "short",
                    (Query(f"max by (pool) (poolgrid_router_untrusted_workers{{{POOL}}})", "{{pool}}"),),
                    "Workers whose events contradict their reported reuse; the router uses its own dispatches instead.",
                    "Above 0: see Disagreement, and the logs of worker and consolidator.",
                    "reuse-parted",
                    no_value="no router is scraped",
                ),
                Panel(
                    "Disagreement of index and worker",
                    "percentunit",
                    (Query(f"poolgrid_router_overlap_disagreement_ratio{{{POOL}}}", "{{worker}}"),),
                    "Share of tokens, over a worker's last 64 requests, about which index and worker disagree.",
                    "A worker far above the others has lost or late events.",
                    "reuse-parted",
                    maximum=1,
                ),
                Panel(
                    "Spread of load: fullest worker against the mean",
                    "short",
                    (
                        Query(
                            f"max by (pool, role) (poolgrid:worker_requests{{{POOL}}}) / "
                            f"(avg by (pool, role) (poolgrid:worker_requests{{{POOL}}}) > 0)",
                            "{{pool}} {{role}}",
                        ),
                    ),
                    "Requests of the busiest worker of a role, as a multiple of the mean. 1 is even.",
                    "Above 3 for long: give workers their step times; see `poolgrid what-if`.",
                    "spread",
                    no_value="idle",
                ),
                Panel(
                    "Blocks in the index by worker",
                    "short",
                    (Query(f"poolgrid_router_worker_blocks{{{POOL}}}", "{{worker}}"),),
                    "Blocks that a worker holds according to the index.",
                    "0 for a busy worker: it sends no events. Compare with its own count on the Workers dashboard.",
                    "stream-broken",
                    no_value="no worker is known",
                ),
            ),
        ),
        Row(
            "Behind a gateway",
            (
                Panel(
                    "Picks by outcome",
                    "reqps",
                    (
                        Query(rate(f"poolgrid_router_gateway_requests_total{{{POOL}}}", ["outcome"]), "{{outcome}}"),
                        Query(rate(f"poolgrid_router_gateway_served_elsewhere_total{{{POOL}}}"), "served elsewhere"),
                    ),
                    "Answers to gateways over ext-proc: `picked`, or the client's error; and requests sent to "
                    "another endpoint than the first choice.",
                    "`busy`: add workers. `not_ready`, `no_worker`: engines are missing. Served elsewhere: pods "
                    "that the router reaches and the gateway does not.",
                    "queue-filling",
                    no_value="no gateway asks",
                ),
                Panel(
                    "Picks by known input",
                    "reqps",
                    (Query(rate(f"poolgrid_router_gateway_prompts_total{{{POOL}}}", ["known"]), "{{known}}"),),
                    "`tokens`: the prompt was known. Other values are the reason why only load counted.",
                    "`no_body`: the gateway sends no bodies; set `request_body_mode` as in deploy/envoy.",
                    "reuse-parted",
                    no_value="no gateway asks",
                ),
                Panel(
                    "Time of a pick",
                    "s",
                    tuple(
                        Query(
                            f"{quantile(q, f'poolgrid_router_gateway_pick_seconds_bucket{{{POOL}}}')} >= 0",
                            f"p{q * 100:g}",
                        )
                        for q in (0.5, 0.99)
                    ),
                    "From the last byte of a request's body to the answer, tokenization included.",
                    "Above message_timeout the gateway continues without a pick: give the router a core, or use "
                    "`fastokens`.",
                    "latency-objective",
                    no_value="no gateway asks",
                ),
                Panel(
                    "Requests of gateways in flight",
                    "short",
                    (Query(f"sum by (pool) (poolgrid_router_gateway_in_flight{{{POOL}}})", "requests {{pool}}"),),
                    "Requests that have an endpoint and have not ended; each counts as load.",
                    "It grows with few clients: the gateway does not report ends; see `response_header_mode` in "
                    "deploy/envoy.",
                    "queue-filling",
                    no_value="no router is scraped",
                ),
            ),
        ),
    ),
)
