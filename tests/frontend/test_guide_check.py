"""A guide that ends whoever compiles it ends a process of its own, and is the business of who sent it alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from poolgrid.kernel.requests.inference import EVERYBODY, CacheDomain, CacheShares
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.guide_check import WAITING_PER_TENANT_MAX, GuideCheck, GuideLimits
from poolgrid.server.frontend.guides import Guide
from tests.frontend.fake_backend import FakeBackend
from tests.frontend.server import application, in_process
from tests.installed import needs_parsers
from tests.wire.test_guide_limits import chain, rules

SHARES = CacheShares(4, 1)

AMPLE_MS = 20_000.0
"""Of CPU time, which a busy machine's other work makes longer too: for guides that are not to run into the limit."""

PATTERNS = {"allOf": [{"type": "string", "pattern": f"^.*a{{{number}}}.*$"} for number in range(50)]}
"""Compiles for ever: ``llguidance`` looks for a text that all of them match."""


def domain(tenant: str, salt: str = "") -> CacheDomain:
    return CacheDomain(tenant, salt, SHARES)


def integer_up_to(limit: int) -> Guide:
    return {"guided_json": json.dumps({"type": "integer", "maximum": limit}).encode()}


def run(scenario: Callable[[GuideCheck], Awaitable[None]], **options: Any) -> list[str]:
    """Run with a check and return what it counted."""
    outcomes: list[str] = []

    async def whole() -> None:
        limits = GuideLimits(options.get("limit_ms", AMPLE_MS), options.get("step_limit_ms", AMPLE_MS))
        check = GuideCheck(limits, options.get("queue", 64), outcomes.append)
        try:
            await scenario(check)
        finally:
            check.close()

    asyncio.run(asyncio.wait_for(whole(), 600))
    return outcomes


def process_of(check: GuideCheck) -> int:
    process = check._compiler._process
    assert process is not None, "it has been started"
    return process.pid


def test_a_guide_is_tried_once_for_each_tenant() -> None:
    async def scenario(check: GuideCheck) -> None:
        for tenant in ("a", "a", "b"):
            await check.check(integer_up_to(9), "guided_json", domain(tenant))

    assert run(scenario) == ["accepted", "known", "accepted"]


def test_a_guide_whose_next_token_takes_long_to_find_is_refused_and_costs_the_process_nothing() -> None:
    long_literal: Guide = {"guided_grammar": 'start: "' + "(" * 20_000 + '"'}

    async def scenario(check: GuideCheck) -> None:
        with pytest.raises(RequestError, match=r"token 1 of an answer takes \d+ ms of CPU time to find"):
            await check.check(long_literal, "guided_grammar", domain("a"))
        await check.check(integer_up_to(9), "guided_json", domain("a"))
        assert check._compiler.starts == 1

    assert run(scenario, limit_ms=5000, step_limit_ms=1) == ["refused", "accepted"]


def test_a_verdict_is_found_by_its_tenant_and_salt_alone_and_pushed_out_by_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("poolgrid.server.frontend.guide_check.VERDICTS_MAX", 8)

    async def scenario(check: GuideCheck) -> None:
        for whose in (domain("a"), domain("a", "x"), domain("a"), None, None):
            await check.check(integer_up_to(9), "guided_json", whose)
        for number in range(8):
            await check.check(integer_up_to(100 + number), "guided_json", domain("b"))
        await check.check(integer_up_to(9), "guided_json", domain("a"))

    assert run(scenario) == ["accepted", "accepted", "known", *["accepted"] * 10, "known"]


def test_what_every_client_sends_starts_no_process() -> None:
    async def scenario(check: GuideCheck) -> None:
        await check.check({}, "", EVERYBODY)
        await check.check({"guided_json": b'{"type":"object"}'}, "response_format", EVERYBODY)
        assert check._compiler.starts == 0

    assert run(scenario) == []


@pytest.mark.parametrize(
    ("guide", "reason", "dies", "limit_ms"),
    [
        ({"guided_json": json.dumps(chain(1000)).encode()}, "references followed", False, AMPLE_MS),
        ({"guided_grammar": rules(4000)}, "4002 rules", False, AMPLE_MS),
        ({"guided_json": json.dumps(chain(160)).encode()}, "overflows the stack", True, AMPLE_MS),
        ({"guided_json": json.dumps(PATTERNS).encode()}, "takes more than 250 ms of CPU time", True, 250),
        ({"guided_grammar": 'start: "no" B\nA: "a"~1000..1000\nB: A~1000..1000'}, "takes more than 250 ms", True, 250),
    ],
)
def test_what_a_compiler_would_die_of_or_never_end_with_is_refused_and_the_next_guide_is_tried(
    guide: Guide, reason: str, dies: bool, limit_ms: float
) -> None:
    async def scenario(check: GuideCheck) -> None:
        for _ in range(2):
            with pytest.raises(RequestError, match=reason) as refused:
                await check.check(guide, "guided_json", EVERYBODY)
            assert (refused.value.status, refused.value.code) == (400, "guide_too_complex")
            assert refused.value.param == "guided_json"
        await check.check(integer_up_to(9), "guided_json", EVERYBODY)
        assert check._compiler.starts == 1 + dies, "a verdict is kept: the same guide costs a process once"

    assert run(scenario, limit_ms=limit_ms) == ["refused", "known", "accepted"]


@pytest.mark.parametrize(
    "guide",
    [
        {"guided_json": b'{"$ref": "#"}'},
        {"guided_json": b'{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'},
        {"guided_json": b'{"anyOf": [{"$ref": "#"}]}'},
        {"guided_regex": "[^\\s\\S]"},
        {"guided_grammar": "root ::= root"},
        {"guided_grammar": "start: a\na: b\nb: a"},
        {
            "structural_tag": '{"type": "structural_tag", '
            '"format": {"type": "json_schema", "json_schema": {"$ref": "#"}}}'
        },
    ],
)
def test_a_guide_to_which_no_text_keeps_is_refused(guide: Guide) -> None:
    [param] = guide

    async def scenario(check: GuideCheck) -> None:
        with pytest.raises(
            RequestError, match=f"^{param} cannot be kept to: no text keeps to it. The request"
        ) as refused:
            await check.check(guide, param, EVERYBODY)
        assert (refused.value.status, refused.value.param) == (400, param)

    assert run(scenario) == ["refused"]


def test_a_guide_that_the_library_does_not_take_is_for_the_workers_engine_to_judge() -> None:
    async def scenario(check: GuideCheck) -> None:
        await check.check({"guided_json": b'{"not": {"type": "integer"}}'}, "guided_json", EVERYBODY)
        await check.check({"guided_regex": "((("}, "guided_regex", EVERYBODY)
        await check.check({"structural_tag": '{"format": {"type": "any"}}'}, "structural_tag", EVERYBODY)
        await check.check({"guided_choice": ("yes", "no")}, "guided_choice", EVERYBODY)

    assert run(scenario) == ["accepted"] * 4


def test_a_process_that_somebody_kills_refuses_nobody() -> None:
    async def scenario(check: GuideCheck) -> None:
        await check.check(integer_up_to(1), "guided_json", EVERYBODY)
        os.kill(process_of(check), signal.SIGKILL)
        await check.check(integer_up_to(2), "guided_json", EVERYBODY)
        assert check._compiler.starts == 2

    assert run(scenario) == ["accepted", "accepted"]


def test_a_process_that_cannot_be_started_refuses_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    async def scenario(check: GuideCheck) -> None:
        with pytest.raises(RequestError, match="cannot be started") as refused:
            await check.check(integer_up_to(1), "guided_json", EVERYBODY)
        assert (refused.value.status, refused.value.code) == (503, "guide_check_busy")
        monkeypatch.undo()
        await check.check(integer_up_to(1), "guided_json", EVERYBODY)

    monkeypatch.setattr("poolgrid.server.frontend.guide_check.subprocess.Popen", no_process)
    assert run(scenario) == ["busy", "accepted"]


def test_one_tenants_guides_wait_behind_each_other_and_another_tenants_goes_between() -> None:
    async def scenario(check: GuideCheck) -> None:
        done: list[str] = []

        async def ask(tenant: str, number: int) -> None:
            await check.check(integer_up_to(number), "guided_json", domain(tenant))
            done.append(tenant)

        many = [asyncio.create_task(ask("many", number)) for number in range(WAITING_PER_TENANT_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="wait to be tried already") as refused:
            await check.check(integer_up_to(1000), "guided_json", domain("many"))
        assert refused.value.status == 503
        await ask("one", 1)
        assert done.count("many") <= 2, "it had its turn after the one at work, and at most one more"
        await asyncio.gather(*many)

    assert run(scenario).count("busy") == 1


def test_those_who_ask_for_the_same_wait_for_one_verdict_and_may_leave() -> None:
    async def scenario(check: GuideCheck) -> None:
        asking = [asyncio.create_task(check.check(integer_up_to(1), "guided_json", EVERYBODY)) for _ in range(8)]
        alone = asyncio.create_task(check.check(integer_up_to(2), "guided_json", EVERYBODY))
        await asyncio.sleep(0)
        for task in (asking[1], alone):
            task.cancel()
        await asyncio.gather(*asking, alone, return_exceptions=True)
        assert check.waiting == 0
        assert [task.cancelled() for task in asking] == [False, True] + [False] * 6

    assert run(scenario) == ["accepted", *["known"] * 6]


def test_the_process_ends_with_whoever_started_it() -> None:
    pids: list[int] = []

    async def scenario(check: GuideCheck) -> None:
        await check.check(integer_up_to(1), "guided_json", EVERYBODY)
        pids.append(process_of(check))

    run(scenario)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@asynccontextmanager
async def clients(backend: FakeBackend) -> AsyncIterator[Any]:
    async with in_process(application(backend)) as client:
        yield client


@needs_parsers
async def test_no_poison_of_any_spelling_reaches_a_worker() -> None:
    deep, chat = chain(1000), {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    text = {"model": "tiny", "prompt": "hi"}
    bodies = [
        ("/v1/completions", {**text, "guided_json": deep}, "guided_json"),
        ("/v1/completions", {**text, "guided_grammar": rules(4000)}, "guided_grammar"),
        ("/v1/completions", {**text, "structured_outputs": {"json": deep}}, "structured_outputs.json"),
        ("/v1/completions", {**text, "nvext": {"guided_decoding": {"json": deep}}}, "nvext.guided_decoding.json"),
        (
            "/v1/chat/completions",
            {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}},
            "response_format",
        ),
        ("/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": "required"}, "tools"),
        (
            "/v1/responses",
            {"model": "tiny", "input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": deep}}},
            "text.format",
        ),
    ]

    backend = FakeBackend()
    async with clients(backend) as client:
        for path, body, param in bodies:
            response = await client.post(path, json=body)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "guide_too_complex"), path
            assert error["param"].startswith(param)
        usual = await client.post("/v1/completions", json={**text, "guided_json": {"type": "integer"}})
        assert usual.status_code == 200
    assert len(backend.requests) == 1
