"""A worker in front of SGLang's server: of ours, which follows the published protocol."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from poolgrid.wire.events import RequestStarted
from poolgrid.wire.hashing import pack_tokens
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.requests import FinishReason, Generate, RefusalKind, Routing, Sampling
from poolgrid.workers.core.refusal import RefusedError
from poolgrid.workers.engines.server.dialects.sglang import SglangDialect, _names_tenants
from tests.fakes.engine_server.sglang import SglangServer
from tests.fakes.engine_server.vllm import answer_of
from tests.workers.builders import decode_leg, make_request, prefill_leg
from tests.workers.server.running import worker_before


@asynccontextmanager
async def sglang_server(**how: Any) -> AsyncIterator[SglangServer]:
    context = zmq.asyncio.Context()
    server = SglangServer(context, **how)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
        context.destroy(linger=0)


@pytest.mark.parametrize(("incremental", "version"), [(False, "0.5.9"), (True, "0.5.23")])
async def test_tokens_for_tokens_and_the_index_is_what_the_server_holds(incremental: bool, version: str) -> None:
    async with (
        sglang_server(incremental=incremental, version=version) as server,
        worker_before(server, "sglang") as front,
    ):
        card = front.journal.cards[0]
        assert (card.engine, card.block_size, card.limits.total_kv_blocks) == (f"SGLang {version}", 4, 512)
        assert (card.limits.max_batch_size, card.limits.max_num_tokens) == (64, 2048)
        prompt = list(range(10, 31))
        for name in ("cold", "warm"):
            await front.router.send(make_request(name, prompt, 6, logprobs=1))
            await front.router.until_finished(name)
            assert front.router.output(name) == pack_tokens(answer_of(prompt, 6))
            assert front.router.last(name).finish_reason is FinishReason.LENGTH
            assert all(each.logprobs for each in front.router.deltas[name] if each.token_ids)
        assert [front.router.deltas[name][0].cached_tokens for name in ("cold", "warm")] == [0, 20]
        await front.settled()
        await front.consolidator.until(
            lambda journal: (
                [(each.cached_tokens, each.cached_later) for each in journal.events if isinstance(each, RequestStarted)]
                == [(0, False), (20, False)]
            )
        )
        server.faults.errors_after.append(2)
        await front.router.send(make_request("amid", prompt, 6))
        await front.router.until_finished("amid")
        assert front.router.last("amid").refusal is RefusalKind.BROKEN
        assert front.router.last("amid").error == "SGLang failed (status 500)", "its words are for the log"


async def test_both_legs_of_a_request_meet_in_a_room() -> None:
    prompt = list(range(40, 60))
    async with (
        sglang_server(role="prefill") as first,
        worker_before(first, "sglang", role="prefill") as prefill,
        sglang_server(role="decode") as second,
        worker_before(second, "sglang", role="decode") as decode,
    ):
        leg = prefill_leg(make_request("r", prompt, 5))
        await prefill.router.send(leg)
        await prefill.router.until_finished("r")  # though its server waits for the other one
        left = prefill.router.last("r")
        assert (left.finish_reason, left.token_ids) == (FinishReason.PREFILLED, b"")
        await decode.router.send(decode_leg(leg, left))
        await decode.router.until_finished("r")
        assert decode.router.output("r") == pack_tokens(answer_of(prompt, 5))
        rooms = [each.bodies[0]["bootstrap_room"] for each in (first, second)]
        assert rooms[0] == rooms[1]
        assert first.bodies[0]["bootstrap_host"] == "127.0.0.1"


async def test_a_server_that_was_started_for_a_leg_takes_nothing_else_and_its_worker_says_so() -> None:
    async with sglang_server(role="decode") as server:
        async with worker_before(server, "sglang", role="decode") as front:
            assert front.journal.cards[0].decodes_only
            await front.router.send(make_request("whole", [1, 2, 3], 2))
            await front.router.until_finished("whole")
            assert front.router.last("whole").refusal is RefusalKind.BROKEN
            assert not server.bodies, "the server would refuse it"
        with pytest.raises(ValueError, match=r"role is 'aggregated', and SGLang at .* was started for 'decode'"):
            async with worker_before(server, "sglang"):
                pass


def asked(dialect: SglangDialect | None = None, routing: Routing | None = None, **sampling: Any) -> dict[str, Any]:
    request = Generate(
        "r",
        pack_tokens([5, 6]),
        Sampling(**{"max_tokens": 9, **sampling}),
        stop_token_ids=(2,),
        routing=routing or Routing(),
    )
    body: dict[str, Any] = json.loads((dialect or SglangDialect()).call(request).body)
    return body


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": 0.0, "top_k": 0}, {"temperature": 0.0}),
        ({"min_tokens": 2, "seed": 4}, {"min_new_tokens": 2, "sampling_seed": 4}),
        ({"bad_token_ids": (7,)}, {"logit_bias": {"7": -100.0}}),
        ({"guided_json": b"{}"}, {"json_schema": "{}"}),
        ({"guided_grammar": "root ::= x"}, {"ebnf": "root ::= x"}),
        ({"guided_choice": ("a.", "b")}, {"regex": "(a\\.|b)"}),
    ],
)
def test_what_is_asked_of_sampling_is_said_in_its_words(sampling: dict[str, Any], words: dict[str, Any]) -> None:
    said = asked(**sampling)["sampling_params"]

    assert said == {"max_new_tokens": 9, "stop_token_ids": [2], **words}


def test_priorities_ranks_salts_and_adapters_go_where_the_server_reads_them() -> None:
    routing = Routing(dp_rank=1, priority=3, lora_name="poet", cache_salt="s")
    dialect = SglangDialect(ranks=2, priorities=True, lower_is_earlier=True, follows_events=False)

    assert (
        asked(dialect, routing).items()
        >= {
            "data_parallel_rank": 1,
            "priority": -3,
            "lora_path": "poet",
            "extra_key": "s",
        }.items()
    )


@pytest.mark.parametrize("routing", [Routing(cache_salt="s"), Routing(lora_name="poet")])
def test_what_its_events_cannot_tell_apart_is_refused_while_they_are_followed(routing: Routing) -> None:
    with pytest.raises(RefusedError, match="shared between all tenants"):
        asked(routing=routing)


def test_salts_and_adapters_go_in_fields_that_its_events_name_them_by() -> None:
    said = asked(SglangDialect(names_tenants=True), Routing(cache_salt="s", lora_name="poet"))
    assert (said["cache_salt"], said["lora_path"], "extra_key" in said) == ("s", "poet", False)


@pytest.mark.parametrize(
    ("version", "names"), [("0.5.22", False), ("0.5.23", True), ("0.5.23.post1", True), ("1.0.0rc1", True), ("", False)]
)
def test_events_name_tenants_from_a_version_on(version: str, names: bool) -> None:
    assert _names_tenants(version) is names


def test_a_decode_leg_of_another_engine_is_refused() -> None:
    leg = Generate("r", pack_tokens([5]), Sampling(9), disaggregated_params=b'{"x":1}', stage=Stage.DECODE)
    for wrong in (leg, msgspec.structs.replace(leg, disaggregated_params=None)):
        with pytest.raises(RefusedError):
            SglangDialect().call(wrong)
