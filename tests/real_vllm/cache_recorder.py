"""Drives vLLM's own cache manager, with generated requests and no model, and records what it publishes and reuses.

Run by the Python of an environment with vLLM, of which it imports the cache manager alone:
``python cache_recorder.py DIRECTORY STREAMS REQUESTS MODEL ...``. For each model a file of msgpack is written: for each
stream the frames in order, and for each request how many frames came before it, its prompt, and the tokens that vLLM
reused. A model that this version does not have is left out.
"""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 16
CHUNK_TOKENS = 64
"""Tokens of a prefill step: most prompts take several."""

VOCABULARY = 2000
MODEL_LENGTH = 4096
DRAFTED_TOKENS = 3

cache_manager = importlib.import_module("vllm.v1.core.kv_cache_manager")
cache_utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
specs = importlib.import_module("vllm.v1.kv_cache_interface")
events = importlib.import_module("vllm.distributed.kv_events")
requests = importlib.import_module("vllm.v1.request")
sampling = importlib.import_module("vllm.sampling_params")
hashing = importlib.import_module("vllm.utils.hashing")
msgspec = importlib.import_module("msgspec")
torch = importlib.import_module("torch")


def fitting(make: Callable[..., Any], **arguments: Any) -> Any:
    """Call with those arguments that this version knows."""
    known = inspect.signature(make).parameters
    return make(**{name: value for name, value in arguments.items() if name in known})


def attention(kind: str, block_tokens: int, **more: Any) -> Any:
    make = getattr(specs, kind)
    return make(block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32, **more)


def full(block_tokens: int = BLOCK_TOKENS) -> Any:
    return attention("FullAttentionSpec", block_tokens)


def window(tokens: int, block_tokens: int = BLOCK_TOKENS) -> Any:
    return attention("SlidingWindowSpec", block_tokens, sliding_window=tokens)


def mla() -> Any:
    return attention("MLAAttentionSpec", BLOCK_TOKENS)


def window_mla(tokens: int) -> Any:
    return attention("SlidingWindowMLASpec", BLOCK_TOKENS, sliding_window=tokens)


def chunked(tokens: int) -> Any:
    return attention("ChunkedLocalAttentionSpec", BLOCK_TOKENS, attention_chunk_size=tokens)


def state(block_tokens: int = BLOCK_TOKENS, mode: str = "align") -> Any:
    return specs.MambaSpec(block_size=block_tokens, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode=mode)


class Model:
    """The groups of layers of a model, and how it is served."""

    def __init__(
        self,
        *groups: Any,
        drops: bool = False,
        drafts_in: tuple[int, ...] = (),
        looks_ahead: int = 0,
        reports: float = 0.0,
        retained: int | None = None,
    ) -> None:
        """``drops``: the last block of a hit is computed again. ``looks_ahead``: hashes cover so many tokens more.

        ``drafts_in``: the groups that have layers of the draft model. ``reports``: the share of requests that have
        what they reuse reported again. ``retained``: windows and states are kept so many tokens apart, 0 = where
        prompts end alone, which is what vLLM 0.32 does if it is not told.
        """
        self.groups = groups
        self.drops = drops
        self.drafts_in = drafts_in
        self.looks_ahead = looks_ahead
        self.reports = reports
        self.retained = retained


MODELS: dict[str, Callable[[random.Random], Model]] = {
    "full": lambda source: Model(full()),
    "full-window": lambda source: Model(full(), window(source.choice((20, 33, 64, 100)))),
    "full-windows": lambda source: Model(full(), window(32), window(source.choice((64, 100)))),
    "full-state": lambda source: Model(full(), state()),
    "full-states-all": lambda source: Model(full(), state(mode="all")),
    "full-state64": lambda source: Model(full(), state(64)),
    "window": lambda source: Model(window(source.choice((20, 33, 64, 100)))),
    "mla-window": lambda source: Model(mla(), window_mla(source.choice((20, 33, 64, 100)))),
    "full-window-retained": lambda source: Model(full(), window(source.choice((20, 33, 64))), retained=64),
    "full-state-retained": lambda source: Model(full(), state(), retained=64),
    "full-window-latest": lambda source: Model(full(), window(source.choice((20, 33, 64, 100))), retained=0),
    "full-state-latest": lambda source: Model(full(), state(), retained=0),
    "full-chunked": lambda source: Model(full(), chunked(source.choice((32, 64, 128)))),
    "full32-window16": lambda source: Model(full(32), window(source.choice((20, 33, 64, 100)))),
    "full32-window16-index16": lambda source: Model(full(32), window(source.choice((20, 33, 64, 100)))),
    "full32-window32": lambda source: Model(full(32), window(source.choice((40, 64, 100)), 32)),
    "full-drops": lambda source: Model(full(), drops=True),
    "full-window-drops": lambda source: Model(full(), window(source.choice((20, 33, 64, 100))), drops=True),
    "full-window-drafts-in-full": lambda source: Model(full(), window(64), drops=True, drafts_in=(0,)),
    "full-window-drafts-in-window": lambda source: Model(full(), window(64), drops=True, drafts_in=(1,)),
    "full-state-drops": lambda source: Model(full(), state(), drops=True),
    "full-window-latest-drops": lambda source: Model(
        full(), window(source.choice((20, 33, 64))), retained=0, drops=True
    ),
    "full-state-latest-drops": lambda source: Model(full(), state(), retained=0, drops=True),
    "full32-state32-drops": lambda source: Model(full(32), state(32), retained=0, drops=True),
    "full-ahead": lambda source: Model(full(), looks_ahead=1),
    "full-ahead-3": lambda source: Model(full(), looks_ahead=DRAFTED_TOKENS),
    "full-window-ahead": lambda source: Model(full(), window(source.choice((20, 33, 64, 100))), looks_ahead=1),
    "full-state-ahead": lambda source: Model(full(), state(), looks_ahead=1),
    "full-state-ahead-3": lambda source: Model(full(), state(), looks_ahead=DRAFTED_TOKENS),
    "full-reports": lambda source: Model(full(), reports=0.3),
    "full-window-reports": lambda source: Model(full(), window(source.choice((20, 33, 64))), reports=0.3),
    "full-state-reports": lambda source: Model(full(), state(), reports=0.3),
    "full-ahead-reports": lambda source: Model(full(), looks_ahead=1, reports=0.3),
}


class Server:
    """vLLM's cache manager, and as much of its scheduler as decides what is cached when."""

    def __init__(self, source: random.Random, model: Model) -> None:
        self._source = source
        self._model = model
        sizes = [group.block_size for group in model.groups]
        hashed = min(sizes)
        groups = [
            fitting(
                specs.KVCacheGroupSpec,
                layer_names=[f"layer-{number}"],
                kv_cache_spec=group,
                is_eagle_group=number in model.drafts_in,
            )
            for number, group in enumerate(model.groups)
        ]
        blocks = source.choice((30, 45, 80, 160)) * len(groups)
        config = fitting(
            specs.KVCacheConfig,
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=model.retained,
        )
        self._manager = fitting(
            cache_manager.KVCacheManager,
            kv_cache_config=config,
            max_model_len=MODEL_LENGTH,
            scheduler_block_size=max(sizes),
            hash_block_size=hashed,
            use_eagle=model.drops,
            num_hash_lookahead_tokens=model.looks_ahead,
            num_prefill_lookahead=DRAFTED_TOKENS if model.looks_ahead > 1 else int(model.drops or model.looks_ahead),
            enable_kv_cache_events=True,
        )
        self._hasher = fitting(
            cache_utils.get_request_block_hasher,
            block_size=hashed,
            hash_block_size=hashed,
            caching_hash_fn=hashing.sha256,
            num_hash_lookahead_tokens=model.looks_ahead,
        )
        self._has_states = any(isinstance(group, specs.MambaSpec) for group in model.groups)
        self._drafted = DRAFTED_TOKENS if model.drops or model.looks_ahead else 0
        self.frames: list[bytes] = []
        self.asked: list[tuple[int, list[int], int]] = []

    def serve(self, number: int, prompt: list[int], count: int) -> Iterator[int]:
        """Serve a request a step at a time; yields the tokens that it makes, after each step that makes one."""
        model, manager = self._model, self._manager
        more = {"kv_cache_report_mode": "full"} if self._source.random() < model.reports else None
        params = sampling.SamplingParams(max_tokens=count, ignore_eos=True, extra_args=more)
        request = fitting(
            requests.Request,
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            eos_token_id=None,
            block_hasher=self._hasher,
        )
        self._publish()
        blocks, cached, *more = manager.get_computed_blocks(request)
        request.shared_prefix_boundary = more[0] if more else 0
        self.asked.append((len(self.frames), prompt, cached))
        held, reused = cached, cached
        made = 0
        while made < count:
            step = len(prompt) + made - held
            if held < len(prompt):
                step = self._chunk(request, held, min(step, CHUNK_TOKENS))
            manager.new_step_starts()
            allocated = manager.allocate_slots(
                request, step, reused, blocks if reused else None, num_lookahead_tokens=self._drafted
            )
            if allocated is None:
                break  # it does not fit beside the others: as one that its client gave up
            reused, blocks = 0, None
            held += step
            request.num_computed_tokens = held
            self._publish()
            if held >= len(prompt):
                token = self._source.randrange(VOCABULARY)
                request.append_output_token_ids(token)
                made += 1
                yield token
        manager.free(request)
        self._publish()

    def _chunk(self, request: Any, held: int, step: int) -> int:
        """Return how much of a prompt the next step computes: states are kept where it ends."""
        if not self._has_states:
            return step
        size = self._model.groups[-1].block_size
        left = request.num_prompt_tokens if self._model.drops else request.num_prompt_tokens - 1
        last = max(0, left // size * size - (size if self._model.drops else 0))
        if self._model.looks_ahead:
            last = (request.num_prompt_tokens - self._model.looks_ahead) // size * size
        end = held + step
        if end < request.num_prompt_tokens:
            end = max(end // size * size, held + 1)
        stops = (last, request.shared_prefix_boundary // size * size)
        return min((stop for stop in stops if held < stop < end), default=end) - held

    def _publish(self) -> None:
        told = self._manager.take_events()
        if told:
            self.frames.append(msgspec.msgpack.encode(events.KVEventBatch(ts=1.0, events=told)))


def conversations(source: random.Random, count: int) -> Iterator[list[int]]:
    """Yield prompts as lists that answers are added to: turns of conversations that share beginnings, are edited, and
    come back after others took their place."""

    def tokens(number: int) -> list[int]:
        return [source.randrange(VOCABULARY) for _ in range(number)]

    shared = [tokens(source.randrange(10, 120)) for _ in range(3)]
    talks: list[list[int]] = []
    for _ in range(count):
        if len(talks) < 2 or source.random() < 0.3:
            begun = source.choice(shared)
            talks.append(begun[: source.randrange(len(begun) + 1)] + tokens(source.randrange(1, 80)))
        else:
            talk = talks.pop(source.randrange(len(talks)))
            kind = source.random()
            if kind < 0.2:
                talk = talk[: source.randrange(1, len(talk) + 1)] + tokens(source.randrange(1, 20))
            elif kind < 0.9:
                talk = talk + tokens(source.randrange(1, 60))
            talks.append(talk)
        if len(talks[-1]) > 400:
            talks[-1] = source.choice(shared) + tokens(5)
        if len(talks) > 12:
            talks.pop(0)
        yield talks[-1]


def stream(kind: str, seed: int, count: int) -> tuple[list[bytes], list[tuple[int, list[int], int]]]:
    source = random.Random(f"{kind}/{seed}")
    server = Server(source, MODELS[kind](source))
    running: list[tuple[Iterator[int], list[int]]] = []
    for number, talk in enumerate(conversations(source, count)):
        running.append((server.serve(number, list(talk), source.randrange(1, 50)), talk))
        while len(running) > 1 or (running and source.random() < 0.97):
            at = source.randrange(len(running))
            serving, talk_of = running[at]
            token = next(serving, None)
            if token is None:
                running.pop(at)
            else:
                talk_of.append(token)
            if len(running) == 1 and source.random() < 0.02:
                break  # the next request comes while this one runs
    for serving, _ in running:
        for _ in serving:
            pass
    return server.frames, server.asked


def main() -> None:
    directory, streams, count, *kinds = sys.argv[1:]
    cache_utils.init_none_hash(hashing.sha256)
    for kind in kinds:
        try:
            found = [stream(kind, seed, int(count)) for seed in range(int(streams))]
        except AssertionError as error:
            sys.stderr.write(f"{kind}: {error}\n")
            continue
        Path(directory, f"{kind}.msgpack").write_bytes(msgspec.msgpack.encode(found))


if __name__ == "__main__":
    main()
