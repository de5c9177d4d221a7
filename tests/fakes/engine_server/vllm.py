"""vLLM's server: ``/v1/completions`` with token ids, its facts, and its publisher of cache events.

Shapes are those of real servers of 0.25 and 0.32, and of 0.33 as its sources have them. The model is greedy: the
next token depends on the tokens before it and on nothing else, so a request that continues elsewhere must give the same
answer.
"""

from __future__ import annotations

import asyncio
import base64
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import zmq.asyncio
from xxhash import xxh3_64_intdigest

from poolgrid.kernel.wire.addresses import bracketed
from poolgrid.kernel.wire.hashing import pack_tokens, unpack_tokens
from poolgrid.kernel.wire.multimodal import digest_media
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.frontend.prompt_model import PromptModel
from tests.consolidator.pub_engine import PubEngine
from tests.fakes.engine_server.cache import Drafting, PagedCache, Running
from tests.fakes.engine_server.http import Cut, HttpServer, Reply, Request

VOCABULARY = 4096
DEFAULT_TOKENS = 16
"""Of an answer whose request names no number."""

IMAGE_TOKEN = 4100
"""The token that stands for a picture; no text has it, and no answer."""


@lru_cache(1)
def tiny_model() -> PromptModel:
    """The tokenizer and the template of the models that tests serve."""
    return PromptModel.load(TINY_MODEL_PATH)


def tokenized(text: str) -> list[int]:
    return list(unpack_tokens(tiny_model().encode(text)))


def rendered(messages: list[dict[str, Any]]) -> list[int]:
    """The prompt of a chat; parts of a content are joined."""
    plain = [
        {**each, "content": "".join(part.get("text", "") for part in each["content"])}
        if isinstance(each.get("content"), list)
        else each
        for each in messages
    ]
    template = tiny_model().template
    assert template is not None
    return tokenized(template.render(plain, add_generation_prompt=True))


def system_of(system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The first message of a Messages request; vLLM leaves Claude Code's billing line out."""
    if not system:
        return []
    texts = [system] if isinstance(system, str) else [block["text"] for block in system]
    kept = "".join(text for text in texts if not text.startswith("x-anthropic-billing-header"))
    return [{"role": "system", "content": kept}]


def next_token(tokens: list[int]) -> int:
    return 3 + xxh3_64_intdigest(pack_tokens(tokens[-24:])) % (VOCABULARY - 3)


def answer_of(prompt: list[int], count: int) -> list[int]:
    """What an undisturbed server answers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def tokens_of_picture(data: bytes) -> int:
    """How many tokens the model makes of a picture."""
    return 5 + len(data) % 7


def picture_bytes(url: str) -> bytes:
    """The bytes of a data URL; raises ``ValueError`` for any other."""
    head, _, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise ValueError("cannot identify image file")
    return base64.b64decode(data, validate=True)


def filled_in(tokens: list[int], pictures: list[bytes]) -> tuple[list[int], list[tuple[int, int]]]:
    """A prompt with the tokens of pictures in place of its placeholders, in order, and where they stand.

    What is left of placeholders stays as it is; raises ``ValueError`` for a picture too many.
    """
    filled: list[int] = []
    places: list[tuple[int, int]] = []
    for token in tokens:
        if token == IMAGE_TOKEN and len(places) < len(pictures):
            count = tokens_of_picture(pictures[len(places)])
            places.append((len(filled), count))
            filled += [IMAGE_TOKEN] * count
        else:
            filled.append(token)
    if len(places) < len(pictures):
        raise ValueError(f"Expected there to be {len(pictures)} prompt placeholders, but found {len(places)}")
    return filled, places


@dataclass
class Faults:
    """What goes wrong; each is used up by the request that it befalls."""

    statuses: deque[tuple[int, Any]] = field(default_factory=deque)
    """Answers instead of completions."""
    scripts: deque[Callable[[Reply], Awaitable[None]]] = field(default_factory=deque)
    """What answers instead of completions."""
    every: Callable[[Reply], Awaitable[None]] | None = None
    """What answers every completion, until it is taken away."""
    errors_after: deque[int] = field(default_factory=deque)
    """An error event after so many tokens."""
    cuts_after: deque[int] = field(default_factory=deque)
    """The connection ends after so many tokens."""
    stalls_after: deque[int] = field(default_factory=deque)
    """Nothing more comes after so many tokens."""
    holds: deque[asyncio.Event] = field(default_factory=deque)
    """Nothing is computed before it is set."""

    async def answer(self, reply: Reply) -> bool:
        """Answer a completion if something is to go wrong with it; return whether it was."""
        if self.every is not None:
            await self.every(reply)
        elif self.scripts:
            await self.scripts.popleft()(reply)
        elif self.statuses:
            await reply.whole(*self.statuses.popleft())
        else:
            return False
        return True


@dataclass
class Options:
    block_size: int = 4
    blocks: int = 512
    model: str = "tiny"
    root: str = "/models/tiny"
    """Where it says that the model is."""
    adapters: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    """Further names after ``--served-model-name``."""
    key: str = ""
    """``--api-key``."""
    max_model_len: int = 4096
    tokens_per_chunk: int = 1
    torn: bool = False
    details: bool = True
    """``--enable-prompt-tokens-details``."""
    token_ids: bool = True
    """Whether it knows ``return_token_ids``."""
    lists_sources: bool = True
    """``/kv_event_sources``, which old versions lack."""
    sources_as_list: bool = False
    replays: bool = True
    publishes: bool = True
    connects: bool = False
    """The publisher's endpoint has no wildcard: it connects, and nobody hears it."""
    arrays: bool = False
    """Events as arrays, as old versions write them."""
    by_block: bool = False
    """An event for each block that is stored."""
    ranks: int = 1
    first_rank: int = 0
    """The first of its ranks: above 0 on all machines of a deployment but one (``--data-parallel-hybrid-lb``)."""
    drafting: Drafting | None = None
    """What EAGLE or MTP make of the cache: hashes that look ahead in 0.33, a block that is dropped before. Drafts by
    n-grams make nothing of it."""
    host: str = "127.0.0.1"
    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    """How fast prompts are computed, one after the other; 0 = at once."""
    render: Callable[[list[dict[str, Any]]], list[int]] | None = None
    """What makes tokens of chat messages; without it there is no chat endpoint."""
    health_s: float = 0.0
    """How long ``/health`` takes to answer."""
    kv_connector: bool = False
    backoff_tokens: int = 0
    """How many of a prompt's last tokens a prefill leg does not compute: 1 with state-space layers."""
    scale_out: bool = False
    """``--enable-scale-out``: ``/inference/v1/generate`` is there."""
    content_parts: bool = True
    """Whether that takes pictures; versions that do not ignore them, as any field that they do not know."""


def parts(event: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an event as one for each block."""
    if event["type"] != "BlockStored":
        return [event]
    size, hashes, tokens = event["block_size"], event["block_hashes"], event["token_ids"]
    parents = [event["parent_block_hash"], *hashes]
    return [
        {**event, "block_hashes": [each], "parent_block_hash": parents[at], "token_ids": tokens[at * size :][:size]}
        for at, each in enumerate(hashes)
    ]


ARRAY_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


class VllmServer:
    """One server with its ranks, in the test's own loop."""

    cache_type = PagedCache

    def __init__(self, context: zmq.asyncio.Context, options: Options | None = None) -> None:
        self.options = options or Options()
        self.faults = Faults()
        self.lose: Callable[[int], bool] = lambda seq: False
        """Says of an event frame's number whether it is lost on the way."""
        self.counted: Callable[[int], int] = lambda tokens: tokens
        """What it counts for a prompt of so many tokens."""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.running = 0
        self.counts: Counter[str] = Counter(spec_decode_num_drafts=0) if self.options.drafting else Counter()
        """What ``/metrics`` says, by family."""
        self._prefilling = asyncio.Lock()
        self.aborted = asyncio.Event()
        """Set when somebody left amid an answer."""
        self._context = context
        self._life = 0
        self._http = HttpServer(self._handle)
        self._endpoints: list[tuple[str, str]] = []
        self._outbox: list[tuple[int, dict[str, Any]]] = []
        self.died = False
        """Its engine has ended by an assertion: nothing is served any more."""

    @property
    def url(self) -> str:
        return f"http://{bracketed(self.options.host)}:{self._http.port}"

    def publish_at(self, endpoint: str, replay_endpoint: str) -> None:
        """Have the only rank publish there, and not at any free port."""
        self._endpoints = [(endpoint, replay_endpoint)]

    async def start(self, port: int = 0) -> None:
        """Begin a life; after ``stop`` at the same addresses."""
        self._life += 1
        options = self.options
        self.publishers: list[PubEngine] = []
        self.caches: list[PagedCache] = []
        self._answering: list[asyncio.Task[None]] = []
        for rank in range(options.ranks):
            known = self._endpoints[rank] if rank < len(self._endpoints) else self._new_endpoints(rank)
            publisher = PubEngine(self._context, known[0], replay=known[1], rank=options.first_rank + rank)
            self.publishers.append(publisher)
            if rank >= len(self._endpoints):
                self._endpoints.append((publisher.endpoint, publisher.replay_endpoint))
            self._answering.append(asyncio.ensure_future(publisher.answer_replays("trtllm")))
            life = self._life * 100 + rank
            cache = self.cache_type(options.block_size, options.blocks, self._published(rank), life, options.drafting)
            self.caches.append(cache)
        await self._http.start(self._http.port or port, options.host)

    def _new_endpoints(self, rank: int) -> tuple[str, str]:
        """Where a rank publishes, and where it replays."""
        return (f"tcp://{bracketed(self.options.host)}:*",) * 2

    async def stop(self) -> None:
        """End at once, as a process that is killed."""
        await self._http.stop()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        for publisher in self.publishers:
            publisher.close()

    async def reset_prefix_cache(self) -> None:
        for cache in self.caches:
            cache.reset()
        await self._publish()

    def _published(self, rank: int) -> Callable[[dict[str, Any]], None]:
        return lambda event: self._outbox.append((rank, event))

    async def _publish(self) -> None:
        """Send the events of a step, one frame a rank."""
        outbox, self._outbox = self._outbox, []
        if not self.options.publishes:
            return
        for rank, publisher in enumerate(self.publishers):
            events = self._as_sent([event for at, event in outbox if at == rank])
            if events:
                await publisher.publish(events, lose=self.lose(publisher.seq))

    def _as_sent(self, events: list[dict[str, Any]]) -> list[Any]:
        """Return events in the server's form; the salt is among the keys of the first block."""
        events = [{name: value for name, value in each.items() if name != "cache_salt"} for each in events]
        if self.options.by_block:
            events = [part for each in events for part in parts(each)]
        if self.options.arrays:
            return [[each["type"], *(each.get(name) for name in ARRAY_FIELDS[each["type"]])] for each in events]
        return events

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _handle(self, request: Request, reply: Reply) -> None:
        path = request.path
        options = self.options
        if options.key and path.startswith("/v1") and request.headers.get("authorization") != f"Bearer {options.key}":
            await reply.whole(401, {"error": "Unauthorized"})
            return
        if path == "/health":
            await asyncio.sleep(options.health_s)
            await reply.whole(200, b"")
        elif path == "/version":
            await reply.whole(200, {"version": "0.33.0"})
        elif path == "/v1/models":
            base = {"id": options.model, "owned_by": "vllm", "root": options.root, "parent": None}
            adapters = [
                {"id": each, "owned_by": "vllm", "root": f"/loras/{each}", "parent": options.model}
                for each in options.adapters
            ]
            names = (options.model, *options.aliases)
            listed = [*({**base, "id": each, "max_model_len": options.max_model_len} for each in names), *adapters]
            await reply.whole(200, {"object": "list", "data": listed})
        elif path == "/metrics":
            await reply.whole(200, self._metrics().encode(), "text/plain")
        elif path == "/kv_event_sources" and options.lists_sources:
            await reply.whole(200, self._sources())
        elif path == "/v1/completions":
            await self._complete(request, reply)
        elif path == "/v1/chat/completions":
            body = request.json()
            body.update(prompt=(options.render or rendered)(body["messages"]), is_chat=True)
            await self._answer_to(request, reply, body, ())
        elif path == "/v1/messages":
            body = request.json()
            system = system_of(body.get("system"))
            body.update(prompt=(options.render or rendered)([*system, *body["messages"]]), is_message=True)
            await self._answer_to(request, reply, body, ())
        elif path == "/reset_prefix_cache":
            await self.reset_prefix_cache()
            await reply.whole(200, {"success": True})
        elif path == "/openapi.json":
            await reply.whole(200, self._openapi())
        elif path == "/inference/v1/generate":
            await self._generate_tokens(request, reply)
        else:
            await reply.whole(404, {"detail": "Not Found"})

    def _metrics(self) -> str:
        options = self.options
        lines = [
            f'vllm:cache_config_info{{block_size="{options.block_size}",cache_dtype="auto",engine="{rank}",'
            f'num_gpu_blocks="{options.blocks}"}} 1.0'
            for rank in range(options.first_rank, options.first_rank + options.ranks)
        ]
        info = ["# HELP vllm:cache_config_info Info.", "# TYPE vllm:cache_config_info gauge", *lines]
        counted = [
            line
            for name, count in sorted(self.counts.items())
            for line in (f"# TYPE vllm:{name} counter", f"vllm:{name}_total {count}")
        ]
        engines = [
            f'vllm:num_requests_{word}{{engine="{rank}",model_name="{options.model}"}} {float(count)}'
            for rank in range(options.ranks)
            for word, count in (("running", 0 if rank else self.running), ("waiting", 0))
        ]
        return "\n".join([*info, *engines, *counted, ""])

    def _sources(self) -> Any:
        if not self.options.publishes:
            return {}
        found = {}
        for rank, (endpoint, replay) in enumerate(self._endpoints, self.options.first_rank):
            shown = endpoint if self.options.connects else endpoint.replace("127.0.0.1", "*")
            found[str(rank)] = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": shown,
                "replay_endpoint": replay.replace("127.0.0.1", "*") if self.options.replays else None,
                "topic": "",
            }
        if not self.options.sources_as_list:
            return found
        return [
            {"data_parallel_rank": int(rank), **{name: each[name] for name in ("endpoint", "replay_endpoint", "topic")}}
            for rank, each in found.items()
        ]

    def _openapi(self) -> Any:
        paths: dict[str, Any] = {"/v1/completions": {}}
        schemas: dict[str, Any] = {"CompletionRequest": {"properties": {"prompt": {}}}, "Mode": {"type": "string"}}
        if self.options.scale_out:
            paths["/inference/v1/generate"] = {}
            fields = ("token_ids", "sampling_params", *(("content_parts",) if self.options.content_parts else ()))
            schemas["GenerateRequest"] = {"properties": {name: {} for name in fields}}
        return {"openapi": "3.1.0", "paths": paths, "components": {"schemas": schemas}}

    async def _generate_tokens(self, request: Request, reply: Reply) -> None:
        """Fill pictures in, and answer as completions do, with log probabilities in another form."""
        if not self.options.scale_out:
            message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            await reply.whole(403, {"error": {"message": message, "type": "PermissionDeniedError", "code": 403}})
            return
        body = request.json()
        parts = body.get("content_parts") or [] if self.options.content_parts else []
        names = []
        try:
            pictures = [picture_bytes(part["url"]) for part in parts]
            names = [part.get("uuid") or digest_media(data).hex() for part, data in zip(parts, pictures, strict=True)]
            body["prompt"], places = filled_in(body["token_ids"], pictures)
        except ValueError as error:
            await reply.whole(400, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}})
            return
        body["by_token_id"] = True
        asked = {"max_tokens": 16, "logprobs": None, **body["sampling_params"]}
        body.update({"max_tokens": asked["max_tokens"], "logprobs": asked["logprobs"]})
        media = tuple((offset, length, name) for (offset, length), name in zip(places, names, strict=True))
        await self._answer_to(request, reply, body, media)

    async def _complete(self, request: Request, reply: Reply) -> None:
        body = request.json()
        if isinstance(body["prompt"], str):
            body["prompt"] = tokenized(body["prompt"])
        await self._answer_to(request, reply, body, ())

    async def _answer_to(
        self, request: Request, reply: Reply, body: dict[str, Any], media: tuple[tuple[int, int, str], ...]
    ) -> None:
        self.bodies.append(body)
        self.headers.append(request.headers)
        if await self.faults.answer(reply):
            return
        options = self.options
        prompt = body["prompt"]
        count = body["max_tokens"] = body.get("max_tokens") or body.get("max_completion_tokens") or DEFAULT_TOKENS
        if self.died:
            error = {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}
            await reply.whole(500, {"error": error})
            return
        if len(prompt) + count > options.max_model_len:
            message = f"This model's maximum context length is {options.max_model_len} tokens."
            await reply.whole(400, {"error": {"message": message, "type": "BadRequestError", "code": 400}})
            return
        if body["model"] not in (options.model, *options.adapters):
            message = f"The model `{body['model']}` does not exist."
            await reply.whole(404, {"error": {"message": message, "type": "NotFoundError", "code": 404}})
            return
        first = options.first_rank
        rank = int(request.headers.get("x-data-parallel-rank", first)) - first
        if not 0 <= rank < options.ranks:
            # It waits for an engine that it does not have, which ends in this.
            message = f"data_parallel_rank {first + rank} is out of range [{first}, {first + options.ranks})."
            await reply.whole(400, {"error": {"message": message, "type": "BadRequestError", "code": 400}})
            return
        lora = body["model"] if body["model"] in options.adapters else ""
        sequence, cached = self.caches[rank].begin(prompt, lora, body.get("cache_salt") or "", media)
        if (body.get("vllm_xargs") or {}).get("kv_cache_report_mode") == "full":
            self.caches[rank].report(sequence)
        if not body.get("kv_transfer_params"):
            # What is scheduled is cached at once: a request of the same step finds it.
            self.caches[rank].fill(sequence, len(sequence.tokens))
        self.counts.update(prefix_cache_queries=len(prompt), prefix_cache_hits=cached, request_success=1)
        self.running += 1
        try:
            if self.faults.holds:
                await self.faults.holds.popleft().wait()
            if options.prefill_tokens_per_s:
                async with self._prefilling:
                    await asyncio.sleep((len(prompt) - cached) / options.prefill_tokens_per_s)
            await self._generate(body, reply, rank, sequence, cached)
        except asyncio.CancelledError:
            self.aborted.set()
            raise
        finally:
            self.running -= 1
            self.caches[rank].end(sequence)

    async def _generate(self, body: dict[str, Any], reply: Reply, rank: int, sequence: Running, cached: int) -> None:
        options = self.options
        prompt_tokens, count = len(sequence.tokens), body["max_tokens"]
        error_after = self.faults.errors_after.popleft() if self.faults.errors_after else None
        cut_after = self.faults.cuts_after.popleft() if self.faults.cuts_after else None
        stall_after = self.faults.stalls_after.popleft() if self.faults.stalls_after else None
        params = body.get("kv_transfer_params") or {}
        left: dict[str, Any] | None = None
        blocks = -(-prompt_tokens // options.block_size)
        strange: list[int] = []
        if params.get("do_remote_prefill"):
            # What it lacks it fetches, the last block first; then it computes the last token again, and no other.
            if blocks - cached // options.block_size > max(map(len, params["remote_block_ids"])):
                self.died = True
                raise Cut
            strange = [1] * (prompt_tokens - 1 > max(cached, params["remote_num_tokens"]))
        elif params.get("do_remote_decode") and options.backoff_tokens:
            prompt_tokens -= options.backoff_tokens
            del sequence.tokens[prompt_tokens:]
        if params.get("do_remote_decode") and options.kv_connector:
            left = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": f"engine-{self._http.port}",
                "remote_block_ids": [list(range(1, 1 + blocks))],
                "remote_num_tokens": prompt_tokens,
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
            }
        if body.get("stream"):
            await reply.begin()
        pending: list[int] = []
        made: list[int] = []
        first = True
        for number in range(count):
            await asyncio.sleep(options.step_s)
            self.caches[rank].fill(sequence, len(sequence.tokens))
            token = next_token(sequence.tokens + strange)
            sequence.tokens.append(token)
            made.append(token)
            pending.append(token)
            await self._publish()
            if number + 1 == error_after:
                error = {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}
                await reply.event({"error": error})
                await reply.event(b"[DONE]")
                await reply.end()
                return
            last = number + 1 == count
            if body.get("stream") and (last or len(pending) == options.tokens_per_chunk):
                choice = self._choice(body, pending, "length" if last else None)
                choice["prompt_token_ids"] = sequence.tokens[:prompt_tokens] if first else None
                await self._event(body, reply, choice, first, prompt_tokens, cached)
                pending, first = [], False
            if number + 1 == cut_after:
                raise Cut
            if number + 1 == stall_after:
                await asyncio.Event().wait()
        usage: dict[str, Any] = {"prompt_tokens": self.counted(prompt_tokens), "completion_tokens": count}
        if options.details:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if body.get("stream"):
            await self._end_stream(body, reply, usage)
            return
        if body.get("is_message"):
            await reply.whole(200, self._message(body, usage, [{"type": "text", "text": "?" * count}]))
            return
        choice = self._choice(body, made, "length")
        if body.get("prompt_logprobs") is not None:
            prompt = sequence.tokens[:prompt_tokens]
            choice["prompt_logprobs"] = [
                None,
                *(
                    {str(token): {"logprob": -1.5, "rank": 3}, "9": {"logprob": -0.5, "rank": 1}}
                    for token in prompt[1:]
                ),
            ]
        answer = {**self._head(body, "chat.completion"), "choices": [choice], "usage": usage}
        await reply.whole(200, {**answer, "kv_transfer_params": left})

    def _head(self, body: dict[str, Any], kind: str) -> dict[str, Any]:
        kind = kind if body.get("is_chat") else "text_completion"
        return {
            "id": "chatcmpl-1" if body.get("is_chat") else "cmpl-1",
            "object": kind,
            "created": 5,
            "model": body["model"],
        }

    def _message(self, body: dict[str, Any], usage: dict[str, Any], content: list[Any]) -> dict[str, Any]:
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        counts = {
            "input_tokens": usage["prompt_tokens"] - cached,
            "output_tokens": usage["completion_tokens"],
            "cache_read_input_tokens": cached,
        }
        said = {"id": "chatcmpl-1", "type": "message", "role": "assistant", "model": body["model"], "content": content}
        return {**said, "stop_reason": "max_tokens" if content else None, "stop_sequence": None, "usage": counts}

    async def _event(
        self, body: dict[str, Any], reply: Reply, choice: dict[str, Any], first: bool, prompt_tokens: int, cached: int
    ) -> None:
        torn = self.options.torn
        if not body.get("is_message"):
            await reply.event({**self._head(body, "chat.completion.chunk"), "choices": [choice]}, torn)
            return
        if first:
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 0}
            begun = {"type": "message_start", "message": self._message(body, usage, [])}
            await reply.event(begun, torn, "message_start")
            block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
            await reply.event(block, torn, "content_block_start")
        delta = {"type": "text_delta", "text": choice["text"]}
        await reply.event({"type": "content_block_delta", "index": 0, "delta": delta}, torn, "content_block_delta")

    async def _end_stream(self, body: dict[str, Any], reply: Reply, usage: dict[str, Any]) -> None:
        torn = self.options.torn
        if body.get("is_message"):
            await reply.event({"type": "content_block_stop", "index": 0}, torn, "content_block_stop")
            said = self._message(body, usage, [])
            delta = {"stop_reason": "max_tokens", "stop_sequence": None}
            await reply.event({"type": "message_delta", "delta": delta, "usage": said["usage"]}, torn, "message_delta")
            await reply.event({"type": "message_stop"}, torn, "message_stop")
        else:
            if (body.get("stream_options") or {}).get("include_usage"):
                counted = {**self._head(body, "chat.completion.chunk"), "choices": [], "usage": usage}
                await reply.event(counted, torn)
            await reply.event(b"[DONE]")
        await reply.end()

    def _choice(self, body: dict[str, Any], tokens: list[int], finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": "?" * len(tokens), "finish_reason": finish, "logprobs": None}
        if body.get("is_chat"):
            said = "delta" if body.get("stream") else "message"
            return {"index": 0, said: {"role": "assistant", "content": choice["text"]}, "finish_reason": finish}
        if self.options.token_ids:
            choice["token_ids"] = list(tokens)
        wanted = body.get("logprobs")
        if wanted is not None and body.get("by_token_id"):
            others = [{"token_id": each, "logprob": -1.0 - each} for each in range(max(0, wanted - 1))]
            choice["logprobs"] = {
                "content": [
                    {
                        "token_id": token,
                        "logprob": -0.25,
                        "rank": 1,
                        "top_logprobs": [{"token_id": token, "logprob": -0.25}, *others],
                    }
                    for token in tokens
                ]
            }
        elif wanted is not None:
            choice["logprobs"] = {
                "text_offset": [0] * len(tokens),
                "tokens": [f"token_id:{token}" for token in tokens],
                "token_logprobs": [-0.25] * len(tokens),
                "top_logprobs": [
                    {f"token_id:{token}": -0.25, **{f"token_id:{each}": -1.0 - each for each in range(wanted)}}
                    for token in tokens
                ],
            }
        return choice
