"""Runs against a real endpoint on a real socket: what is sent, what is counted, and what each fault becomes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from itertools import chain, count, islice, repeat
from typing import Any

import msgspec
import pytest

from poolgrid.plugins.bench.client import BenchExchange, Client, HttpTarget, RequestFailed
from poolgrid.plugins.bench.conversations import (
    ConversationShape,
    PlannedConversation,
    plan_conversations,
    synthetic,
)
from poolgrid.plugins.bench.prompt import PlannedRequest, PromptMaker, WordScale
from poolgrid.plugins.bench.runner import Planned, RequestShape, Result, measure_word_scale, run
from poolgrid.server.process.clock import SystemClock
from tests.bench.fake_endpoint import FakeEndpoint, answer_of, serving

PROMPTS = PromptMaker(16, 255)


def requests(count: int, *, isl: int = 20, osl: int = 3, at_ms: Iterable[float | None] = ()) -> list[PlannedRequest]:
    times = chain(islice(at_ms, count), repeat(None))
    made = islice(synthetic(isl=isl, osl=osl, seed=0), count)
    return [msgspec.structs.replace(each, at_ms=at) for each, at in zip(made, times, strict=False)]


def drive(
    endpoint: FakeEndpoint,
    planned: Iterable[Planned],
    *,
    api: str = "completions",
    text: bool = False,
    request_timeout_s: float = 30.0,
    api_key: str | None = None,
    **options: Any,
) -> Result:
    clock = SystemClock()
    client = Client(HttpTarget(endpoint.url), clock, request_timeout_s=request_timeout_s, api_key=api_key)
    shape = RequestShape("fake-model", api, text)
    return asyncio.run(run(client, shape, PROMPTS, planned, clock, **options))


class TestWhatIsSent:
    def test_a_completion_carries_token_ids_and_asks_for_a_stream_with_usage(self) -> None:
        planned = requests(1, isl=5, osl=2)

        with serving(FakeEndpoint()) as endpoint:
            drive(endpoint, planned, concurrency=1, api_key="secret")

        assert endpoint.bodies == [
            {
                "model": "fake-model",
                "prompt": PROMPTS.token_ids(planned[0]),
                "max_tokens": 2,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
            }
        ]
        assert b"\r\nAuthorization: Bearer secret\r\n" in endpoint.headers[0]

    def test_text_mode_sends_words(self) -> None:
        planned = requests(1, isl=5)

        with serving(FakeEndpoint()) as endpoint:
            result = drive(endpoint, planned, concurrency=1, text=True)

        assert endpoint.bodies[0]["prompt"] == PROMPTS.text(planned[0])
        assert result.measured.prompt_tokens == 5

    def test_chat_sends_a_message(self) -> None:
        planned = requests(1, isl=5, osl=4)

        with serving(FakeEndpoint()) as endpoint:
            result = drive(endpoint, planned, api="chat", concurrency=1)

        assert endpoint.bodies[0]["messages"] == [{"role": "user", "content": PROMPTS.text(planned[0])}]
        assert result.measured.itl_ms.count == 3, "the empty chunk with the role is no token"

    @pytest.mark.parametrize("key", ["two\r\nlines", "ümlaut"])
    def test_an_api_key_that_is_no_header_is_refused(self, key: str) -> None:
        with pytest.raises(ValueError, match="API key"):
            Client(HttpTarget("http://127.0.0.1"), SystemClock(), api_key=key)


class TestWhatIsCounted:
    def test_a_closed_loop_counts_tokens_workers_and_cache(self) -> None:
        planned = requests(6, isl=40, osl=3)

        with serving(FakeEndpoint()) as endpoint:
            measured = drive(endpoint, planned * 2, concurrency=1).measured

        assert (measured.requests, measured.errors) == (12, 0)
        assert (measured.prompt_tokens, measured.output_tokens) == (480, 36)
        assert measured.cached_tokens == 6 * 32, "the second round finds the whole blocks of the first"
        assert (measured.ttft_ms.count, measured.itl_ms.count) == (12, 24)
        assert {name: share.requests for name, share in measured.per_worker.items()} == {"w0": 6, "w1": 6}
        assert endpoint.connections == 1, "one connection is kept alive"

    def test_times_are_those_of_the_server(self) -> None:
        """Lower bounds only: a busy machine makes everything later, never earlier."""
        with serving(FakeEndpoint(ttft_s=0.03, itl_s=0.01)) as endpoint:
            measured = drive(endpoint, requests(4, osl=4), concurrency=2).measured

        assert measured.ttft_ms.smallest >= 29
        assert measured.itl_ms.mean is not None
        assert measured.itl_ms.mean >= 9
        assert measured.latency_ms.smallest >= 58

    def test_the_closed_loop_keeps_its_concurrency(self) -> None:
        with serving(FakeEndpoint(gate=4)) as endpoint:
            measured = drive(endpoint, requests(20), concurrency=4).measured

        assert measured.succeeded == 20
        assert (endpoint.running_max, endpoint.connections) == (4, 4)

    def test_a_duration_ends_the_closed_loop(self) -> None:
        endless = synthetic(isl=5, osl=1, seed=0)

        with serving(FakeEndpoint(ttft_s=0.005)) as endpoint:
            result = drive(endpoint, endless, concurrency=2, duration_s=0.1)

        assert result.measured.requests > 2
        assert result.duration_s >= 0.1
        assert not result.interrupted

    def test_an_answer_without_usage_counts_what_was_asked_and_seen(self) -> None:
        with serving(FakeEndpoint(fault=lambda _: "no-usage")) as endpoint:
            measured = drive(endpoint, requests(1, isl=7, osl=3), concurrency=1).measured

        assert (measured.without_usage, measured.prompt_tokens, measured.output_tokens) == (1, 7, 3)

    def test_every_text_is_offered_for_verification(self) -> None:
        def expected(request: PlannedRequest) -> str:
            return "".join(answer_of(PROMPTS.token_ids(request), number) for number in range(request.osl))

        with serving(FakeEndpoint()) as endpoint:
            good = drive(endpoint, requests(8), concurrency=4, verify=lambda request, text: text == expected(request))
            bad = drive(endpoint, requests(8), concurrency=4, verify=lambda request, _text: request.index != 3)

        assert (good.measured.wrong_texts, bad.measured.wrong_texts) == (0, 1)


def conversations(count: int, **shape: Any) -> list[PlannedConversation]:
    told = ConversationShape(**{"turns": 3, "isl": 10, "osl": 2, **shape})
    return list(islice(plan_conversations(told, seed=0), count))


class TestConversations:
    def test_each_turn_is_sent_with_all_that_was_said_before(self) -> None:
        planned = conversations(1, shared_prefix=20)

        with serving(FakeEndpoint()) as endpoint:
            measured = drive(endpoint, planned, api="chat", concurrency=1).measured

        first, second, third = (body["messages"] for body in endpoint.bodies)
        assert [message["role"] for message in third] == ["system", "user", "assistant", "user", "assistant", "user"]
        assert [len(message["content"].split()) for message in first] == [20, 10]
        assert second[:2] == first
        assert third[:4] == second
        said = [answer_of(" ".join(message["content"] for message in first), number) for number in range(2)]
        assert second[2]["content"] == "".join(said)
        assert measured.requests == 3
        # Of the second and third turn all but their own question has been there before.
        assert measured.reusable_tokens == sum(len(part) for part in ([], ["x"] * 32, ["x"] * 44))

    def test_a_system_prompt_is_reusable_once_it_was_sent(self) -> None:
        planned = conversations(4, turns=1, shared_prefix=20)

        with serving(FakeEndpoint()) as endpoint:
            measured = drive(endpoint, planned, concurrency=1).measured

        assert {tuple(body["prompt"][:20]) for body in endpoint.bodies} == {tuple(endpoint.bodies[0]["prompt"][:20])}
        assert len({tuple(body["prompt"]) for body in endpoint.bodies}) == 4
        assert (measured.prompt_tokens, measured.reusable_tokens) == (120, 60)
        assert measured.cached_tokens == 3 * 16, "whole blocks"

    def test_a_turn_that_fails_ends_its_conversation_and_no_other(self) -> None:
        with serving(FakeEndpoint(fault=lambda number: "busy" if number == 1 else None)) as endpoint:
            measured = drive(endpoint, conversations(2), api="chat", concurrency=1).measured

        assert (measured.succeeded, measured.errors) == (4, 1)
        assert len(endpoint.bodies[2]["messages"]) == 1, "the next conversation began"

    def test_a_pause_that_is_longer_than_the_run_ends_its_conversation(self) -> None:
        endless = plan_conversations(ConversationShape(2, 10, 1, think_time_s=3600.0), seed=0)

        with serving(FakeEndpoint(ttft_s=0.005)) as endpoint:
            result = drive(endpoint, endless, api="chat", concurrency=2, duration_s=0.1)

        assert result.measured.requests >= 2
        assert all(len(body["messages"]) == 1 for body in endpoint.bodies)

    def test_users_think_before_each_question_but_the_first(self) -> None:
        planned = list(islice(plan_conversations(ConversationShape(2, 5, 1, think_time_s=0.05), seed=0), 2))

        with serving(FakeEndpoint()) as endpoint:
            result = drive(endpoint, planned, api="chat", concurrency=2)

        assert result.measured.requests == 4
        assert result.duration_s >= max(each.pauses_ms[1] for each in planned) / 1000


class TestWordScale:
    @pytest.mark.parametrize("isl", [40, 1000])
    def test_words_are_as_many_as_make_the_tokens_that_were_asked_for(self, isl: int) -> None:
        with serving(FakeEndpoint(tokens_per_word=1.9, overhead_tokens=7)) as endpoint:
            client = Client(HttpTarget(endpoint.url), SystemClock())
            shape = RequestShape("fake-model", "chat")

            async def go() -> Result:
                scale = await measure_word_scale(client, shape)
                prompts = PromptMaker(16, 255, scale)
                return await run(client, shape, prompts, requests(4, isl=isl), SystemClock(), concurrency=1)

            measured = asyncio.run(go()).measured

        assert measured.prompt_tokens / 4 == pytest.approx(isl, abs=2)

    def test_an_endpoint_without_usage_is_taken_at_a_token_a_word(self) -> None:
        with serving(FakeEndpoint(fault=lambda _: "no-usage", tokens_per_word=2)) as endpoint:
            client = Client(HttpTarget(endpoint.url), SystemClock())

            async def go() -> WordScale:
                try:
                    return await measure_word_scale(client, RequestShape("fake-model", "chat"))
                finally:
                    client.close()

            assert asyncio.run(go()) == WordScale(1.0, 0)


class TestSchedules:
    def test_requests_leave_at_their_times_and_are_remembered_in_order(self) -> None:
        planned = requests(5, at_ms=count(0.0, 10.0))

        with serving(FakeEndpoint()) as endpoint:
            result = drive(endpoint, planned, remember_sent=True)

        assert result.sent == planned
        assert result.duration_s >= 0.04
        assert result.measured.requests == 5

    def test_latency_counts_from_the_scheduled_time_and_the_limit_delays_visibly(self) -> None:
        """Ten requests due at once, one slot, 20 ms each: the last waits for nine others, and that shows."""
        with serving(FakeEndpoint(ttft_s=0.02)) as endpoint:
            measured = drive(endpoint, requests(10, osl=1, at_ms=[0.0] * 10), in_flight_max=1).measured

        assert endpoint.running_max == 1
        assert measured.delayed == 9
        assert measured.ttft_ms.largest >= 10 * 19
        assert measured.succeeded == 10

    def test_arrivals_do_not_wait_for_answers(self) -> None:
        with serving(FakeEndpoint(gate=10)) as endpoint:
            measured = drive(endpoint, requests(10, at_ms=[0.0] * 10)).measured

        assert (measured.succeeded, measured.delayed, endpoint.running_max) == (10, 0, 10)

    @pytest.mark.parametrize("options", [{"concurrency": 2}, {"in_flight_max": 2}])
    def test_a_stop_ends_the_run_with_what_was_measured(self, options: dict[str, int]) -> None:
        endpoint = FakeEndpoint(fault=lambda number: "hold" if number >= 3 else None)
        planned = requests(100, at_ms=[0.0] * 100)

        async def main() -> Result:
            clock = SystemClock()
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()

            def when_held() -> None:
                assert endpoint.holding.wait(10)
                loop.call_soon_threadsafe(stop.set)

            watcher = threading.Thread(target=when_held)
            watcher.start()
            try:
                client = Client(HttpTarget(endpoint.url), clock)
                return await run(client, RequestShape("m"), PROMPTS, planned, clock, stop=stop, **options)  # type: ignore[arg-type]
            finally:
                watcher.join(10)

        with serving(endpoint):
            result = asyncio.run(main())

        assert result.interrupted
        assert result.measured.errors == 0
        assert 0 < result.measured.succeeded <= 3
        assert result.measured.cancelled >= 1


class TestFaults:
    @pytest.mark.parametrize(
        ("fault", "kind", "words"),
        [
            ("busy", "http-429", "full (Retry-After: 3)"),
            ("close", "disconnect", "without an answer"),
            ("cut", "disconnect", "after 1 chunks"),
            ("end", "stream-cut", "after 1 chunks without an end mark"),
            ("garbage", "protocol", "{oops"),
            ("error", "stream-error", "worker lost"),
            ("not-http", "protocol", "SSH-2.0"),
        ],
    )
    def test_a_fault_is_counted_by_kind_and_the_run_goes_on(self, fault: str, kind: str, words: str) -> None:
        def at_the_first(number: int) -> str | None:
            return fault if number == 0 else None

        with serving(FakeEndpoint(fault=at_the_first)) as endpoint:
            measured = drive(endpoint, requests(4), concurrency=1).measured

        assert (measured.succeeded, measured.errors) == (3, 1)
        assert list(measured.errors_by_kind) == [kind]
        assert words in measured.errors_by_kind[kind].samples[0]

    def test_an_answer_that_never_comes_is_a_timeout(self) -> None:
        with serving(FakeEndpoint(fault=lambda number: "hold" if number == 0 else None)) as endpoint:
            measured = drive(endpoint, requests(2), concurrency=1, request_timeout_s=0.2).measured

        assert (measured.succeeded, measured.errors_by_kind["timeout"].count) == (1, 1)

    def test_a_server_that_is_gone_is_counted_per_request(self) -> None:
        with serving(FakeEndpoint()) as endpoint:
            pass

        measured = drive(endpoint, requests(3), concurrency=1).measured

        assert measured.errors_by_kind["connect"].count == 3

    def test_a_kept_connection_that_the_server_closed_is_replaced_without_an_error(self) -> None:
        """The second request meets a connection that closes before it answers; it is sent again on a new one."""
        with serving(FakeEndpoint(fault=lambda number: "close" if number == 1 else None)) as endpoint:
            measured = drive(endpoint, requests(3), concurrency=1).measured

        assert (measured.succeeded, measured.errors, endpoint.connections) == (3, 0, 2)

    def test_a_fault_of_our_own_is_not_swallowed(self) -> None:
        def broken(_request: PlannedRequest, _text: str) -> bool:
            raise RuntimeError("a bug in the verification")

        both: list[dict[str, Any]] = [{"concurrency": 1}, {"in_flight_max": 4}]
        for options in both:
            with serving(FakeEndpoint()) as endpoint, pytest.raises(RuntimeError, match="a bug"):
                drive(endpoint, requests(3, at_ms=[0.0] * 3), verify=broken, **options)


def stream(*pieces: bytes, status: int = 200) -> BenchExchange:
    exchange = BenchExchange()
    exchange.status = status
    for number, piece in enumerate(pieces):
        exchange.now_ms = 10.0 * number
        exchange.take_body(piece)
        exchange.end_of_read()
    return exchange


EVENTS = b'data: {"choices":[{"text":"a"}]}\r\n\r\ndata:{"choices":[{"text":"\xc3\xa4"}]}\n\ndata: [DONE]\n\n'


class TestExchange:
    @pytest.mark.parametrize("cut", range(len(EVENTS) + 1))
    def test_a_stream_may_be_cut_anywhere(self, cut: int) -> None:
        exchange = stream(EVENTS[:cut], EVENTS[cut:])

        exchange.conclude()

        assert (exchange.text, exchange.chunks, exchange.done) == ("aä", 2, True)

    def test_chunks_of_one_read_share_the_gap_before_them(self) -> None:
        piece = b'data: {"choices":[{"text":"x"}]}\n\n'

        exchange = stream(piece * 2, piece, b"", piece * 4)

        assert exchange.first_ms == 0
        assert exchange.gaps_ms == [(0.0, 1), (10.0, 1), (5.0, 4)]

    def test_reasoning_counts_as_text(self) -> None:
        exchange = stream(b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n')

        assert exchange.text == "hm"

    def test_a_finish_reason_is_an_end_mark_too(self) -> None:
        stream(b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\n').conclude()

    def test_a_long_error_page_is_cut(self) -> None:
        exchange = stream(b"x" * 10_000, b"y" * 10_000, status=500)

        with pytest.raises(RequestFailed, match=r"^http-500: x+$") as caught:
            exchange.conclude()

        assert len(caught.value.detail) <= 300


class TestTarget:
    @pytest.mark.parametrize(
        ("url", "parts"),
        [
            ("http://h:8000", ("h", 8000, False, "", "http://h:8000")),
            ("http://h:8000/v1/", ("h", 8000, False, "", "http://h:8000")),
            ("https://h/base/v1", ("h", 443, True, "/base", "https://h/base")),
            ("http://[::1]:9", ("::1", 9, False, "", "http://[::1]:9")),
        ],
    )
    def test_urls(self, url: str, parts: tuple[object, ...]) -> None:
        target = HttpTarget(url)

        assert (target.host, target.port, target.secure, target.path, target.url) == parts

    @pytest.mark.parametrize("url", ["h:8000", "ftp://h", "http://", "http://h:port", "http://h:99999", ""])
    def test_what_is_no_url_is_refused_with_its_value(self, url: str) -> None:
        with pytest.raises(ValueError, match="reading the URL") as caught:
            HttpTarget(url)

        assert repr(url) in str(caught.value)


def test_synthetic_requests_share_nothing_and_repeat_with_their_seed() -> None:
    one, again, other = (list(islice(synthetic(isl=100, osl=7, seed=seed), 3)) for seed in (1, 1, 2))

    assert one == again
    assert len({request.block_ids for request in one + other}) == 6
    assert {(request.at_ms, request.isl, request.osl, request.block_tokens) for request in one} == {(None, 100, 7, 100)}
