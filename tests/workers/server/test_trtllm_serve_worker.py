"""A worker in front of trtllm-serve: of ours, which follows the published protocol."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq.asyncio

from poolgrid.wire.events import BlocksStored, CacheCleared, RequestFinished
from poolgrid.wire.hashing import pack_tokens
from poolgrid.wire.requests import FinishReason, Generate, RefusalKind, Routing, Sampling
from poolgrid.workers.core.refusal import RefusedError
from poolgrid.workers.engines.server.dialects.trtllm_serve import TrtllmServeDialect
from tests.fakes.engine_server.trtllm_serve import TrtllmServe
from tests.fakes.engine_server.vllm import Options, answer_of
from tests.workers.builders import decode_leg, make_request, prefill_leg
from tests.workers.server.running import worker_before


@asynccontextmanager
async def serving(options: Options | None = None, kind: type[TrtllmServe] = TrtllmServe) -> AsyncIterator[TrtllmServe]:
    context = zmq.asyncio.Context()
    server = kind(context, options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
        context.destroy(linger=0)


async def test_tokens_for_tokens_and_the_drained_events_are_the_index() -> None:
    async with (
        serving(Options(blocks=32)) as server,
        worker_before(server, "trtllm-serve", kv_block_size=4) as front,
    ):
        assert (front.journal.cards[0].engine, front.journal.cards[0].block_size) == ("trtllm-serve 1.3.0", 4)
        prompt = list(range(10, 31))
        for name in ("cold", "warm"):
            await front.router.send(make_request(name, prompt, 6, logprobs=0))
            await front.router.until_finished(name)
            assert front.router.output(name) == pack_tokens(answer_of(prompt, 6))
        await front.consolidator.until(lambda journal: RequestFinished("warm", "length", 20) in journal.events)
        for number in range(12):  # evicts
            await front.router.send(make_request(f"r{number}", [number] * 20, 9))
            await front.router.until_finished(f"r{number}")
        await front.settled()
        server.faults.cuts_after.append(2)
        await front.router.send(make_request("cut", prompt, 6))
        await front.router.until_finished("cut")
        assert front.router.last("cut").refusal is RefusalKind.BROKEN
        server.faults.cuts_after.clear()
        # What another reader takes away is a hole: claims are taken back, and learnt again.
        server.events.clear()
        await server.stop()
        await front.consolidator.until(lambda journal: journal.goodbyes)
        await server.start()
        await front.consolidator.until(lambda journal: len(journal.cards) > 1)
        await front.settled()


class FannedOut(TrtllmServe):
    """A server of 1.4: it passes on what is stored and removed, so that its numbers have holes."""

    version = "1.4.0rc4"

    def _say(self, data: dict[str, Any]) -> None:
        super()._say(data)
        self._event_id += 3
        self.events = [event for event in self.events if event["data"]["type"] != "created"]


async def test_the_holes_of_a_fan_out_are_no_losses() -> None:
    async with (
        serving(Options(blocks=32), FannedOut) as server,
        worker_before(server, "trtllm-serve", kv_block_size=4) as front,
    ):
        for number in range(12):  # evicts
            await front.router.send(make_request(f"r{number}", [number] * 20, 9))
            await front.router.until_finished(f"r{number}")
        await front.settled()
        assert CacheCleared() not in front.journal.events


async def test_prompt_and_output_on_two_servers_of_their_own() -> None:
    prompt = list(range(40, 60))
    async with (
        serving() as first,
        worker_before(first, "trtllm-serve", role="prefill", kv_block_size=4) as prefill,
        serving() as second,
        worker_before(second, "trtllm-serve", role="decode", kv_block_size=4) as decode,
    ):
        leg = prefill_leg(make_request("r", prompt, 5))
        await prefill.router.send(leg)
        await prefill.router.until_finished("r")
        left = prefill.router.last("r")
        assert (left.finish_reason, left.token_ids) == (FinishReason.PREFILLED, b"")
        assert first.bodies[0]["disaggregated_params"]["disagg_request_id"] >= 1 << 42
        await decode.router.send(decode_leg(leg, left))
        await decode.router.until_finished("r")
        assert decode.router.output("r") == pack_tokens(answer_of(prompt, 5))
        given = second.bodies[0]["disaggregated_params"]
        assert (given["request_type"], given["encoded_opaque_state"]) == ("generation_only", "b3BhcXVl")


async def test_a_server_that_does_not_say_its_block_size_is_routed_to_without_its_events(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as server, worker_before(server, "trtllm-serve") as front:
        assert front.journal.cards[0].block_size == 16
        prompt = list(range(10, 60))
        await front.router.send(make_request("r", prompt, 2))
        await front.router.until_finished("r")
        await front.consolidator.until(lambda journal: RequestFinished in map(type, journal.events))
        assert BlocksStored not in map(type, front.journal.events), "their size is not known"
        assert "it does not report its block size: give kv_block_size" in caplog.text


def asked(routing: Routing | None = None, **sampling: Any) -> dict[str, Any]:
    request = Generate("r", pack_tokens([5]), Sampling(**{"max_tokens": 9, **sampling}), routing=routing or Routing())
    body: dict[str, Any] = json.loads(TrtllmServeDialect("m").call(request).body)
    return body


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": 0.0, "top_k": 3}, {"temperature": 0.0, "top_k": 3}),
        ({"guided_json": b'{"type":"object"}'}, {"response_format": {"type": "json", "schema": {"type": "object"}}}),
        ({"guided_regex": "a+"}, {"response_format": {"type": "regex", "regex": "a+"}}),
        ({"guided_choice": ("a.", "b")}, {"response_format": {"type": "regex", "regex": "(a\\.|b)"}}),
        ({"bad_token_ids": (7,)}, {"logit_bias": {"7": -100.0}}),
        ({"logprobs": 0}, {"logprobs": 1}),
    ],
)
def test_what_is_asked_is_said_in_its_words(sampling: dict[str, Any], words: dict[str, Any]) -> None:
    assert asked(**sampling).items() >= {"detokenize": False, **words}.items()


@pytest.mark.parametrize(
    ("routing", "sampling", "words"),
    [
        (Routing(lora_name="poet"), {}, "lora_name"),
        (Routing(cache_salt="s"), {}, "cache_salt"),
        (Routing(), {"logprobs": 2}, "named|names alternatives by their texts"),
        (Routing(), {"prompt_logprobs": 0}, "prompt_logprobs"),
        (Routing(), {"structural_tag": "{}"}, "structural_tag"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(routing: Routing, sampling: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        asked(routing, **sampling)
