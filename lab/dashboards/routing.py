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
    "What the pools' routers reuse, of what could be reused, and why they choose as they do.",
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
                    "Achievable: what one cache without end, shared by all workers, would have reused. Found: what the "
                    "index said of the chosen workers. Reused: what these then did reuse.",
                    "Achievable well above found: blocks are evicted (Workers board) or lie on workers that were not "
                    "chosen (Spread, below). Found above reused: events are late, or blocks go while requests queue.",
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
                    "1 is perfect routing into caches that are large enough.",
                    "Below 0.7 over hours: `poolgrid what-if` on the recorded decisions says which weights would do "
                    "better; if none, the caches are too small.",
                    "cache-thrashing",
                    kind="stat",
                    width=4,
                    thresholds=(Threshold(0, "red"), Threshold(0.5, "orange"), Threshold(0.7, "green")),
                    no_value="nothing to reuse",
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
                    "How far what a worker reused was from what it was chosen for, as a share of the prompt.",
                    "Less than predicted: caches too small, or late events. More: events are missing; see the Events "
                    "board for gaps.",
                    "index-untrusted",
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
                    "Why the chosen workers won. `-predicted`: the chosen worker's stream is not believed. `-behind`: "
                    "the router was catching up.",
                    "Mostly `tie`: caches are cold or prompts short. `-predicted`, `-behind` for long: see Staleness.",
                    "index-untrusted",
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
                    "What workers were asked to do by their own pool's router. Behind a global router see its board.",
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
                    "Milliseconds: very long prompts, hundreds of workers, or a router without a core to itself.",
                    "latency-objective",
                ),
                Panel(
                    "Legs of a request, p95",
                    "s",
                    (Query(LEGS, "{{leg}}"),),
                    "Where the time of requests goes: waiting, computing the prompt, moving KV, generating.",
                    "The leg that grew is the place: queue → more workers; prefill → more prefill workers or reuse; "
                    "transfer → the network between workers; decode → batch size.",
                    "latency-objective",
                ),
                Panel(
                    "Waiting by cause, p95",
                    "s",
                    (Query(WAITS, "{{cause}}"),),
                    "How long requests waited that had to wait, and for what.",
                    "`workers_full`, `pools_full`: more workers. `unreachable`: the network, or workers that hang. "
                    "`worker_lost`: workers die. `held`: nothing, they wait for the worker that is best for them; near "
                    "`hold_limit_ms` it is load.",
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
                    "Requests that lost their worker, before or amid their output. Each costs a prefill.",
                    "A steady rate: workers die or refuse; the consolidator's lease expiries say which.",
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
                    "Records that the pool's journal holds and the router has not applied. 0 is level.",
                    "Above 0 for a minute: the router has no CPU, or the feed is slow.",
                    "journal-trouble",
                    no_value="no router is scraped",
                ),
                Panel(
                    "Age of events by worker",
                    "s",
                    (Query(f"poolgrid_router_event_lag_seconds{{{POOL}}}", "{{worker}}"),),
                    "How old a worker's last events were when they were recorded.",
                    "One worker above the others: its host's clock (see Clocks) or network. All: the consolidator.",
                    "clock-skew",
                    no_value="no worker is known",
                ),
                Panel(
                    "Workers that are not believed",
                    "short",
                    (Query(f"max by (pool) (poolgrid_router_untrusted_workers{{{POOL}}})", "{{pool}}"),),
                    "Workers whose caches are guessed from the router's own choices, as their events cannot be right.",
                    "Anything above 0: see Disagreement, and the worker's and consolidator's logs.",
                    "index-untrusted",
                    no_value="no router is scraped",
                ),
                Panel(
                    "Disagreement of index and worker",
                    "percentunit",
                    (Query(f"poolgrid_router_overlap_disagreement_ratio{{{POOL}}}", "{{worker}}"),),
                    "Share of tokens, over a worker's last 64 requests, about which index and worker disagree.",
                    "A worker that is far above the others has lost or late events.",
                    "index-untrusted",
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
                    "Requests of the fullest worker of a role, as a multiple of the mean. 1 is even.",
                    "Above 3 for long: raise `queue_weight` or set a `temperature`; see `poolgrid what-if`.",
                    "spread",
                    no_value="idle",
                ),
                Panel(
                    "Blocks in the index by worker",
                    "short",
                    (Query(f"poolgrid_router_worker_blocks{{{POOL}}}", "{{worker}}"),),
                    "Blocks that the index says a worker holds.",
                    "0 for a worker that works: it sends no events. Compare with its own on the Workers board.",
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
                    "What a gateway that asks over ext-proc was told: `picked`, or the error that its client got; and "
                    "requests that it then sent to another endpoint than the first it was told.",
                    "`busy`: more workers. `not_ready`, `no_worker`: engines are away. Served elsewhere: pods that the "
                    "gateway does not reach, and the router does.",
                    "queue-filling",
                    no_value="no gateway asks",
                ),
                Panel(
                    "What picks could go by",
                    "reqps",
                    (Query(rate(f"poolgrid_router_gateway_prompts_total{{{POOL}}}", ["known"]), "{{known}}"),),
                    "`tokens`: the prompt was known, and so the workers that hold its beginning. Anything else says "
                    "why only load counted.",
                    "`no_body`: the gateway does not send bodies; set `request_body_mode` as in deploy/envoy.",
                    "index-untrusted",
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
                    "Above the gateway's message_timeout it goes on without a pick: a core for the router, or a fast "
                    "tokenizer.",
                    "latency-objective",
                    no_value="no gateway asks",
                ),
                Panel(
                    "Requests of gateways under way",
                    "short",
                    (Query(f"sum by (pool) (poolgrid_router_gateway_in_flight{{{POOL}}})", "requests {{pool}}"),),
                    "Requests that have an endpoint and no end yet; each is load on the books.",
                    "It grows while clients are few: the gateway does not tell ends, see `response_header_mode` in "
                    "deploy/envoy.",
                    "queue-filling",
                    no_value="no router is scraped",
                ),
            ),
        ),
    ),
)
