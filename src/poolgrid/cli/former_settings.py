"""Settings that were removed or renamed, by option: what to use in their place. Refused by name for one version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

FORMER_SETTINGS: dict[str, str] = {
    # router, global router, admission
    "--path-cache-bytes": "64 MiB of prompt hashes are kept.",
    "--reuse-sketch-bytes": "64 MiB remember which prompts were seen.",
    "--decision-log-bytes": "The decisions kept for /v1/decisions take at most 64 MiB.",
    "--decision-log-length": "The last 10,000 decisions are kept for /v1/decisions.",
    "--queue-aging-tokens-per-s": "With shortest-uncached-work-first a second of waiting makes up for 4,000 tokens.",
    "router --local-prefill-max-tokens": "one leg or two is decided by expected time; --legs two for always two.",
    "router --crowding-retries": "A request is chosen again up to 4 times when a worker has more load than was known.",
    **dict.fromkeys(
        (
            "--prefill-weight",
            "--queue-weight",
            "--decode-weight",
            "--overlap-weight",
            "--device-weight",
            "--host-weight",
            "--disk-weight",
        ),
        "policy kv counts in milliseconds, which have no weights; give workers --timing FILE for their step times.",
    ),
    "router --temperature": "policy kv takes the least cost; --policy random spreads requests.",
    "simulate --temperature": "policy kv takes the least cost; --policy random spreads requests.",
    "what-if --temperature": "policy kv takes the least cost; --policy random spreads requests.",
    "--retention": "a request sets how long its blocks stay (nvext.kv_cache_retention_config); nothing is learned.",
    "--status-interval-ms": "A pool's router is asked for its status every 250 ms.",
    "--status-timeout-ms": "A pool without a status for 2 s is down.",
    "--select-timeout-ms": "A pool's router has 1 s to select a worker.",
    "--probe-timeout-ms": "Pools have 50 ms to report what they have cached.",
    "--connect-timeout-ms": "A worker has 1 s to accept a connection.",
    "--link-idle-ms": "A connection to a worker that was unused for 10 minutes is closed.",
    "--move-timeout-ms": "A request whose worker was lost waits up to 10 s for a pool with room.",
    "--reload-interval-ms": "The document's file is looked at every second; SIGHUP has it read at once.",
    # front end: HTTP, tenants, media, tracing
    "--template-time-limit-ms": "a chat template may render for 2,000 ms.",
    "--max-body-values": "a body may have 327,680 values, and more in proportion to --max-body-bytes above 32 MiB.",
    "--api-keys-check-ms": "the file of API keys is looked at once a second at most.",
    "--guide-compile-limit-ms": "a structured-output grammar may compile for 250 ms of CPU time.",
    "--guide-step-limit-ms": "one token under a structured-output grammar may take 25 ms of CPU time.",
    "--guide-check-queue": "64 grammars may wait for their trial, 16 of one tenant.",
    "--fleet-page-interval-ms": "the fleet page is sent a change every 250 ms at most.",
    "--fleet-page-viewers": "16 viewers may look at the fleet page of one process.",
    "--tokenizer-inline-bytes": "4,096 bytes of new text are tokenized on the event loop, 65,536 with fastokens.",
    "--tokenizer-queue": "256 long prompts may wait for a tokenizer thread.",
    "--max-choices": "128 sequences may be asked for in one request, as with OpenAI's n.",
    "--max-stop-strings": "a request may have 16 stop strings.",
    "--max-stop-chars": "a stop string may have 256 characters.",
    "--max-prompt-chars": "a chat template may render 33,554,432 characters.",
    "--gzip-request-members": "a compressed body may have 1,024 gzip members.",
    "--gzip-request-ratio": "a compressed body may inflate to 100 times its length.",
    "--gzip-request-timeout-ms": "a compressed body may inflate for 5,000 ms.",
    "--gzip-response-bytes": "answers of 4,096 bytes and more are compressed for clients that accept gzip.",
    "--media-image-formats": "PNG, JPEG, WEBP and GIF are taken.",
    "--max-media-request-mb": "the media of one request may have 52 MiB, which is what a message to a worker holds.",
    "--max-image-pixels": "an image may have 50,000,000 pixels.",
    "--media-redirects-max": "three redirects are followed.",
    "--media-fetches-max": "32 media are fetched at a time.",
    "--media-cache-ttl-ms": "a fetched URL is kept for 60,000 ms.",
    **dict.fromkeys(
        ("router --max-file-size-mb", "global-router --max-file-size-mb"),
        "a medium may have 50 MiB; give workers --max-file-size-mb for less.",
    ),
    "--max-media-items": "a request may have 64 media.",
    "--media-cache-mb": "256 MiB of fetched media are kept.",
    "--media-fetch-timeout-ms": "a URL may take 10 s, from the name lookup to the last byte.",
    "--response-store-ttl-s": "a conversation is kept for 30 days after its last use.",
    "--fast-tokenizer": "fastokens is used where it is installed and agrees with tokenizers on every probe.",
    "--no-fast-tokenizer": "uninstall the fastokens package.",
    "--trace-protocol": "set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL; port 4318 or a path means http/protobuf.",
    "--http-header-line-bytes": "A line of a head may have 8 KiB.",
    "--http-headers": "A request may have 100 header fields.",
    "--http-header-timeout-ms": "use --http-request-timeout-ms, which is for heads and bodies.",
    "--http-body-timeout-ms": "use --http-request-timeout-ms, which is for heads and bodies.",
    "--http-body-bytes-per-s": "Each 10 kB of a body that came add a second to --http-request-timeout-ms.",
    "--http-pipeline-bytes": "64 KiB of further requests are read while one is in flight.",
    # consolidator, feed, discovery, NATS
    "--resend-retry-ms": "Missing batches are asked for again every 200 ms.",
    "--stale-after-ms": "A gap makes a worker's blocks untrusted after 2 s.",
    "--segment-bytes": "A segment of a journal is closed at 64 MiB; --journal-retention-bytes bounds the journal.",
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
    "--load-interval-ms": "Load reports of a busy worker are at least 100 ms apart.",
    "--heartbeat-ms": "Workers send a heartbeat every second.",
    "--check-model": "Run poolgrid model fetch MODEL --check before the start.",
    "--no-check-model": "Leave it out: a worker does not read its whole model before the start.",
    # workers: TensorRT-LLM
    **dict.fromkeys(
        (
            "--pipeline-parallel-size",
            "--expert-parallel-size",
            "--gpus-per-node",
            "--max-beam-width",
            "--load-format",
            "--event-buffer-max-size",
        ),
        "give TensorRT-LLM's own argument in --extra-engine-args or --override-engine-args.",
    ),
    "--kept-transfers-max": "at most 256 prefilled requests are kept at a time.",
    "--max-requests": "at most 8192 requests are in the engine.",
    "--health-interval-ms": "an idle engine proves itself every 30 s.",
    "--health-timeout-ms": "the one-token generation of a health check may take 30 s.",
    "--rank-lease-ms": "srun or mpirun watches the ranks of an engine that spans nodes.",
    "--rank-start-timeout-ms": "srun or mpirun starts the ranks.",
    "--nodes": "start the worker by deploy/slurm/rank.sh under srun or mpirun, once for each GPU.",
    "--leader-host": "srun or mpirun watches the ranks of an engine that spans nodes.",
    "--rank-port": "srun or mpirun watches the ranks of an engine that spans nodes.",
    "--rank-launcher": "deploy/slurm/rank.sh starts the program that RANK_LAUNCHER names.",
    "--tensor-store-mb": "256 MiB of embeddings are kept for other workers.",
    "--outbox-bytes": "32 MiB of unacknowledged events are kept; beyond it the cache is restated.",
    "--kv-events-topic": "all topics of a publisher are received.",
    "--tensor-lease-ms": "embeddings that no worker asks for are kept for 10 s.",
    "--tensor-fetch-timeout-ms": "an encode worker that is silent for 2 s has failed the fetch.",
    "--tensor-chunk-kb": "tensors travel in pieces of 1 MiB.",
    "--backend": "the backend is pytorch; for AutoDeploy use --engine trtllm-serve.",
    "--gpu-interval-ms": "workers show no GPU metrics, run dcgm-exporter.",
    # workers: servers and the simulated engine
    "--engine-stop-timeout-s": "A server of the worker's own has 60 s to end.",
    "--engine-restarts-max": "A server of the worker's own may die three times in a row.",
    "--max-waiting-requests": "At most 4096 requests wait in a simulated engine.",
    "--eos-probability": "Give --output-tokens-mean: answers end by their length.",
    "--kv-bytes-per-token": "A token has 131,072 bytes of KV.",
    "--kv-transfer-latency-ms": "The set-up of a transfer takes 1 ms.",
    "--kv-fetch-timeout-ms": "A simulated decode worker waits 2 s for a prefill worker's answer.",
    "--encode-ms-per-image": "A simulated encode worker takes 20 ms for an image.",
    "--load-bytes": "A simulated load has 16,000,000,000 bytes; --load-ms sets its time.",
    # up, bench, simulate, engine-check, model, journal
    "--ext-proc-fallbacks": "a gateway gets two endpoints in addition to the first.",
    "--front-prefill": "use --engine-url prefill=URL.",
    "--front-decode": "use --engine-url decode=URL.",
    "--prefill-engine-args": "use --engine-args prefill=FILE.",
    "--decode-engine-args": "use --engine-args decode=FILE.",
    "--encode-engine-args": "use --engine-args encode=FILE.",
    "--router-option": "use --part-option router.NAME=VALUE.",
    "--consolidator-option": "use --part-option consolidator.NAME=VALUE.",
    "--worker-option": "use --part-option worker.NAME=VALUE.",
    "--prefill-option": "use --part-option prefill.NAME=VALUE.",
    "--decode-option": "use --part-option decode.NAME=VALUE.",
    "--encode-option": "use --part-option encode.NAME=VALUE.",
    "--worker-gpus": "use --gpus worker=LIST.",
    "--prefill-gpus": "use --gpus prefill=LIST.",
    "--decode-gpus": "use --gpus decode=LIST.",
    "--encode-gpus": "use --gpus encode=LIST.",
    "--restarts-max": "a real engine's worker is given up after 3 deaths in a row, a simulated one never.",
    "--stop-timeout-s": "a worker with a real engine has 60 s to end, a simulated one 10 s.",
    "--warm-up": "a pool with a real engine is warmed up before it is ready, a simulated one is not.",
    "--no-warm-up": "a pool with a real engine is warmed up before it is ready, a simulated one is not.",
    "up --queue-limit": "use --part-option router.max-queue-requests=N (with --pools: global-router).",
    "up --isolate-tenants": "use --part-option router.isolate-tenants, or global-router.isolate-tenants with --pools.",
    "up --access-log": "use --part-option router.access-log, or global-router.access-log with --pools.",
    "up --blocks-per-worker": "use --part-option worker.total-kv-blocks=N.",
    "up --max-sequence-length": "use --part-option worker.max-seq-len=N.",
    "up --output-tokens-mean": "use --part-option worker.output-tokens-mean=N.",
    "bench --duration": "use --duration-s.",
    "--against": "give --url several endpoints, separated by commas.",
    "bench --api-key": "set POOLGRID_API_KEY.",
    "bench --text": "use --endpoint text.",
    "bench --isl-max": "use --isl, which cuts the prompts of a replay.",
    "bench --osl-max": "use --osl, which cuts the answers of a replay.",
    "--arrivals": "the arrivals of an open loop are a Poisson process.",
    "--max-in-flight": "at most 900 requests are in flight.",
    "bench --connect-timeout-s": "a connection has 10 s.",
    "bench --request-timeout-s": "an answer has 600 s.",
    "--token-id-min": "prompts have token ids from 16 to 255.",
    "--token-id-max": "prompts have token ids from 16 to 255.",
    "bench --plot": "draw the JSON of --out with a tool of your choice.",
    "what-if --plot": "draw the JSON of --out with a tool of your choice.",
    "--host-blocks-per-worker": "simulated engines of a trace have no host tier.",
    "simulate --max-batch-size": "it is the simulated engine's default.",
    "simulate --max-num-tokens": "it is the simulated engine's default.",
    "--separate-routers": "lab/benchmarks compares routers without a shared stream.",
    "simulate --crowding-retries": "it is the router's default.",
    "--slowdowns": "use --worker-speeds, which holds for the whole run.",
    "--ttft-targets-ms": "lab/benchmarks measures how many targets are met.",
    "--hide-targets": "lab/benchmarks measures how many targets are met.",
    "engine-check --topic": "all topics are received.",
    "engine-check --salt": "probes with a cache_salt are always sent.",
    "engine-check --no-salt": "probes with a cache_salt are always sent.",
    "--prompt-tokens-max": "the longest probe has 2,048 tokens.",
    "--token-ids-below": "probes have token ids from 256 to 3,999.",
    "engine-check --timeout-s": "an answer has 60 s.",
    "--settle-ms": "the events of a probe are complete when none came for 300 ms.",
    "--lengths": "prompts of 16, 64, 256, 1,024, 4,096 and 16,384 tokens are measured.",
    "--repeats": "five prompts of each length are measured.",
    "--measure-timeout-s": "the measurement ends after 600 s with the points it has.",
    "--attempts": "poolgrid model fetch tries a hub that fails again six times, at growing intervals.",
    # constants
    "--approximate-ttl-ms": "policy approximate assumes for 120 s that a worker keeps a prompt.",
    "--hold-limit-ms": "policy kv holds a request for at most 4 s.",
    "--host-kv-blocks": "a simulated worker has no host tier.",
    "--timing-table": "use --timing FILE.",
    "--nats-nkey": "use --nats-credentials, which takes the seed of an nkey too.",
    "--ledger-budget-bytes": "the load ledger takes at most 256 MiB.",
    "--reservation-ttl-ms": "a predicted load that no worker confirms is forgotten after 30 s.",
    "--tokenizer-threads": "long prompts are tokenized on two threads; set --http-workers for more.",
    "--tokenization-cache-bytes": "token ids of prompt segments are cached in a fixed share of memory.",
    "--share-word-cache": "isolated tenants share no word cache.",
    "--no-share-word-cache": "isolated tenants share no word cache.",
    "--http-head-bytes": "a head may have 32 KiB.",
    "--http-write-timeout-ms": "a client that reads nothing for 60 s is cut off.",
    "--http-unfinished-bytes": "requests that are not complete take at most 512 MiB.",
    "--peer-lease-ms": "requests of a router that is silent for 10 s are cancelled.",
    "--answer-timeout-ms": "a call of the engine may take 5 s before the worker leaves the pool.",
    "--first-token-id": "token ids from 3 on are generated, or words with --model-path.",
    "--eos-token-id": "token id 2 ends an output, or the one of the model at --model-path.",
    "--output-tokens-stddev": "the lengths of outputs have a standard deviation of 250 tokens.",
    "--kv-transfer-gigabytes-per-s": "the bandwidth of a simulated KV transfer is fixed; --speedup multiplies it.",
    "--shared-prefixes": "all conversations share one system prompt.",
    "--ready-timeout-s": "use --start-timeout-ms, with 1,000 times the value.",
    "bench --logs": "use --out DIR.",
    "engine-check --events": "use --kv-events-endpoint.",
    "engine-check --replay": "use --kv-events-replay-endpoint.",
    "--block-size": "use --kv-block-size.",
    "--max-sequence-length": "use --max-seq-len.",
    "--tokenizer-path": "use --model-path.",
    "--engine-speedup": "use --speedup.",
    "--blocks-per-worker": "use --total-kv-blocks.",
    "--event-delay-ms": "events reach simulated routers at once.",
    "--engine-log-dir": "use --log-dir.",
    "--names-lease-ms": "a registration lasts 10 s.",
    "--names-lease-s": "a registration lasts 10 s.",
    "--keep-alive-interval-s": "a stream that is silent for 15 s gets a comment.",
    "--max-ext-proc-streams": "gateways may have 4,096 requests in flight.",
    "--ext-proc-streams": "gateways may have 4,096 requests in flight.",
    "--ext-proc-body-bytes": "256 MiB of incomplete requests of gateways are kept.",
    "--media-memory-bytes": "1,024 MiB of media of requests in flight are kept.",
    "--media-memory-mb": "1,024 MiB of media of requests in flight are kept.",
    # renamed
    "--leader-lease-s": "use --leader-lease-ms, with 1,000 times the value.",
    "--backend-url": "use --engine-url.",
    "--model-name": "use --served-model-name.",
    "worker --model": "use --served-model-name.",
    "--retention-bytes": "use --journal-retention-bytes.",
    "--retention-ms": "use --journal-retention-ms.",
    "--engine-start-timeout-s": "use --start-timeout-ms, with 1,000 times the value.",
    "--start-timeout-s": "use --start-timeout-ms, with 1,000 times the value.",
    "--queue-limit": "use --max-queue-requests.",
    "--queue-prompt-tokens": "use --max-queue-prompt-tokens.",
    "--http-connections": "use --max-connections.",
    "--http-connections-per-address": "use --max-connections-per-address.",
}
"""Option as it was typed, such as ``--feed-interval-ms``, to one sentence: the new option, or the fixed value.

An option that only one command has lost stands with the command before it, such as ``bench --timeout-s``.
"""


def former_setting(command: str, words: Iterable[str], environment: Mapping[str, str]) -> str:
    """Return the line that refuses a setting which a command no longer has; empty when it is given none.

    ``words`` are the command line, up to the first ``--``.
    """
    for word in words:
        if word == "--":
            break
        option = word.partition("=")[0]
        if reason := _reason(command, option):
            return _refusal(option, reason)
    for entry in FORMER_SETTINGS:
        of_command, _, option = entry.rpartition(" ")
        variable = "POOLGRID_" + option[2:].replace("-", "_").upper()
        # The variable of an option that one command lost may be meant for another command.
        if not of_command and variable in environment:
            return _refusal(f"{option} ({variable})", FORMER_SETTINGS[entry])
    return ""


def former_name(command: str, name: str) -> str:
    """Return the line that refuses a name in a settings file; empty when it never was a setting."""
    option = "--" + name.replace("_", "-")
    reason = _reason(command, option)
    return _refusal(option, reason) if reason else ""


def _refusal(given: str, reason: str) -> str:
    return f"{given}: removed. {reason[0].upper()}{reason[1:]}"


def _reason(command: str, option: str) -> str:
    return FORMER_SETTINGS.get(f"{command} {option}") or FORMER_SETTINGS.get(option, "")
