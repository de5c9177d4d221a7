"""SGLang's server: ``/generate`` with token ids, ``/server_info``, and events as it writes them.

Both legs of a request meet in a room: a prefill server answers when a decode server has come for the KV. As with
0.5.16, a server of one leg takes no request without a room.

Forms are those of 0.5.23 (read in its sources): events are maps that name salts and adapters, each of a chain of
blocks; with EAGLE tokens come as pairs, each with the one behind it. Publishers and replay sockets count their ports up
from the first rank's. With attention DP ``dp_size`` is 1. Those of 0.5.9 are arrays, of one block each, without salts
and adapters.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from poolgrid.kernel.wire.multimodal import digest_media, media_hash_u64
from poolgrid.server.transport.bound_socket import bind
from tests.fakes.engine_server.cache import Drafting, PagedCache, Running
from tests.fakes.engine_server.http import Reply, Request
from tests.fakes.engine_server.vllm import Options, VllmServer, filled_in, next_token, picture_bytes

ROOMS: dict[int, asyncio.Event] = {}
"""Rooms in which somebody has come for the KV; servers of one test share them."""


def ports_in_a_row(count: int) -> int:
    """Return the first of so many free ports that follow each other."""
    while True:
        with ExitStack() as held:
            first: int = held.enter_context(bind("127.0.0.1", 0, "a port")).getsockname()[1]
            with suppress(OSError, OverflowError):
                for port in range(first + 1, first + count):
                    held.enter_context(bind("127.0.0.1", port, "a port"))
                return first


UNNAMED = "extra key "
"""How a salt begins that events do not name."""


class SglangServer(VllmServer):
    """One server; ``role`` is ``prefill`` or ``decode`` where the two are apart."""

    def __init__(
        self,
        context: Any,
        options: Options | None = None,
        role: str = "",
        incremental: bool = False,
        sees: bool = False,
        version: str = "0.5.23",
        attention_dp: bool = False,
        draws_pairs: bool = False,
        binds: bool = False,
    ) -> None:
        """``attention_dp``: its ranks are of ``--enable-dp-attention``, else replicas. ``draws_pairs``: EAGLE.

        ``binds``: its publishers bind an address without a wildcard, as ``bind`` has them do.
        """
        options = options or Options()
        if draws_pairs:
            options = replace(options, drafting=Drafting(looks_ahead=1))
        super().__init__(context, options)
        self.version = version
        self._is_old = version == "0.5.9"
        self.options.arrays = self.options.by_block = self._is_old
        self._attention_dp = attention_dp
        self._draws_pairs = draws_pairs
        self._binds = binds
        self.role = role
        self.incremental = incremental
        self.sees = sees

    cache_type = staticmethod(partial(PagedCache, is_tree=True))  # type: ignore[assignment]

    def _new_endpoints(self, rank: int) -> tuple[str, str]:
        """Return ports that count up with the rank, those of the replays behind them."""
        if not rank:
            ranks = self.options.ranks
            self._first_port = ports_in_a_row(2 * ranks)
        replay = self._first_port + self.options.ranks + rank
        return f"tcp://127.0.0.1:{self._first_port + rank}", f"tcp://127.0.0.1:{replay}"

    def _as_sent(self, events: list[dict[str, Any]]) -> list[Any]:
        if self._is_old:
            return super()._as_sent(events)
        sent = []
        for event in events:
            if event["type"] != "BlockStored":
                sent.append({name: value for name, value in event.items() if name != "group_idx"})
                continue
            named = {"lora_id": None} | {
                name: event[name]
                for name in (
                    *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "medium"),
                    *("cache_salt", "session_id", "lora_name"),
                )
                if event[name] is not None or name == "parent_block_hash"
            }
            if (named.get("cache_salt") or "").startswith(UNNAMED):
                del named["cache_salt"]
            if self._draws_pairs:
                tokens = event["token_ids"]
                named["token_ids"] = list(zip(tokens, [*tokens[1:], event["lookahead_token_ids"][-1][0]], strict=True))
            sent.append(named)
        return sent

    def _server_info(self) -> dict[str, Any]:
        options = self.options
        shown = "127.0.0.1" if self._binds else "*"
        endpoint, replay = (each.replace("127.0.0.1", shown) for each in self._endpoints[0])
        config: dict[str, Any] = {"publisher": "zmq" if options.publishes else "null", "endpoint": endpoint}
        if options.replays:
            config["replay_endpoint"] = replay
        if self._binds:
            config["bind"] = True
        replicas = 1 if self._attention_dp else options.ranks
        info = {
            "version": self.version,
            "model_path": options.root,
            "tokenizer_path": "/models/tiny",
            "page_size": options.block_size,
            "dp_size": replicas,
            "max_running_requests": 64,
            "chunked_prefill_size": 2048,
            "max_total_num_tokens": options.block_size * options.blocks,
            "disaggregation_mode": self.role or "null",
            "disaggregation_bootstrap_port": 8998,
            "kv_events_config": json.dumps(config),
            "internal_states": [{"anything": 1}],
        }
        if self._is_old:
            return info
        described = {
            "publisher": "zmq",
            "endpoint_host": shown,
            "endpoint_port_base": int(endpoint.rpartition(":")[2]),
            "topic": "",
            "block_size": options.block_size,
            "dp_size": options.ranks,
        }
        if options.replays:
            described["replay_endpoint_port_base"] = int(replay.rpartition(":")[2])
        return info | {
            "attn_dp_size": options.ranks if self._attention_dp else 1,
            "enable_dp_attention": self._attention_dp,
            "kv_events": described if options.publishes else None,
        }

    async def _handle(self, request: Request, reply: Reply) -> None:
        options = self.options
        if request.path == "/health":
            await reply.whole(200, b"")
        elif request.path == "/v1/models":
            listed = [{"id": options.model, "owned_by": "sglang", "root": options.model, "max_model_len": 4096}]
            await reply.whole(200, {"object": "list", "data": listed})
        elif request.path == "/server_info":
            await reply.whole(200, self._server_info())
        elif request.path == "/model_info":
            await reply.whole(200, {"model_path": "/models/tiny", "has_image_understanding": self.sees})
        elif request.path == "/generate":
            await self._serve(request.json(), reply)
        elif request.path == "/v1/completions":
            asked = request.json()
            native = {"input_ids": asked["prompt"], "sampling_params": {"max_new_tokens": asked.get("max_tokens", 16)}}
            await self._serve({**asked, **native, "is_openai": True}, reply)
        else:
            await reply.whole(404, {"detail": "Not Found"})

    async def _serve(self, body: dict[str, Any], reply: Reply) -> None:
        self.bodies.append(body)
        if await self.faults.answer(reply):
            return
        room = body.get("bootstrap_room")
        if self.role and room is None:
            words = f"Disaggregated request received without bootstrap room id. req.rid={body.get('rid')!r}"
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
        rank = body.get("routed_dp_rank", body.get("data_parallel_rank"))
        if rank is not None and not 0 <= rank < self.options.ranks:
            words = f"routed_dp_rank={rank} out of range [0, {self.options.ranks})"
            await reply.whole(400, {"error": {"message": words}})
            return
        cache = self.caches[rank or 0]
        # What has an extra key alone is apart as well, and no event says so.
        salt = body.get("cache_salt") if not self._is_old else None
        salt = salt or (f"{UNNAMED}{key}" if (key := body.get("extra_key")) else "")
        sequence, cached = cache.begin(prompt, body.get("lora_path") or "", salt)
        self.running += 1
        try:
            await self._answer(body, reply, cache, sequence, cached)
        except asyncio.CancelledError:
            self.aborted.set()
            raise
        finally:
            self.running -= 1
            cache.end(sequence)

    async def _answer(
        self, body: dict[str, Any], reply: Reply, cache: PagedCache, sequence: Running, cached: int
    ) -> None:
        count = 1 if self.role == "prefill" else body["sampling_params"]["max_new_tokens"]
        abort_after = self.faults.errors_after.popleft() if self.faults.errors_after else None
        prompt = list(sequence.tokens)
        if body.get("stream"):
            await reply.begin()
        made: list[int] = []
        for number in range(count):
            await asyncio.sleep(self.options.step_s)
            cache.fill(sequence, len(sequence.tokens))
            token = next_token(sequence.tokens)
            sequence.tokens.append(token)
            made.append(token)
            await self._publish()
            finish: dict[str, Any] | None = {"type": "length", "length": count} if number + 1 == count else None
            if number + 1 == abort_after:
                finish = {"type": "abort", "message": "KV transfer failed", "status_code": 500}
            if body.get("stream"):
                await reply.event(self._chunk(body, prompt, made, finish, cached), self.options.torn)
            if number + 1 == abort_after:
                break
        if body.get("stream"):
            await reply.event(b"[DONE]")
            await reply.end()
        else:
            await reply.whole(200, self._chunk(body, prompt, made, {"type": "length", "length": count}, cached))

    def _chunk(
        self, body: dict[str, Any], prompt: list[int], made: list[int], finish: dict[str, Any] | None, cached: int
    ) -> dict[str, Any]:
        if body.get("is_openai"):
            new = made[-1:] if body.get("stream") else made
            choice = {"index": 0, "text": "?" * len(new), "token_ids": new, "finish_reason": finish and finish["type"]}
            usage = {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(made),
                "prompt_tokens_details": {"cached_tokens": cached},
            }
            head = {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "tiny"}
            return {**head, "choices": [choice], "usage": None if body.get("stream") else usage}
        shown = made[-1:] if self.incremental and body.get("stream") else made
        meta: dict[str, Any] = {
            "id": body.get("rid"),
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
