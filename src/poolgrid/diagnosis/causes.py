"""The causes that a verdict names. Each has a section of its name in ``docs/runbooks/reuse-parted.md``."""

from __future__ import annotations

from enum import Enum


class Cause(Enum):
    """A cause: its name, whether it raises an alert, what it means and what to change."""

    def __new__(cls, name: str, is_fault: bool, meaning: str, fix: str) -> Cause:
        cause = object.__new__(cls)
        cause._value_ = name
        cause.is_fault = is_fault
        cause.meaning = meaning
        cause.fix = fix
        return cause

    is_fault: bool
    meaning: str
    fix: str

    AGREES = ("agrees", False, "the worker reuses what the router promises", "")
    COLD = ("cold-workload", False, "prompts share too little for reuse: a low hit rate is no fault", "")
    UNKNOWN = (
        "unknown",
        False,
        "too few requests with reused tokens to judge",
        "send requests that share prefixes, and let the engine report cached_tokens",
    )
    TRUNCATED = (
        "truncated-prompts",
        True,
        "the engine cuts prompts that the router hashes whole",
        "raise the engine's context length, or give the worker the real one with --max-seq-len",
    )
    TEMPLATE = (
        "template",
        True,
        "the engine renders another chat template than the router",
        "give router and engine the same model directory and chat template",
    )
    TOKENIZER = (
        "tokenizer",
        True,
        "the engine splits text into other tokens than the router",
        "give router and engine the same tokenizer files and revision",
    )
    WRONG_ENDPOINT = (
        "wrong-endpoint",
        True,
        "no KV event of the worker has ever arrived from its endpoint",
        "correct the event endpoint and the port of the rank; check it with poolgrid engine-check",
    )
    GAP = (
        "gap",
        True,
        "KV events were lost and no replay filled the gap",
        "configure a replay endpoint and a larger buffer on the engine",
    )
    RESTART = (
        "restart",
        True,
        "the engine or its worker restarted, and the index does not match its cache yet",
        "wait for the full resync; if it repeats, find out why the engine restarts",
    )
    SALT = (
        "salt",
        True,
        "only requests with a cache_salt disagree: the engine does not apply the salt, or does not report it",
        "use an engine version whose events carry extra_keys; do not isolate tenants on this engine until then",
    )
    ADAPTER = (
        "adapter",
        True,
        "only requests to a LoRA adapter disagree: the engine names the adapter differently",
        "use an engine version whose events carry lora_name",
    )
    BLOCK_SIZE = (
        "block-size",
        True,
        "the engine reuses in blocks of another size than the router hashes",
        "set --kv-block-size to the size of the engine",
    )
    HASH = (
        "hash-algorithm",
        True,
        "events arrive, and none of the blocks in them has the name of a prompt that the worker computed",
        "use the same poolgrid version on router and worker, and the hash version that the engine reports",
    )
    EVENTS_OFF = (
        "events-off",
        True,
        "the worker reuses its cache and has never reported a block",
        "enable KV events on the engine (vLLM: --kv-events-config; TensorRT-LLM: event_buffer_max_size above 0)",
    )
    EVENTS_STOPPED = (
        "events-stopped",
        True,
        "the worker reported blocks earlier, and no longer reports those of new prompts",
        "restart the engine's event publisher, and check its log for a blocked or dead publisher thread",
    )
    WINDOW = (
        "window",
        True,
        "the index assumes another attention window or checkpoint interval than the engine has",
        "remove the window options, so that the sizes from the engine's events count",
    )
    GROUP = (
        "group-hidden",
        True,
        "the engine needs a KV group that the index does not know to resume a prompt",
        "publish the events of all KV groups (vLLM: kv_cache_spec_kind in events), or use --policy approximate",
    )
    TIER = (
        "tier-unannounced",
        True,
        "the worker reuses blocks that it reported as removed: a lower tier holds them and reports nothing",
        "enable the events of the offloading connector, or count the tier out of --host-cache options",
    )
    ASLEEP = (
        "sleeping-engine",
        True,
        "the engine dropped its cache without an event, as sleep and weight updates do",
        "drain the worker before the engine sleeps, or reset its prefix cache by an API that publishes the event",
    )
    FOREIGN = (
        "foreign-traffic",
        True,
        "requests of another router or client evict the blocks that this router reuses",
        "send all requests through the routers of this pool, or give the other client engines of its own",
    )
    UNEXPLAINED = (
        "unexplained",
        True,
        "promised and reported reuse disagree, and no rule explains it",
        "run poolgrid engine-check --record against the engine and report the file",
    )


OF_FINDING = {
    "events off": Cause.EVENTS_OFF,
    "publisher connects": Cause.WRONG_ENDPOINT,
    "endpoint refused": Cause.WRONG_ENDPOINT,
    "no publisher": Cause.WRONG_ENDPOINT,
    "ports collide": Cause.WRONG_ENDPOINT,
    "rank without source": Cause.WRONG_ENDPOINT,
    "rank silent": Cause.EVENTS_OFF,
    "wrong rank": Cause.WRONG_ENDPOINT,
    "wrong topic": Cause.WRONG_ENDPOINT,
    "restarted": Cause.RESTART,
    "sequence jumps": Cause.GAP,
    "replay missing": Cause.GAP,
    "replay silent": Cause.GAP,
    "replay differs": Cause.GAP,
    "block size": Cause.BLOCK_SIZE,
    "tokens missing": Cause.HASH,
    "tokens and hashes": Cause.HASH,
    "windows": Cause.WINDOW,
    "groups unnamed": Cause.GROUP,
    "salt missing": Cause.SALT,
    "salt ignored": Cause.SALT,
    "LoRA unnamed": Cause.ADAPTER,
    "order of keys": Cause.SALT,
    "keys unknown": Cause.HASH,
    "other medium": Cause.TIER,
    "blocks missing": Cause.EVENTS_STOPPED,
    "not taken in": Cause.HASH,
}
"""The cause behind a finding of ``poolgrid engine-check``; the other kinds have none."""
