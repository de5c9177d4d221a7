"""trtllm-serve: ``/v1/completions`` without detokenizing, and cache events that are drained over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.fakes.engine_server.http import Cut, Reply, Request
from tests.fakes.engine_server.vllm import VllmServer, next_token


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
        if await self.faults.answer(reply):
            return
        params = body.get("disaggregated_params") or {}
        sequence, cached = self.caches[0].begin(body["prompt"], "", "")
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
