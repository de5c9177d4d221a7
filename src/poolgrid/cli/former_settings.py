"""Settings that were removed or renamed, by option: what to use in their place. Refused by name for one version."""

from __future__ import annotations

FORMER_SETTINGS: dict[str, str] = {
    # router, global router, admission
    # front end: HTTP, tenants, media, tracing
    # consolidator, feed, discovery, NATS
    "--resend-retry-ms": "Missing batches are asked for again every 200 ms.",
    "--stale-after-ms": "A gap makes a worker's blocks untrusted after 2 s.",
    "--segment-bytes": "A segment of a journal is closed at 64 MiB; --retention-bytes bounds the journal.",
    "--snapshot-every-records": "A snapshot is written every 50,000 records.",
    "--fsync-interval-ms": "With --fsync interval the journal is made durable every 100 ms.",
    "--append-retry-ms": "A failed append is tried again every 500 ms.",
    "--memory-journal-bytes": "Without --data-dir 64 MiB of records are kept for replay.",
    "--feed-interval-ms": "Records that follow each other within 2 ms are published together.",
    "--feed-keep-alive-ms": "A silent feed announces its offset every 500 ms.",
    "--feed-high-water-mark": "20,000 messages are queued for a slow router.",
    "--workers-max": "A pool has at most 4,096 worker ranks; divide a larger one into several pools.",
    "--sources-per-worker-max": "A worker rank has at most 8 event sources.",
    "--blocks-per-worker-max": "4,194,304 blocks are remembered for each worker rank.",
    "--nats-timeout-ms": "An answer of NATS may take 5 s.",
    "--names-replicas": "Use --nats-replicas, which holds for all that a process makes on NATS.",
    "--decision-queue-limit": "20,000 inputs of decisions may wait to be written.",
    "--decision-stream-bytes": "Decisions are recorded in the router's --data-dir, also with --event-plane nats.",
    # workers: common
    # workers: TensorRT-LLM
    # workers: servers and the simulated engine
    # up, bench, simulate, engine-check, model, journal
}
"""Option as it was typed, such as ``--feed-interval-ms``, to one sentence: the new option, or the fixed value."""
