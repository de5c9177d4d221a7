"""Every verdict on a worker: of the router's doctor, of a recorded journal, and of a check of an engine server."""

from __future__ import annotations

from poolgrid.server.diagnosis.diagnosis import Diagnosis


class Cause(Diagnosis):
    """Why reuse is what it is; a fault raises an alert."""

    AGREES = ("agrees", False, "the worker reuses what the router promises", "")
    COLD = ("cold-workload", False, "prompts share too little for reuse: a low hit rate is no fault", "")
    UNKNOWN = (
        "unknown",
        False,
        "too few requests with reused tokens to judge",
        "send requests that share prefixes",
    )
    UNREPORTED = (
        "reuse-unreported",
        False,
        "the engine does not report how many tokens it reuses, so nothing can be compared",
        "vLLM: `--enable-prompt-tokens-details`; SGLang: `--enable-cache-report`",
    )
    EVENTS_UNFIT = (
        "events-unfit",
        True,
        "the worker itself reports what is wrong with the KV events of its engine",
        "do what the evidence says, and check it with `poolgrid engine-check`",
    )
    TRUNCATED = (
        "truncated-prompts",
        True,
        "the engine cuts prompts that the router hashes whole",
        "raise the engine's context length, or remove `truncate_prompt_tokens` from requests",
    )
    ADDED_TOKENS = (
        "added-tokens",
        True,
        "the engine puts a token before each prompt, or leaves one out, so no block of it is the router's",
        "let both add the same special tokens (`add_special_tokens`, chat template)",
    )
    TEMPLATE = (
        "template",
        True,
        "prompts differ by a constant number of tokens at the engine: another chat template or added system prompt",
        "give both the same model directory and chat template, and render one chat with each",
    )
    TOKENIZER = (
        "tokenizer",
        True,
        "the engine makes another number of tokens of prompts: another tokenizer, or template per message",
        "give both the same tokenizer files, revision and chat template; compare `POST /tokenize` of both",
    )
    CACHING_OFF = (
        "caching-off",
        True,
        "the engine computes again what it was sent before, and stores no block: its prefix cache is off",
        "vLLM: `--enable-prefix-caching`; SGLang: no `--disable-radix-cache`; TensorRT-LLM: `enable_block_reuse`",
    )
    WRONG_ENDPOINT = (
        "wrong-endpoint",
        True,
        "the KV events that are read for the worker are another engine's, or none ever came",
        "correct `--kv-events-endpoint` (each rank adds its number to the port); check it with `poolgrid engine-check`",
    )
    CROSSED = (
        "crossed-workers",
        True,
        "prompts of the worker come in the events of another one: its URL, rank or event port is that one's",
        "compare the server URL, the rank and the event port of both workers: rank n adds n to the port",
    )
    SHARED_URL = (
        "several-engines",
        True,
        "several engines or ranks answer the requests of the worker",
        "give the worker the address of one engine, and let a proxy between them keep the header of the rank",
    )
    SAME_ENGINE = (
        "same-engine",
        True,
        "two workers are one engine under two names: its load is counted twice",
        "remove one of the two workers",
    )
    GAP = (
        "gap",
        True,
        "KV events were lost and no replay filled the gap",
        "configure a replay endpoint that answers, and larger `buffer_steps`; TensorRT-LLM: `event_buffer_max_size`",
    )
    RESTART = (
        "restart",
        True,
        "the engine or its worker restarted, and the index does not match its cache yet",
        "wait for the resync; if it repeats, find out why the engine restarts",
    )
    SALT = (
        "salt",
        True,
        "only requests with a cache_salt disagree: the engine does not apply the salt, or does not report it",
        "use an engine version whose events carry `extra_keys`; until then do not isolate tenants on it",
    )
    ADAPTER = (
        "adapter",
        True,
        "only requests to a LoRA adapter disagree: the engine names the adapter differently",
        "use an engine version whose events carry `lora_name`",
    )
    BLOCK_SIZE = (
        "block-size",
        True,
        "the engine stores blocks of another size than the router hashes",
        "set `--kv-block-size` to the size in the evidence",
    )
    NO_EVENTS = (
        "no-events",
        True,
        "the worker reuses its cache, and no event ever stored a block: events are off, or read at an idle engine",
        "vLLM, SGLang: `--kv-events-config`; TensorRT-LLM: `event_buffer_max_size`; or correct the endpoint",
    )
    EVENTS_STOPPED = (
        "events-stopped",
        True,
        "the worker reported blocks earlier, and no event has stored one since",
        "look for a dead publisher thread in the engine's log, and restart the engine",
    )
    EVENTS_LATE = (
        "events-late",
        True,
        "KV events come seconds after the prompts that they are about",
        "look for a busy network, consolidator or event publisher between engine and router",
    )
    UNMATCHED = (
        "events-unmatched",
        True,
        "events arrive, and name none of the prompts that the worker computed; not yet known why: another server's "
        "endpoint, other token ids, or keys that events leave out",
        "run `poolgrid engine-check --url SERVER`, which compares events with its own prompts",
    )
    WINDOW = (
        "window",
        True,
        "the engine resumes in other steps than the attention window or checkpoint interval in the index",
        "remove the window options, so that the sizes from the engine's events count",
    )
    GROUP = (
        "group-hidden",
        True,
        "the engine resumes prompts in larger steps than its events tell, as a hidden KV group or checkpoint makes it",
        "use an engine version whose events name all KV groups (`kv_cache_spec_kind`), or `--policy approximate`",
    )
    RECOMPUTED = (
        "recomputed-blocks",
        True,
        "the engine computes the last blocks of what it holds again, as speculative decoding does",
        "nothing if drafting is wanted: its reuse is shorter by these tokens; else remove the drafting option",
    )
    TIER = (
        "tier-unannounced",
        True,
        "the worker reuses blocks that it reported as removed: a lower tier holds them and reports nothing",
        "enable the events of the offloading connector; until then its reuse cannot be planned",
    )
    ASLEEP = (
        "sleeping-engine",
        True,
        "the engine dropped its cache without an event, as sleep and weight updates do",
        "`poolgrid drain` the worker before the engine sleeps, or reset its cache by an API that publishes the event",
    )
    FOREIGN = (
        "foreign-traffic",
        True,
        "requests of another router or client evict the blocks that this router reuses",
        "send all requests through the routers of this pool, or give the other client engines of its own",
    )
    REUSES_LESS = (
        "reuses-less",
        True,
        "the worker reuses fewer tokens than its events promise; not yet known why",
        "run `poolgrid engine-check --url SERVER --out FILE`; report the file and `poolgrid doctor --json`",
    )
    REUSES_MORE = (
        "reuses-more",
        True,
        "the worker reuses more tokens than its events promise; not yet known why",
        "run `poolgrid engine-check --url SERVER --out FILE`; report the file and `poolgrid doctor --json`",
    )
