"""What a gateway is told: real messages of ext-proc in, real messages out, over a fleet of a test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from poolgrid.kernel.decision.decision import Decision, DecisionLog
from poolgrid.kernel.requests.inference import InferenceRequest
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.events import WorkerDraining, WorkerJoined
from poolgrid.kernel.wire.identifiers import Role, WorkerKey
from poolgrid.kernel.wire.requests import ForwardBegan, ForwardEnded, Sampling
from poolgrid.plugins.endpoint_picker import envoy_messages as envoy
from poolgrid.plugins.endpoint_picker.access_log import GONE_MS, GatewayLogs, ended_bookings
from poolgrid.plugins.endpoint_picker.exchange import TAIL_BYTES, AnswerReader, PickerExchange, ProtocolError
from poolgrid.plugins.endpoint_picker.metrics import PickerMetrics
from poolgrid.plugins.endpoint_picker.picker import KEPT_MAX_MS, Picker
from poolgrid.plugins.endpoint_picker.stream_table import StreamTable
from poolgrid.server.frontend.request_body import RequestIds
from poolgrid.server.http.http_settings import HttpLimits
from poolgrid.server.proxy.prompt_reading import PromptReader, PromptReading
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.router.service import RouterService
from poolgrid.server.serving.links import WorkerLink
from tests.clock import HandClock
from tests.router.fleet_builder import BLOCK_SIZE, Pool, make_card, stored, worker_key

PATH = [11, 12, 13]
BODY = b'{"model": "m"}'


def card_at(
    *endpoints: str,
    ranks: int = 1,
    max_batch_size: int = 8,
    role: Role = Role.AGGREGATED,
    decodes_only: bool = False,
) -> WorkerCard:
    card = make_card(max_batch_size=max_batch_size, role=role)
    return msgspec.structs.replace(card, serving_endpoints=endpoints, dp_size=ranks, decodes_only=decodes_only)


class View:
    """The router, as the picker sees it."""

    def __init__(self, pool: Pool) -> None:
        self.ready = True
        self.projection = pool.projection
        self.decisions = DecisionLog(10)
        self.behind_records = 0
        self.load_changes = 0

    def reserved(self, decision: Decision, path: Sequence[int]) -> None:
        self.decisions.add(decision)

    def retry_after_s(self) -> float:
        return 6.2

    def room_changed(self) -> None:
        self.load_changes += 1


class OnePrompt:
    """Reads every body as the same prompt of three blocks, for an adapter where the path names one."""

    async def read(self, path: str, body: bytes, request_id: str) -> PromptReading:
        request = InferenceRequest(
            request_id, "m", bytes(4 * 3 * BLOCK_SIZE), Sampling(max_tokens=1), lora_name=path.partition("?")[2]
        )
        return PromptReading("m", request, 3 * BLOCK_SIZE)


class Told:
    """The link to a worker: what it was told of its server's requests."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def forward_began(self, began: ForwardBegan) -> None:
        self.told.append(("began", began.request_id.partition("~")[0]))

    def forward_computed(self, request_id: str) -> None:
        self.told.append(("computed", request_id.partition("~")[0]))

    def forward_ended(self, ended: ForwardEnded) -> None:
        self.told.append((ended.reason, ended.request_id.partition("~")[0]))


class Gateway:
    """A fleet, its picker, and one that asks."""

    def __init__(self, fallbacks: int = 2) -> None:
        self.pool = Pool()
        self.view = View(self.pool)
        self.clock = HandClock()
        self.registry = CollectorRegistry()
        self.metrics = PickerMetrics(self.registry)
        self.logs = GatewayLogs()
        self.links: dict[str, Told] = {}
        self.lacking: Mapping[WorkerKey, str] = {}
        self.reused: dict[str, int] = {}
        self.table = StreamTable(
            HttpLimits(unfinished_bytes=2000, head_bytes=500), 1000, lambda: self.clock.monotonic_ms() / 1000
        )
        selector = self.pool.selector(make_policy("kv"))
        self.picker = Picker(
            cast(RouterService, self.view),
            RouterState(selector),
            cast(PromptReader, OnePrompt()),
            lambda request: PATH,
            lambda request: self.lacking if request.lora_name else {},
            lambda worker: cast(WorkerLink, self.links.setdefault(str(worker), Told())),
            lambda dispatch_id, path, cached_tokens, isl: self.reused.__setitem__(dispatch_id, cached_tokens),
            RequestIds("g"),
            fallbacks,
            self.metrics,
            self.clock,
            self.logs,
        )

    def joined(self, **cards: WorkerCard) -> None:
        for name, card in cards.items():
            for rank in range(card.dp_size):
                self.pool.say(worker_key(name, rank), WorkerJoined(card))

    def exchange(self) -> PickerExchange:
        exchange = PickerExchange(self.picker, self.table, "envoy")
        assert self.table.enter(exchange)
        return exchange

    def booked(self) -> dict[str, str]:
        return {name.partition("~")[0]: str(worker) for worker, name in self.pool.projection.ledger.entries()}

    def lost(self, reason: str) -> float | None:
        return self.registry.get_sample_value("poolgrid_router_gateway_bookings_lost_total", {"reason": reason})

    @property
    def prefill_tokens(self) -> int:
        return int(self.pool.projection.ledger.prefill_tokens.sum())


def say(exchange: PickerExchange, message: Any) -> list[Any]:
    """What it answers, after a journey over the wire."""
    given = envoy.ProcessingRequest.FromString(message.SerializeToString())
    answers = asyncio.run(exchange.on(given))
    exchange.sent()
    return [envoy.ProcessingResponse.FromString(each.SerializeToString()) for each in answers]


def request_headers(
    mode: int = envoy.FULL_DUPLEX_STREAMED,
    ends: bool = False,
    subset: object = None,
    response_mode: int | None = None,
    **headers: str,
) -> Any:
    message = envoy.ProcessingRequest()
    message.protocol_config.request_body_mode = mode
    message.protocol_config.response_body_mode = mode if response_mode is None else response_mode
    message.request_headers.end_of_stream = ends
    known = {
        ":method": "POST",
        ":path": headers.pop("path", "/v1/completions"),
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    for name, value in known.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    if subset is not None:
        name = "x-gateway-destination-endpoint-subset"
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({name: subset})
    return message


def body(part: bytes, ends: bool = True, kind: str = "request_body") -> Any:
    message = envoy.ProcessingRequest()
    getattr(message, kind).body = part
    getattr(message, kind).end_of_stream = ends
    return message


def response_headers(status: str = "200", served: str = "", kind: str = "application/json") -> Any:
    message = envoy.ProcessingRequest()
    message.response_headers.headers.headers.add(key="content-type", raw_value=kind.encode())
    message.response_headers.headers.headers.add(key=":status", raw_value=status.encode())
    if served:
        name = "x-gateway-destination-endpoint-served"
        message.metadata_context.filter_metadata["envoy.lb"].update({name: served})
    return message


def asked(gateway: Gateway, name: str = "r", **head: Any) -> tuple[PickerExchange, list[Any]]:
    exchange = gateway.exchange()
    assert say(exchange, request_headers(x_request_id=name, **head)) == []
    return exchange, say(exchange, body(BODY))


def log_of(*names: str, kind: int = envoy.LOG_DOWNSTREAM_END) -> Any:
    """A message of a gateway's access log, after a journey over the wire."""
    message = envoy.StreamAccessLogsMessage()
    for name in names:
        common = message.http_logs.log_entry.add().common_properties
        common.access_log_type = kind
        common.metadata.filter_metadata["envoy.lb"].update({"x-poolgrid-booking": name})
    return envoy.StreamAccessLogsMessage.FromString(message.SerializeToString())


def log_entries(gateway: Gateway, message: Any) -> None:
    for name in ended_bookings(message):
        gateway.picker.logged(name)


EVENTS = "text/event-stream; charset=utf-8"


def streaming(gateway: Gateway, mode: int = envoy.STREAMED) -> tuple[PickerExchange, str]:
    """A request whose answer is a stream that has begun, and what the log calls it."""
    exchange, answers = asked(gateway, response_mode=mode)
    say(exchange, response_headers(kind=EVENTS))
    return exchange, str(answers[0].dynamic_metadata["envoy.lb"]["x-poolgrid-booking"])


def headers_of(answer: Any, phase: str = "request_headers") -> dict[str, str]:
    change = getattr(answer, phase).response.header_mutation
    return {each.header.key: each.header.raw_value.decode() for each in change.set_headers}


def endpoints(answers: list[Any], phase: str = "request_headers") -> list[str]:
    """What a gateway reads of the answer: the same in the header and in the metadata."""
    said = headers_of(answers[0], phase)["x-gateway-destination-endpoint"]
    metadata = answers[0].dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]
    assert metadata == said
    return said.split(",")


def test_who_holds_the_prompt_is_named_first_and_then_who_would_be_next() -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"), b=card_at("10.0.0.2:80"), c=card_at("10.0.0.3:80"), d=card_at())
    gateway.pool.say(worker_key("b"), stored([11, 12]))
    gateway.pool.say(worker_key("c"), stored([11]))

    exchange, answers = asked(gateway)

    assert endpoints(answers) == ["10.0.0.2:80", "10.0.0.3:80", "10.0.0.1:80"]
    assert [each.WhichOneof("said") for each in answers] == ["request_headers", "request_body"]
    assert answers[1].request_body.response.body_mutation.streamed_response.body == BODY
    assert gateway.booked() == {"r": "b"}
    assert gateway.prefill_tokens == BLOCK_SIZE
    exchange.close()
    assert gateway.booked() == {}


def test_a_prompt_is_load_until_the_answer_begins_and_the_request_until_it_ends() -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"))
    exchange, _ = asked(gateway)
    assert gateway.prefill_tokens == 3 * BLOCK_SIZE
    (head,) = say(exchange, response_headers())
    assert headers_of(head, "response_headers") == {"x-poolgrid-worker": "a", "x-poolgrid-decision": "only"}
    assert gateway.prefill_tokens == 3 * BLOCK_SIZE

    (echo,) = say(exchange, body(b"data: {}\n\n", False, "response_body"))
    assert echo.response_body.response.body_mutation.streamed_response.body == b"data: {}\n\n"
    assert gateway.prefill_tokens == 0
    assert gateway.booked() == {"r": "a"}

    usage = b'data: {"usage": {"prompt_tokens_details": {"cached_tokens": 32}}}\n\ndata: [DONE]\n\n'
    say(exchange, body(usage, True, "response_body"))
    assert gateway.booked() == {}
    assert list(gateway.reused.values()) == [32]
    exchange.close()
    assert list(gateway.reused.values()) == [32]


def test_the_ports_of_a_pod_are_its_ranks() -> None:
    gateway = Gateway(fallbacks=0)
    gateway.joined(a=card_at("10.0.0.1:8000", "10.0.0.1:8001", ranks=2))
    gateway.pool.say(worker_key("a", 1), stored(PATH))

    _, answers = asked(gateway)

    assert endpoints(answers) == ["10.0.0.1:8001"]
    assert "x-data-parallel-rank" not in headers_of(answers[0])
    assert gateway.booked() == {"r": "a/1"}


def test_ranks_behind_one_port_are_named_in_a_header_and_are_one_endpoint() -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:8000", ranks=2), b=card_at("10.0.0.2:8000"))
    gateway.pool.say(worker_key("a", 1), stored(PATH))

    exchange, answers = asked(gateway)

    assert endpoints(answers) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert headers_of(answers[0])["x-data-parallel-rank"] == "1"
    say(exchange, response_headers(served="10.0.0.1:8000"))
    assert gateway.booked() == {"r": "a/1"}


@pytest.mark.parametrize("subset", ["10.0.0.1:80, 10.0.0.3:80", ["10.0.0.1:80", "10.0.0.3:80"]])
def test_only_endpoints_that_the_gateway_allows_are_named(subset: object) -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"), b=card_at("10.0.0.2:80"), c=card_at("10.0.0.3:80"))
    gateway.pool.say(worker_key("b"), stored(PATH))
    gateway.pool.say(worker_key("c"), stored([11]))

    _, answers = asked(gateway, subset=subset)

    assert endpoints(answers) == ["10.0.0.3:80", "10.0.0.1:80"]


def shed(answers: list[Any]) -> tuple[int, str, dict[str, str]]:
    (answer,) = answers
    assert answer.WhichOneof("said") == "immediate_response"
    told = answer.immediate_response
    headers = {each.header.key: each.header.raw_value.decode() for each in told.headers.set_headers}
    return told.status.code, json.loads(told.body)["error"]["code"], headers


def test_a_request_without_an_endpoint_is_answered_503() -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"), b=card_at())
    assert shed(asked(gateway, subset="10.0.0.9:80")[1])[:2] == (503, "no_worker")
    gateway.pool.say(worker_key("a"), WorkerDraining())
    assert shed(asked(gateway)[1])[:2] == (503, "no_worker")
    gateway.view.ready = False
    assert shed(asked(gateway)[1])[:2] == (503, "not_ready")


def test_without_aggregated_engines_those_that_decode_are_named_unless_they_only_decode() -> None:
    gateway = Gateway()
    gateway.joined(only=card_at("10.0.0.1:8000", role=Role.DECODE, decodes_only=True))
    assert shed(asked(gateway)[1])[:2] == (503, "no_worker")
    gateway.joined(any=card_at("10.0.0.2:8000", role=Role.DECODE))
    assert endpoints(asked(gateway, "r2")[1]) == ["10.0.0.2:8000"]


def test_a_request_that_finds_every_engine_full_is_shed_with_429_and_when_to_come_back() -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80", max_batch_size=1))
    held = [asked(gateway, f"r{number}")[0] for number in range(2)]

    exchange, answers = asked(gateway, "one-more")

    status, code, headers = shed(answers)
    assert (status, code) == (429, "busy")
    assert headers["retry-after"] == "7"
    assert headers["x-poolgrid-refusal"] == "busy"
    assert exchange.is_over
    assert say(exchange, body(b"late")) == []
    held[0].close()
    assert endpoints(asked(gateway, "again")[1]) == ["10.0.0.1:80"]


def test_the_booking_moves_to_who_really_serves() -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"), b=card_at("10.0.0.2:80"))
    gateway.pool.say(worker_key("a"), stored(PATH))
    exchange, answers = asked(gateway)
    assert endpoints(answers)[0] == "10.0.0.1:80"

    (head,) = say(exchange, response_headers(served="10.0.0.2:80"))

    assert headers_of(head, "response_headers")["x-poolgrid-worker"] == "b"
    assert gateway.booked() == {"r": "b"}
    exchange.close()
    assert gateway.booked() == {}
    assert gateway.registry.get_sample_value("poolgrid_router_gateway_in_flight") == 0
    assert gateway.registry.get_sample_value("poolgrid_router_gateway_served_elsewhere_total") == 1


def test_a_lease_lasts_as_long_as_it_is_renewed() -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"))
    asked(gateway)
    for _ in range(3):
        gateway.clock.now_ms += 20_000
        gateway.picker.renew(gateway.table.bookings())
        gateway.pool.projection.ledger.expire(gateway.clock.monotonic_ms())
    assert gateway.booked() == {"r": "a"}
    gateway.clock.now_ms += 40_000
    gateway.pool.projection.ledger.expire(gateway.clock.monotonic_ms())
    assert gateway.booked() == {}


def test_a_worker_without_the_adapter_of_a_request_is_not_named() -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"), b=card_at("10.0.0.2:80"))
    gateway.pool.say(worker_key("a"), stored(PATH))
    gateway.lacking = {worker_key("a"): "it does not serve the adapter"}
    assert endpoints(asked(gateway, path="/v1/completions?poet")[1]) == ["10.0.0.2:80"]
    assert endpoints(asked(gateway, "s")[1])[0] == "10.0.0.1:80"


# -- the access log of a gateway -------------------------------------------------------------------------------------


def logging_gateway() -> Gateway:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"))
    gateway.logs.opened("envoy")
    return gateway


def test_of_a_stream_the_first_piece_ends_the_exchange_and_the_log_the_request() -> None:
    gateway = logging_gateway()
    exchange, name = streaming(gateway)
    assert gateway.prefill_tokens
    assert len(say(exchange, body(b"data: {}\n\n", ends=False, kind="response_body"))) == 1
    assert exchange.is_over
    exchange.close()
    assert len(gateway.table) == 0
    assert gateway.booked() == {"r": "a"}
    assert not gateway.prefill_tokens

    log_entries(gateway, log_of("another", ""))
    log_entries(gateway, log_of(name, kind=envoy.LOG_DOWNSTREAM_END - 1))
    assert gateway.booked() == {"r": "a"}
    log_entries(gateway, log_of(name))
    assert gateway.booked() == {}
    assert gateway.registry.get_sample_value("poolgrid_router_gateway_in_flight") == 0
    log_entries(gateway, log_of(name))


def test_a_worker_is_told_of_what_goes_to_its_server_and_of_what_moves_away() -> None:
    gateway = logging_gateway()
    gateway.joined(b=card_at("10.0.0.2:80"))
    gateway.pool.say(worker_key("a"), stored(PATH))
    exchange, answers = asked(gateway, response_mode=envoy.STREAMED)
    say(exchange, response_headers(kind=EVENTS, served="10.0.0.2:80"))
    say(exchange, body(b"data: {}\n\n", ends=False, kind="response_body"))
    exchange.close()
    log_entries(gateway, log_of(str(answers[0].dynamic_metadata["envoy.lb"]["x-poolgrid-booking"])))
    assert gateway.links["a"].told == [("began", "r"), ("cancelled", "r")]
    assert gateway.links["b"].told == [("began", "r"), ("computed", "r"), ("stop", "r")]


def test_without_response_bodies_the_log_ends_the_request_and_its_prompt() -> None:
    gateway = logging_gateway()
    exchange, name = streaming(gateway, envoy.NONE)
    exchange.close()
    assert gateway.booked() == {"r": "a"}
    assert gateway.prefill_tokens
    log_entries(gateway, log_of(name, kind=envoy.LOG_NOT_SET))
    assert (gateway.booked(), gateway.prefill_tokens) == ({}, 0)


def test_a_whole_answer_is_read_to_its_end_so_that_its_reuse_is_known() -> None:
    gateway = logging_gateway()
    exchange, _ = asked(gateway, response_mode=envoy.STREAMED)
    say(exchange, response_headers())
    say(exchange, body(b'{"choices": [],', ends=False, kind="response_body"))
    assert not exchange.is_over
    say(exchange, body(b'"usage": {"prompt_tokens_details": {"cached_tokens": 4}}}', kind="response_body"))
    assert gateway.booked() == {}
    assert list(gateway.reused.values()) == [4]


def test_without_a_log_of_its_gateway_a_stream_is_read_to_its_end_and_ends_its_request() -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"))
    gateway.logs.opened("another envoy")
    exchange, _ = streaming(gateway)
    say(exchange, body(b"data: {}\n\n", ends=False, kind="response_body"))
    assert not exchange.is_over
    exchange.close()
    assert gateway.booked() == {}


def test_a_client_that_leaves_before_the_answer_ends_its_request_at_once_and_later_by_the_log() -> None:
    gateway = logging_gateway()
    asked(gateway)[0].close()
    assert gateway.booked() == {}
    exchange, name = streaming(gateway, envoy.FULL_DUPLEX_STREAMED)
    say(exchange, body(b"data: {}\n\n", ends=False, kind="response_body"))
    log_entries(gateway, log_of(name))  # it may come before the end of the stream
    assert gateway.booked() == {"r": "a"}
    exchange.close()
    assert gateway.booked() == {}


@pytest.mark.parametrize("why", ["gone", "late", "many"])
def test_a_booking_without_an_entry_ends_with_the_gateway_its_time_or_the_room(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = logging_gateway()
    streaming(gateway, envoy.NONE)[0].close()
    gateway.picker.renew(())
    assert gateway.booked() == {"r": "a"}
    if why == "gone":
        gateway.logs.closed("envoy", gateway.clock.monotonic_ms())
        gateway.clock.now_ms += GONE_MS - 1
        gateway.picker.renew(())
        assert gateway.booked() == {"r": "a"}
        gateway.clock.now_ms += 1
        gateway.picker.renew(())
    elif why == "late":
        gateway.clock.now_ms += KEPT_MAX_MS
        gateway.picker.renew(())
    else:
        monkeypatch.setattr("poolgrid.plugins.endpoint_picker.picker.KEPT_MAX", 1)
        exchange, _ = asked(gateway, "s")
        say(exchange, response_headers(kind=EVENTS))
        exchange.close()
    assert gateway.booked() == ({"s": "a"} if why == "many" else {})
    assert gateway.lost("no_entry") == 1
    assert gateway.lost("no_stream") == 0


def test_a_log_that_comes_back_in_time_loses_nothing() -> None:
    gateway = logging_gateway()
    streaming(gateway, envoy.NONE)[0].close()
    gateway.logs.closed("envoy", gateway.clock.monotonic_ms())
    gateway.clock.now_ms += GONE_MS - 1
    gateway.logs.opened("envoy")
    gateway.clock.now_ms += GONE_MS
    gateway.picker.renew(())
    assert gateway.booked() == {"r": "a"}


def test_a_buffered_body_is_answered_with_the_headers_changed() -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"))
    exchange = gateway.exchange()
    (head,) = say(exchange, request_headers(envoy.BUFFERED))
    assert headers_of(head) == {}
    assert endpoints(say(exchange, body(BODY)), "request_body") == ["10.0.0.1:80"]
    (through,) = say(exchange, body(b"x", False, "response_body"))
    assert not through.response_body.response.HasField("body_mutation")


def test_pieces_of_a_body_are_given_back_as_they_came_and_trailers_end_them() -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"))
    exchange = gateway.exchange()
    parts = [b"abc", b"", b"de", b"f"]
    assert say(exchange, request_headers()) == []
    for part in parts:
        assert say(exchange, body(part, False)) == []
    assert gateway.table.used_bytes > 6  # the headers count too
    trailers = envoy.ProcessingRequest()
    trailers.request_trailers.SetInParent()

    answers = say(exchange, trailers)

    given = [each.request_body.response.body_mutation.streamed_response for each in answers[1:-1]]
    assert [(each.body, each.end_of_stream) for each in given] == [(b"abc", False), (b"de", False), (b"f", False)]
    assert answers[-1].WhichOneof("said") == "request_trailers"
    assert gateway.table.used_bytes == 0


def test_the_body_that_began_first_gives_way_and_a_reset_stream_gives_its_part_back() -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"))
    woken: list[str] = []
    first, second = gateway.exchange(), gateway.exchange()
    first.wake, second.wake = (lambda: woken.append("first")), (lambda: woken.append("second"))
    for exchange, size in ((first, 1000), (second, 900)):
        say(exchange, request_headers())
        assert say(exchange, body(bytes(size), False)) == []
    assert woken == ["first"]
    assert shed([first.parting])[:2] == (429, "bodies_full")
    assert first.is_over
    assert not second.is_over
    assert shed(say(second, body(bytes(101), False)))[:2] == (413, "body_too_large")
    first.close()
    second.close()
    assert gateway.table.used_bytes == 0
    announced = gateway.exchange()
    assert shed(say(announced, request_headers(content_length="1001")))[:2] == (413, "body_too_large")
    odd = gateway.exchange()
    assert say(odd, request_headers(content_length="9" * 200)) == []


def test_a_body_that_alone_has_no_room_is_the_one_that_gives_way() -> None:
    gateway = Gateway()
    gateway.table.limits = HttpLimits(unfinished_bytes=900)
    exchange = gateway.exchange()
    say(exchange, request_headers())
    assert shed(say(exchange, body(bytes(900), False)))[:2] == (429, "bodies_full")
    assert gateway.table.used_bytes == 0


def test_headers_and_metadata_count_and_a_large_head_is_answered_431() -> None:
    gateway = Gateway()
    exchange = gateway.exchange()
    assert shed(say(exchange, request_headers(x_request_id="r" * 600)))[:2] == (431, "head_too_large")
    ignored = gateway.exchange()
    assert say(ignored, request_headers(x_other="o" * 600)) == []
    subset = [f"10.0.0.{number}:80" for number in range(20)]
    several = [gateway.exchange() for _ in range(3)]
    for each in several:
        say(each, request_headers(subset=subset))
    assert ignored.is_over
    assert several[0].is_over
    assert not several[2].is_over
    assert gateway.table.used_bytes <= 2000


def tick_after(gateway: Gateway, seconds: float) -> None:
    gateway.clock.now_ms += seconds * 1000
    gateway.table.tick()


def test_a_body_has_the_time_and_the_lowest_rate_of_the_http_server() -> None:
    gateway = Gateway()
    gateway.table.limits = HttpLimits(body_timeout_s=20, body_bytes_per_s=10, unfinished_bytes=5000)
    slow, faster = gateway.exchange(), gateway.exchange()
    for exchange, size in ((slow, 10), (faster, 300)):
        say(exchange, request_headers())
        say(exchange, body(bytes(size), False))
    tick_after(gateway, 20.5)
    assert not slow.is_over
    tick_after(gateway, 1)
    assert shed([slow.parting])[:2] == (408, "body_timeout")
    assert not faster.is_over
    gateway.table.leave_out(100)
    tick_after(gateway, 120)
    assert not faster.is_over
    tick_after(gateway, 10)
    assert faster.is_over
    assert gateway.table.used_bytes == 0


@pytest.mark.parametrize(("announced", "time_s"), [("400", 60), ("", 120)])
def test_a_body_that_the_gateway_gathers_has_the_time_of_what_is_announced(announced: str, time_s: float) -> None:
    gateway = Gateway()
    gateway.table.limits = HttpLimits(body_timeout_s=20, body_bytes_per_s=10, unfinished_bytes=5000)
    exchange = gateway.exchange()
    headers: dict[str, Any] = {"content_length": announced} if announced else {}
    say(exchange, request_headers(envoy.BUFFERED, **headers))
    tick_after(gateway, time_s - 1)
    assert not exchange.is_over
    tick_after(gateway, 2)
    assert shed([exchange.parting])[:2] == (408, "body_timeout")


def test_a_stream_without_a_request_and_one_after_its_answer_have_the_time_of_a_head() -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"))
    silent = gateway.exchange()
    working, _ = asked(gateway)
    answered, _ = asked(gateway, "s")
    say(answered, response_headers())
    say(answered, body(b"{}", True, "response_body"))
    tick_after(gateway, gateway.table.limits.header_timeout_s + 1)
    assert (silent.is_over, silent.parting) == (True, None)
    assert (answered.is_over, answered.parting) == (True, None)
    assert not working.is_over
    assert gateway.booked() == {"r": "a"}


def test_at_the_limit_of_streams_those_without_a_pick_give_way_and_those_with_one_stay() -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"))
    gateway.table.limits = HttpLimits(connections=3)
    working, _ = asked(gateway)
    waiting = gateway.exchange()
    say(waiting, request_headers())
    silent = gateway.exchange()
    later = gateway.exchange()
    assert (silent.is_over, silent.parting, waiting.is_over) == (True, None, False)
    say(later, request_headers())
    gateway.exchange()
    assert shed([waiting.parting])[:2] == (429, "streams_full")
    assert not working.is_over


def test_with_an_endpoint_for_each_stream_a_new_one_is_refused() -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"))
    gateway.table.limits = HttpLimits(connections=1)
    working, _ = asked(gateway)
    assert not gateway.table.enter(PickerExchange(gateway.picker, gateway.table))
    assert not working.is_over
    assert len(gateway.table) == 1


def trailers(kind: str = "request_trailers") -> Any:
    message = envoy.ProcessingRequest()
    getattr(message, kind).SetInParent()
    return message


HEAD = request_headers()
BUFFERED_HEAD = request_headers(envoy.BUFFERED)
GET_HEAD = request_headers(ends=True)


@pytest.mark.parametrize(
    "messages",
    [
        (HEAD, HEAD),
        (GET_HEAD, GET_HEAD),
        (GET_HEAD, body(BODY)),
        (GET_HEAD, trailers()),
        (HEAD, body(BODY), HEAD),
        (HEAD, body(BODY), body(BODY)),
        (HEAD, body(BODY), trailers()),
        (HEAD, body(BODY, False), trailers(), trailers()),
        (HEAD, trailers(), body(BODY)),
        (BUFFERED_HEAD, body(BODY), body(BODY)),
        (BUFFERED_HEAD, body(BODY, False), body(BODY, False)),
        (request_headers(envoy.STREAMED), HEAD),
        (request_headers(envoy.NONE), HEAD),
        (body(BODY),),
        (trailers(),),
        (response_headers(), HEAD),
        (HEAD, body(BODY), response_headers(), response_headers()),
        (HEAD, body(BODY), body(b"", True, "response_body"), body(b"", True, "response_body")),
        (HEAD, body(BODY), trailers("response_trailers"), trailers("response_trailers")),
        (HEAD, body(BODY), trailers("response_trailers"), body(b"", False, "response_body")),
        (envoy.ProcessingRequest(),),
    ],
)
def test_a_message_out_of_its_phase_is_a_protocol_error_and_leaves_nothing_booked(messages: tuple[Any, ...]) -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"))
    exchange = gateway.exchange()
    for message in messages[:-1]:
        say(exchange, message)
    with pytest.raises(ProtocolError, match="the gateway sent"):
        say(exchange, messages[-1])
    assert len(gateway.booked()) <= 1
    exchange.close()
    assert gateway.booked() == {}
    assert gateway.table.used_bytes == 0
    assert gateway.registry.get_sample_value("poolgrid_router_gateway_in_flight") == 0


def test_an_answer_without_an_engine_books_nothing_whatever_follows() -> None:
    """Envoy answers by itself (a route's timeout, a filter before) and shows that answer like any other."""
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"))
    first = gateway.exchange()
    assert len(say(first, response_headers("408"))) == 1
    second = gateway.exchange()
    say(second, request_headers())
    assert len(say(second, response_headers("504"))) == 1
    assert say(second, body(BODY)) == []
    assert gateway.booked() == {}


def test_a_gateway_that_does_not_name_its_mode_may_stream_the_body() -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"))
    head = request_headers()
    head.ClearField("protocol_config")
    exchange = gateway.exchange()
    say(exchange, head)
    assert endpoints(say(exchange, body(BODY, False)), "request_body") == ["10.0.0.1:80"]
    for ends in (False, True):
        (through,) = say(exchange, body(BODY, ends))
        assert through.WhichOneof("said") == "request_body"
    assert gateway.booked() == {"g-1": "a"} or len(gateway.booked()) == 1


def test_a_booking_that_no_stream_holds_is_ended_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    gateway = Gateway()
    gateway.joined(a=card_at("10.0.0.1:80"))
    held, _ = asked(gateway, "held")
    lost, _ = asked(gateway, "lost")
    lost._picked = None  # what no code does
    gateway.picker.renew(gateway.table.bookings())
    assert gateway.booked() == {"held": "a"}
    assert gateway.lost("no_stream") == 1
    assert "belongs to no open stream of a gateway" in caplog.text
    held.close()
    assert gateway.booked() == {}


@pytest.mark.parametrize(
    ("answer", "cached"),
    [
        (b'{"choices":[{"text":"\\"usage\\": {"}],"usage":{"prompt_tokens_details":{"cached_tokens":7}}}', 7),
        (b'data: {"usage":{"prompt_tokens_details":{"cached_tokens":7}}}\n\ndata: {"usage":null}\n\n', 7),
        (b'{"usage":{"input_tokens":9,"cache_read_input_tokens":3}}', 3),
        (b'{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":0}}}', 0),
        (b'{"usage":{"prompt_tokens":9}}', None),
        (b'{"usage":{"prompt_tokens_details":{"cached_tokens":"7"}}}', None),
        (b'{"usage":{"prompt_tok', None),
        (b"\x1f\x8b\x00\xff", None),
        (b'{"usage":' + b"[" * 5000, None),
        (b"x" * (3 * TAIL_BYTES) + b'"usage": {"prompt_tokens_details": {"cached_tokens": 5}}', 5),
    ],
)
def test_what_was_reused_is_read_from_the_end_of_any_answer(answer: bytes, cached: int | None) -> None:
    for size in (1, 7, 4096, len(answer)):
        reader = AnswerReader()
        firsts = [reader.take(answer[at : at + size]) for at in range(0, len(answer), size)]
        assert firsts == [True, *(False for _ in firsts[1:])]
        assert reader.prompt_tokens()[0] == cached
