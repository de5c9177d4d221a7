"""SGLang's server: ``/generate`` with token ids, ``/server_info``, and events as it writes them.

Both legs of a request meet in a room: a prefill server answers when a decode server has come for the KV. As with
0.5.16, a server of one leg takes no request without a room, and events are of one block each.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from poolgrid.wire.multimodal import digest_media, media_hash_u64
from tests.fakes.engine_server.cache import Running
from tests.fakes.engine_server.http import Reply, Request
from tests.fakes.engine_server.vllm import Options, VllmServer, filled_in, next_token, picture_bytes

ROOMS: dict[int, asyncio.Event] = {}
"""Rooms in which somebody has come for the KV; servers of one test share them."""


class SglangServer(VllmServer):
    """One server; ``role`` is ``prefill`` or ``decode`` where the two are apart."""

    def __init__(
        self,
        context: Any,
        options: Options | None = None,
        role: str = "",
        incremental: bool = False,
        sees: bool = False,
    ) -> None:
        super().__init__(context, options)
        self.options.arrays = self.options.by_block = True  # without salts and adapters
        self.role = role
        self.incremental = incremental
        self.sees = sees

    async def _handle(self, request: Request, reply: Reply) -> None:
        options = self.options
        if request.path == "/health":
            await reply.whole(200, b"")
        elif request.path == "/v1/models":
            listed = [{"id": options.model, "owned_by": "sglang", "root": options.model, "max_model_len": 4096}]
            await reply.whole(200, {"object": "list", "data": listed})
        elif request.path == "/server_info":
            config = {
                "publisher": "zmq" if options.publishes else "null",
                "endpoint": self._endpoints[0][0].replace("127.0.0.1", "*"),
                "replay_endpoint": self._endpoints[0][1].replace("127.0.0.1", "*"),
            }
            await reply.whole(
                200,
                {
                    "version": "0.5.9",
                    "model_path": options.root,
                    "tokenizer_path": "/models/tiny",
                    "page_size": options.block_size,
                    "dp_size": 1,
                    "max_running_requests": 64,
                    "chunked_prefill_size": 2048,
                    "max_total_num_tokens": options.block_size * options.blocks,
                    "disaggregation_mode": self.role or "null",
                    "disaggregation_bootstrap_port": 8998,
                    "kv_events_config": json.dumps(config),
                    "internal_states": [{"anything": 1}],
                },
            )
        elif request.path == "/model_info":
            await reply.whole(200, {"model_path": "/models/tiny", "has_image_understanding": self.sees})
        elif request.path == "/generate":
            await self._complete(request, reply)
        else:
            await reply.whole(404, {"detail": "Not Found"})

    async def _complete(self, request: Request, reply: Reply) -> None:
        body = request.json()
        self.bodies.append(body)
        if self.faults.statuses:
            await reply.whole(*self.faults.statuses.popleft())
            return
        room = body.get("bootstrap_room")
        if self.role and room is None:
            words = f"Disaggregated request received without bootstrap room id. req.rid={body['rid']!r}"
            await reply.whole(400, {"error": {"message": f"Invalid request: {words}"}})
            return
        if room is not None:
            met = ROOMS.setdefault(room, asyncio.Event())
            if self.role == "decode":
                met.set()
            await met.wait()
        try:
            pictures = [picture_bytes(each) for each in body.get("image_data") or []]
        except ValueError as error:
            await reply.whole(400, {"error": {"message": str(error)}})
            return
        prompt, places = filled_in(body["input_ids"], pictures)
        for (first, count), data in zip(places, pictures, strict=True):
            # A number for each picture, beyond every vocabulary: what is cached, and told of, is known by it.
            prompt[first : first + count] = [1_000_000 + media_hash_u64(digest_media(data)) % (1 << 30)] * count
        sequence, cached = self.caches[0].begin(prompt, "", "")
        self.running += 1
        try:
            await self._answer(body, reply, sequence, cached)
        except asyncio.CancelledError:
            self.aborted.set()
            raise
        finally:
            self.running -= 1
            self.caches[0].end(sequence)

    async def _answer(self, body: dict[str, Any], reply: Reply, sequence: Running, cached: int) -> None:
        count = 1 if self.role == "prefill" else body["sampling_params"]["max_new_tokens"]
        abort_after = self.faults.errors_after.popleft() if self.faults.errors_after else None
        prompt = list(sequence.tokens)
        if body["stream"]:
            await reply.begin()
        made: list[int] = []
        for number in range(count):
            await asyncio.sleep(self.options.step_s)
            self.caches[0].fill(sequence, len(sequence.tokens))
            token = next_token(sequence.tokens)
            sequence.tokens.append(token)
            made.append(token)
            await self._publish()
            finish: dict[str, Any] | None = {"type": "length", "length": count} if number + 1 == count else None
            if number + 1 == abort_after:
                finish = {"type": "abort", "message": "KV transfer failed", "status_code": 500}
            if body["stream"]:
                await reply.event(self._chunk(body, prompt, made, finish, cached), self.options.torn)
            if number + 1 == abort_after:
                break
        if body["stream"]:
            await reply.event(b"[DONE]")
            await reply.end()
        else:
            await reply.whole(200, self._chunk(body, prompt, made, {"type": "length", "length": count}, cached))

    def _chunk(
        self, body: dict[str, Any], prompt: list[int], made: list[int], finish: dict[str, Any] | None, cached: int
    ) -> dict[str, Any]:
        shown = made[-1:] if self.incremental and body["stream"] else made
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(made),
            "cached_tokens": cached,
        }
        if body.get("return_logprob"):
            wanted = body["top_logprobs_num"]
            meta["output_token_logprobs"] = [[-0.25, token, None] for token in shown]
            meta["output_top_logprobs"] = [
                [[-0.25, token, None], *([-1.0 - each, each, None] for each in range(wanted - 1))] for token in shown
            ]
            if body["logprob_start_len"] == 0:
                meta["input_token_logprobs"] = [
                    [None if not at else -1.5, token, None] for at, token in enumerate(prompt)
                ]
        return {"text": "?" * len(made), "output_ids": list(shown), "meta_info": meta}
