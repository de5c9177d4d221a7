"""Attacks on the endpoint picker's gRPC port, as a gateway with hostile clients or a hostile gateway sends them.

An honest gateway sends requests at the same time, one after another, and each must get the endpoint of an engine
server. It runs in a process of its own (``python -m lab.attacks.picker HOST:PORT MODEL``), like the bystanders.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from lab.attacks.attack import Attack, Outcome, Part, Run, Scene
from lab.attacks.pool import Shape
from poolgrid.plugins.endpoint_picker import envoy_messages as envoy
from poolgrid.server.process.tasks import cancel_all
from poolgrid.server.router.settings import RouterSettings

STREAMS_MAX = RouterSettings.max_ext_proc_streams
PICKING = Shape(
    "front",
    router=(*("--ext-proc-port", "0", "--http-request-timeout-ms", "3000"),),
)
SLOW_BYTES = 4 * 2**20
HEAD_BYTES = 15 * 10**6
ANSWER_TIMEOUT_S = 10.0
ASKED_MIN = 3
"""Honest requests of each attack, however long they take."""

PAUSE_S = 0.05
PICKED = "picked"
ROOT = Path(__file__).parents[2]
Hold = Callable[[Any, Scene], Awaitable[None]]


def _stream(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(
        f"/{envoy.SERVICE}/{envoy.METHOD}",
        request_serializer=envoy.ProcessingRequest.SerializeToString,
        response_deserializer=envoy.ProcessingResponse.FromString,
    )()


def _head(ends: bool = False, more: str = "") -> Any:
    message = envoy.ProcessingRequest()
    message.protocol_config.request_body_mode = envoy.FULL_DUPLEX_STREAMED
    message.request_headers.end_of_stream = ends
    for name, value in ((":method", "POST"), (":path", "/v1/completions"), ("x-request-id", more or "attack")):
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    return message


def _body(data: bytes, ends: bool = True) -> Any:
    message = envoy.ProcessingRequest()
    message.request_body.body = data
    message.request_body.end_of_stream = ends
    return message


async def _asked(channel: grpc.aio.Channel, model: str) -> str:
    """Send an honest request to its end; return ``PICKED``, or the answer in place of an endpoint."""
    call = _stream(channel)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await call.write(_head())
            await call.write(_body(json.dumps({"model": model, "prompt": "hello", "max_tokens": 1}).encode()))
            answer = await call.read()
            if answer is grpc.aio.EOF:
                return "the end of the stream"
            if answer.WhichOneof(envoy.SAID) != "request_headers":
                return str(answer.immediate_response.details)
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
        return PICKED
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
        return f"{type(error).__name__} {error.details() if isinstance(error, grpc.aio.AioRpcError) else error}"
    finally:
        call.cancel()


async def _honest(address: str, model: str) -> list[str]:
    """Send honest requests until standard input ends; return what came of each."""
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    told: list[str] = []
    async with grpc.aio.insecure_channel(address) as channel:
        while len(told) < ASKED_MIN or not ended.done():
            told.append(await _asked(channel, model))
            await asyncio.sleep(PAUSE_S)
    return told


async def _gateway(address: str, model: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lab.attacks.picker", address, model),
        stdin=PIPE,
        stdout=PIPE,
        cwd=ROOT,
        start_new_session=True,
    )


async def _told(gateway: asyncio.subprocess.Process) -> list[str]:
    """End the honest gateway; return what came of its requests."""
    data, _ = await gateway.communicate(b"")  # without it, its input stays open
    found: list[str] = json.loads(data)
    return found


async def _slow_upload(call: Any, scene: Scene) -> None:
    await call.write(_head())
    await call.write(_body(bytes(SLOW_BYTES), False))
    await asyncio.sleep(scene.seconds)


async def _headers_only(call: Any, scene: Scene) -> None:
    await call.write(_head())
    await asyncio.sleep(scene.seconds)


async def _large_head(call: Any, scene: Scene) -> None:
    await call.write(_head(more="x" * HEAD_BYTES))
    await asyncio.sleep(scene.seconds)


async def _out_of_phase(call: Any, scene: Scene) -> None:
    for _ in range(30):
        await call.write(_head(True))


async def _garbage(call: Any, scene: Scene) -> None:
    await call.write(envoy.ProcessingRequest())


def holding(hold: Hold, count: int) -> Run:
    """Return an attack that keeps ``count`` streams busy while an honest gateway asks."""

    async def run(scene: Scene) -> Outcome:
        wanted = scene.count(count, 8)
        address = scene.pool.service("router").word("ext-proc")

        async def attack(channel: grpc.aio.Channel) -> None:
            while True:
                call = _stream(channel)
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await hold(call, scene)
                call.cancel()
                await asyncio.sleep(0.01)

        gateway = await scene.at_home(_gateway(address, scene.pool.model.name))
        try:
            async with grpc.aio.insecure_channel(address) as hostile:
                attackers = [asyncio.create_task(attack(hostile)) for _ in range(wanted)]
                try:
                    await asyncio.sleep(scene.seconds)
                    told = await scene.at_home(_told(gateway))
                finally:
                    await cancel_all(attackers)
        finally:
            if gateway.returncode is None:
                gateway.kill()
        starved = [each for each in told if each != PICKED]
        faults = [f"{len(starved)} of {len(told)} honest requests were starved: {starved[0]}"] if starved else []
        return Outcome(f"{wanted} streams, {len(told)} honest requests", faults)

    return run


PART = Part(
    "picker",
    "The endpoint picker's gRPC port",
    (
        Attack("large headers to the picker", "Sends 15 MB of headers on each of 40 streams.", holding(_large_head, 40),
               PICKING, short=False, judge_latency=False),
        Attack("slow uploads to the picker", "Sends 4 MiB of a body and stalls; 39 streams.", holding(_slow_upload, 39),
               PICKING, short=False, judge_latency=False),
        Attack("headers only to the picker", "Opens the maximum number of streams, with headers only.",
               holding(_headers_only, STREAMS_MAX), PICKING, short=False, judge_latency=False),
        Attack("messages out of phase", "Sends the headers of a request 30 times on each of 60 streams.",
               holding(_out_of_phase, 60), PICKING, short=False, judge_latency=False),
        Attack("messages that are none", "Sends empty messages on 60 streams.", holding(_garbage, 60),
               PICKING, short=False, judge_latency=False),
    ),
)  # fmt: skip

if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(_honest(*sys.argv[1:3]))))
