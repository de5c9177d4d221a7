"""trtllm-serve: ``/v1/completions`` without detokenizing, and cache events that are drained over HTTP or published.

What 1.4 takes, and with what it refuses the rest, is upstream's: ``python -m tests.trtllm_upstream`` compares it.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from types import SimpleNamespace
from typing import Any

from tests.fakes.engine_server.cache import PagedCache
from tests.fakes.engine_server.http import Cut, Reply, Request
from tests.fakes.engine_server.vllm import VllmServer, next_token, rendered
from tests.fakes.tensorrt_llm._fake.block_key import salt_id
from tests.fakes.tensorrt_llm._fake.event_publisher import RankPublisher, Scope


class TrtllmServe(VllmServer):
    """One server; drains by ``method``, which differs between versions."""

    method = "GET"
    version = "1.3.0"

    async def start(self, port: int = 0) -> None:
        await super().start(port)
        created = {"type": "created", "num_blocks_per_cache_level": [self.options.blocks, 0]}
        self.events: list[dict[str, Any]] = []
        self._event_id = 0
        self._say(created)

    def _say(self, data: dict[str, Any]) -> None:
        self.events.append({"event_id": self._event_id, "data": data, "window_size": 4096})
        self._event_id += 1

    async def _publish(self) -> None:
        outbox, self._outbox = self._outbox, []
        for _, event in outbox:
            if event["type"] == "BlockStored":
                size = event["block_size"]
                blocks = [
                    {
                        "type": "stored_block",
                        "block_hash": engine_hash,
                        "tokens": [
                            {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                            for token in event["token_ids"][at * size : (at + 1) * size]
                        ],
                        "cache_level": 0,
                        "priority": 35,
                    }
                    for at, engine_hash in enumerate(event["block_hashes"])
                ]
                self._say({"type": "stored", "parent_hash": event["parent_block_hash"], "blocks": blocks})
            else:
                self._say({"type": "removed", "block_hashes": event["block_hashes"]})

    async def _handle(self, request: Request, reply: Reply) -> None:
        if request.path == "/health":
            await reply.whole(200, b"")
        elif request.path == "/version":
            await reply.whole(200, {"version": self.version})
        elif request.path == "/v1/models":
            await reply.whole(200, {"object": "list", "data": [{"id": "tiny", "owned_by": "tensorrt_llm"}]})
        elif request.path == "/kv_cache_events" and request.method != self.method:
            await reply.whole(405, {"detail": "Method Not Allowed"})
        elif request.path == "/kv_cache_events":
            events, self.events = self.events, []
            await reply.whole(200, events)
        elif request.path == "/v1/completions":
            await self._complete(request, reply)
        else:
            await reply.whole(404, {"detail": "Not Found"})

    async def _complete(self, request: Request, reply: Reply) -> None:
        body = request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        if await self.faults.answer(reply):
            return
        params = body.get("disaggregated_params") or {}
        sequence, cached = self.caches[0].begin(body["prompt"], "", body.get("cache_salt") or "")
        try:
            kind = params.get("request_type")
            count = 1 if kind == "context_only" else body.get("max_tokens", 16)
            if body.get("stream"):
                await reply.begin()
            made: list[int] = []
            for number in range(count):
                await asyncio.sleep(self.options.step_s)
                self.caches[0].fill(sequence, len(sequence.tokens))
                first = params.get("first_gen_tokens") if kind == "generation_only" and not number else None
                token = first[0] if first else next_token(sequence.tokens)
                sequence.tokens.append(token)
                made.append(token)
                await self._publish()
                if body.get("stream"):
                    finish = "length" if number + 1 == count else None
                    await reply.event({"choices": [self._choice(body, [token], finish)]})
                if self.faults.cuts_after and number + 1 == self.faults.cuts_after[0]:
                    raise Cut
            usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": cached}}
            if body.get("stream"):
                await reply.event({"choices": [], "usage": usage})
                await reply.event(b"[DONE]")
                await reply.end()
                return
            choice = self._choice(body, made, "length")
            if kind == "context_only":
                choice["disaggregated_params"] = {
                    "request_type": "context_only",
                    "first_gen_tokens": made,
                    "ctx_request_id": params["disagg_request_id"],
                    "encoded_opaque_state": "b3BhcXVl",
                }
            usage["completion_tokens"] = count
            await reply.whole(200, {"choices": [choice], "usage": usage, "prompt_token_ids": body["prompt"]})
        finally:
            self.caches[0].end(sequence)

    def _choice(self, body: dict[str, Any], tokens: list[int], finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": finish}
        if body.get("detokenize") is False or body.get("return_token_ids"):
            choice["token_ids"] = list(tokens)
        if body.get("logprobs"):
            choice["logprobs"] = {"tokens": ["?"] * len(tokens), "token_logprobs": [-0.25] * len(tokens)}
        return choice


SAMPLING = frozenset(
    [
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "n",
        "presence_penalty",
        "response_format",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "user",
        "thinking_token_budget",
        "prompt_ignore_length",
        "best_of",
        "use_beam_search",
        "top_k",
        "top_p_min",
        "min_p",
        "repetition_penalty",
        "length_penalty",
        "early_stopping",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "truncate_prompt_tokens",
        "lora_request",
        "add_special_tokens",
        "disaggregated_params",
        "conversation_params",
        "priority",
    ]
)
FIELDS = {
    "/v1/completions": SAMPLING
    | frozenset(["model", "prompt", "echo", "max_tokens", "suffix", "return_context_logits", "detokenize"]),
    "/v1/chat/completions": SAMPLING
    | frozenset(
        [
            "messages",
            "prompt_token_ids",
            "prompt_token_ids_b64",
            "model",
            "top_logprobs",
            "max_completion_tokens",
            "max_tokens",
            "tools",
            "tool_choice",
            "reasoning_effort",
            "thinking",
            "echo",
            "add_generation_prompt",
            "documents",
            "chat_template",
            "chat_template_kwargs",
            "media_io_kwargs",
            "cache_salt",
            "agent_hierarchy",
            "mm_processor_kwargs",
        ]
    ),
}
"""What requests may have in 1.4: any other member is refused. Responses and Messages take any, and pass over it."""


class StreamingServe(TrtllmServe):
    """A server of 1.4 with ``kv_events_config``: its events are published, and the path over HTTP has none."""

    method = "POST"
    version = "1.4.0rc4"
    cache_type = partial(PagedCache, is_tree=True)  # type: ignore[assignment]

    def publish_at(self, endpoint: str, replay_endpoint: str) -> None:
        self.stream_endpoints = endpoint, replay_endpoint

    async def start(self, port: int = 0) -> None:
        self._salts: dict[int, str] = {}
        await super().start(port)
        self.events = []
        endpoint, replay = self.stream_endpoints
        config = SimpleNamespace(endpoint=endpoint, replay_endpoint=replay, buffer_steps=10_000, hwm=100_000, topic="")
        self.stream = RankPublisher(0, config, self.options.block_size, 4096, self._scope_of)

    async def stop(self) -> None:
        await super().stop()
        self.stream.close()

    def _scope_of(self, name: int) -> Scope:
        salt = self._salts.get(name, "")
        return salt_id(salt) if salt else None, None

    async def _publish(self) -> None:
        for _, event in self._outbox:
            if event["type"] == "BlockStored" and event["parent_block_hash"] is None:
                self._salts[event["block_hashes"][0]] = event["cache_salt"] or ""
        await super()._publish()
        told, self.events = self.events, []
        self.stream.publish(told)

    async def _handle(self, request: Request, reply: Reply) -> None:
        if request.path == "/server_info":
            told = {"tokens_per_block": self.options.block_size, "kv_cache_hash_algo": "v1_block_key"}
            await reply.whole(200, {"disaggregated_params": None, "max_batch_size": 8, **told})
            return
        if request.path in FIELDS and (fault := self._fault_of(request)):
            message = f"1 validation error: {fault}"
            await reply.whole(400, {"object": "error", "message": message, "type": "BadRequestError", "code": 400})
        elif request.path == "/v1/chat/completions":
            body = request.json()
            asked = {**body, "prompt": rendered(body["messages"]), "detokenize": False}
            await self._complete(Request(request.method, request.path, request.headers, _json(asked)), reply)
        else:
            await super()._handle(request, reply)

    def _fault_of(self, request: Request) -> str:
        body = request.json()
        unknown = sorted(body.keys() - FIELDS[request.path])
        if unknown:
            return f"{unknown[0]}: Extra inputs are not permitted"
        priority = body.get("priority")
        if priority is not None and not 0 <= priority <= 1:
            return "priority: Input should be greater than or equal to 0 and less than or equal to 1"
        return ""


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
