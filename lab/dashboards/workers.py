"""Workers and their engines: batch, caches, transfers, what engines say of themselves."""

from __future__ import annotations

from lab.dashboards.model import Board, Panel, Query, Row, quantile, share
from lab.dashboards.selectors import NAMESPACES, POOL, POOLS, ROLES, WORKERS, by_worker

NO_WORKER = "no such worker is scraped"
TRTLLM = "TensorRT-LLM workers, whose own series are in the worker's answer"
VLLM = "vLLM's own `/metrics` among the scraped targets"


def _own(expr: str, legend: str = "{{worker}}") -> Query:
    return Query(by_worker(expr), legend)


def _gauge(name: str) -> str:
    return f"sum by (instance) (poolgrid_worker_{name}{{{POOL}}})"


def _each(name: str, label: str) -> str:
    return f"sum by (instance, {label}) (poolgrid_worker_{name}{{{POOL}}})"


def _rate(name: str) -> str:
    series = name if name.endswith("_sum") else f"{name}_total"
    return f"sum by (instance) (rate(poolgrid_worker_{series}{{{POOL}}}[$__rate_interval]))"


def _quantiles(name: str) -> tuple[Query, ...]:
    buckets = f"poolgrid_worker_{name}_bucket{{{POOL}}}"
    return tuple(Query(f"{quantile(q, buckets)} >= 0", f"p{q * 100:g}") for q in (0.5, 0.95))


WORKERS_BOARD = Board(
    "poolgrid-workers",
    "poolgrid: Workers and engines",
    "Batches, caches, transfers and health of workers, and the engines' own series.",
    (NAMESPACES, POOLS, ROLES, WORKERS),
    (
        Row(
            "Workers",
            (
                Panel(
                    "Workers by role and state",
                    "short",
                    (
                        Query(
                            f"max by (pool, model, role, state) (poolgrid_router_role_workers{{{POOL}, "
                            'role=~"$role"}) > 0',
                            "{{pool}} {{model}} {{role}}: {{state}}",
                        ),
                    ),
                    "Workers by state, as seen by the pools' routers.",
                    "`unreachable`: the request plane is down; see `/v1/workers`. `draining`: it is shutting down.",
                    "no-worker-of-a-role",
                    no_value="no worker is known",
                ),
                Panel(
                    "Requests in the batch",
                    "short",
                    (_own(_gauge("running_requests")),),
                    "Requests that hold blocks, by worker.",
                    "All at `max_batch_size`: the pool is full. One far above the others: see Spread on Routing.",
                    "spread",
                    no_value=NO_WORKER,
                ),
                Panel(
                    "Requests waiting at the worker",
                    "short",
                    (_own(_gauge("waiting_requests")),),
                    "Accepted requests that are not in the batch.",
                    "If it is high here and routers have no queue, lower `worker_queue_factor`.",
                    "queue-filling",
                    no_value=NO_WORKER,
                ),
                Panel(
                    "Time of an engine step",
                    "s",
                    _quantiles("engine_step_seconds"),
                    "Duration of an engine step, the lower bound of ITL.",
                    "It grows with the batch and its prefills: fewer requests per worker, or separate decode workers.",
                    "latency-objective",
                ),
                Panel(
                    "Tokens computed and generated",
                    "short",
                    (
                        _own(_rate("prefill_tokens"), "{{worker}} prefill/s"),
                        _own(_rate("decode_tokens"), "{{worker}} decode/s"),
                    ),
                    "Prompt tokens computed, and tokens decoded, per second.",
                    "Prefill without decode on an aggregated worker: very short answers, or cache warming.",
                    "cache-thrashing",
                    no_value=NO_WORKER,
                ),
                Panel(
                    "Start by phase",
                    "s",
                    (_own(_each("start_seconds", "phase"), "{{worker}} {{phase}}"),),
                    "Duration of the last start of each worker, by phase.",
                    "Long `fetch`: keep models on the machines (`hf download`). Long `load`: faster disks.",
                    "engine-unhealthy",
                    no_value=NO_WORKER,
                ),
                Panel(
                    "Engine health",
                    "short",
                    (_own(_gauge("engine_healthy")),),
                    "1 while the engine is healthy; 0 while it makes no progress.",
                    "0: read `/health` of the worker. Its requests continue on other workers; restart it.",
                    "engine-unhealthy",
                    kind="stat",
                    no_value=NO_WORKER,
                    mappings=(("1", "healthy", "green"), ("0", "unhealthy", "red")),
                ),
            ),
        ),
        Row(
            "Caches",
            (
                Panel(
                    "KV blocks held by requests",
                    "percentunit",
                    (_own(share(_gauge("active_blocks"), _gauge("total_blocks"))),),
                    "Share of device blocks that running requests hold.",
                    "Near 1: requests will be preempted. Use smaller batches, or add workers.",
                    "cache-thrashing",
                    maximum=1,
                    no_value=NO_WORKER,
                ),
                Panel(
                    "KV blocks with reusable content",
                    "percentunit",
                    (_own(share(_gauge("cached_blocks"), _gauge("total_blocks"))),),
                    "Share of device blocks with reusable content.",
                    "Near 1 is normal. New blocks then evict others: see Evictions.",
                    "cache-thrashing",
                    maximum=1,
                    no_value=NO_WORKER,
                ),
                Panel(
                    "Stored and evicted blocks",
                    "short",
                    (
                        _own(_rate("stored_blocks"), "{{worker}} stored/s"),
                        _own(_rate("evicted_blocks"), "{{worker}} evicted/s"),
                    ),
                    "Blocks stored in and evicted from the cache, per second.",
                    "Equal rates mean a full cache. It is too small if achievable reuse (Routing) is far above found.",
                    "cache-thrashing",
                    no_value=NO_WORKER,
                ),
                Panel(
                    "Prompt tokens reused, by workers",
                    "percentunit",
                    (
                        _own(
                            share(
                                _rate("cached_tokens"),
                                f"({_rate('cached_tokens')} + {_rate('prefill_tokens')})",
                            )
                        ),
                    ),
                    "Reused tokens as a share of reused and computed ones.",
                    "One worker far below the others: it gets uncached prompts, or lost its cache.",
                    "cache-thrashing",
                    maximum=1,
                ),
                Panel(
                    "Preemptions",
                    "short",
                    (_own(_rate("preemptions"), "{{worker}}/s"),),
                    "Requests that were preempted and computed again.",
                    "A steady rate: the cache is too small for the batch. Lower `max_batch_size`.",
                    "cache-thrashing",
                    no_value=NO_WORKER,
                ),
                Panel(
                    "Refusals by kind",
                    "reqps",
                    (
                        Query(
                            f"sum by (kind) (rate(poolgrid_worker_refusals_total{{{POOL}}}[$__rate_interval]))",
                            "{{kind}}",
                        ),
                    ),
                    "Requests refused by workers.",
                    "`busy` and `crowded` move to other workers. `broken`: an engine has failed.",
                    "engine-unhealthy",
                    no_value="no worker refused a request",
                ),
            ),
        ),
        Row(
            "KV transfers",
            (
                Panel(
                    "Time of a KV transfer",
                    "s",
                    _quantiles("kv_transfer_seconds"),
                    "From the query to the prefill worker until the blocks have arrived.",
                    "It grows with prompt length and with the load of the network between workers.",
                    "latency-objective",
                    needs="prefill and decode workers",
                    no_value="no KV was moved",
                ),
                Panel(
                    "Bytes of a KV transfer",
                    "bytes",
                    _quantiles("kv_transfer_bytes"),
                    "Bytes of one transfer, without blocks that were present.",
                    "Large for conversations: decode workers evict too much; see their caches.",
                    "cache-thrashing",
                    needs="prefill and decode workers",
                    no_value="no KV was moved",
                ),
                Panel(
                    "KV moved",
                    "Bps",
                    (_own(_rate("kv_transfer_bytes_sum")),),
                    "Bytes of KV per second to each decode worker.",
                    "Compare with the bandwidth between the hosts.",
                    "latency-objective",
                    needs="prefill and decode workers",
                    no_value=NO_WORKER,
                ),
            ),
        ),
        Row(
            "Engines' own series",
            (
                Panel(
                    "TensorRT-LLM: requests running and waiting",
                    "short",
                    (
                        Query(f"sum by (instance) (trtllm_num_requests_running{{{POOL}}})", "{{instance}} running"),
                        Query(f"sum by (instance) (trtllm_num_requests_waiting{{{POOL}}})", "{{instance}} waiting"),
                    ),
                    "The engine's own count of its batch.",
                    "If it differs from the worker's count for long, the worker has lost contact with the engine: "
                    "see its log.",
                    "engine-unhealthy",
                    needs=TRTLLM,
                    no_value="no TensorRT-LLM is scraped",
                ),
                Panel(
                    "TensorRT-LLM: KV use",
                    "percentunit",
                    (Query(f"trtllm_kv_cache_utilization{{{POOL}}}", "{{instance}}"),),
                    "Share of the engine's KV blocks in use, by its own count.",
                    "Near 1: use smaller batches, or add workers.",
                    "cache-thrashing",
                    maximum=1,
                    needs=TRTLLM,
                    no_value="no TensorRT-LLM is scraped",
                ),
                Panel(
                    "vLLM: requests running and waiting",
                    "short",
                    (
                        Query(f"sum by (instance) (vllm:num_requests_running{{{POOL}}})", "{{instance}} running"),
                        Query(f"sum by (instance) (vllm:num_requests_waiting{{{POOL}}})", "{{instance}} waiting"),
                    ),
                    "vLLM's own count of its batch.",
                    "Waiting above 0 for long while others are idle: see Spread on the Routing dashboard.",
                    "queue-filling",
                    needs=VLLM,
                    no_value="no vLLM is scraped",
                ),
                Panel(
                    "vLLM: KV use and prefix hits",
                    "percentunit",
                    (
                        Query(f"vllm:kv_cache_usage_perc{{{POOL}}}", "{{instance}} KV in use"),
                        Query(
                            f"sum by (instance) (rate(vllm:prefix_cache_hits_total{{{POOL}}}[$__rate_interval])) / "
                            f"(sum by (instance) (rate(vllm:prefix_cache_queries_total{{{POOL}}}[$__rate_interval]))"
                            " > 0)",
                            "{{instance}} prefix hits",
                        ),
                    ),
                    "Share of KV in use, and prefix cache hit rate.",
                    "Hits far below `reused` on the Routing dashboard: its events do not reach the consolidator.",
                    "cache-thrashing",
                    maximum=1,
                    needs=VLLM,
                    no_value="no vLLM is scraped",
                ),
            ),
        ),
    ),
)
