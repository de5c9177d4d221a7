"""Attacks by clients of images and videos: forms, and prompts that are kept with their results.

A worker of videos joins for them, so that what is sent is read.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import httpx

from lab.attacks.attack import Attack, Outcome, Part, Run, Scene
from lab.attacks.pool import Shape, until
from lab.attacks.requests import client, in_words
from lab.benchmarks.services import Service

MODEL = "films"
JOIN_TIMEOUT_S = 60.0
FORM_BYTES = 1_000_000
PROMPT_CHARS = 8_000_000

Work = Callable[[Scene, httpx.AsyncClient], Coroutine[Any, Any, Outcome]]


def beside_a_worker_of_videos(work: Work) -> Run:
    """Return an attack on a pool that also makes videos."""

    async def run(scene: Scene) -> Outcome:
        pool = scene.pool
        modality = ("--modality", "video_diffusion", "--served-model-name", MODEL)
        command = ["worker", *pool.worker_arguments(MODEL, pool.endpoint("ingest"), *modality)]
        guest = await Service.start(MODEL, command, scene.directory)
        try:
            await guest.wait_ready()

            async def reached() -> bool:
                return any(r["worker_id"] == MODEL and r["state"] == "ready" for r in await pool.workers(pool.url))

            await until("a worker of videos is reached", reached, JOIN_TIMEOUT_S)
            async with client(scene) as http:
                return await work(scene, http)
        finally:
            await guest.stop()

    return run


def forms(size: int) -> dict[str, bytes]:
    """Return heads of a field that a parser of mails takes minutes for."""
    name = b'Content-Disposition: form-data; name="prompt"'
    return {
        "parameters": name + b"; a=b" * (size // 5),
        "lines": name + b"\r\n" + b"x-a: b\r\n" * (size // 8),
        "folded": name[:30] + b";\r\n" + b" a=b;\r\n" * (size // 7) + b' name="prompt"',
        "escaped": name[:-1] + b"\\a" * (size // 2) + b'"',
    }


async def heads(scene: Scene, http: httpx.AsyncClient) -> Outcome:
    """Forms of a megabyte in the head of one field."""
    said: Counter[str] = Counter()
    content_type = {"content-type": "multipart/form-data; boundary=B"}
    for head in forms(scene.count(FORM_BYTES)).values():
        body = b"--B\r\n" + head + b"\r\n\r\nhello\r\n--B--\r\n"
        answer = await http.post("/v1/videos", content=body, headers=content_type, timeout=60.0)
        said[str(answer.status_code)] += 1
    return Outcome(in_words(said), [] if set(said) == {"400"} else ["a head of a megabyte was not refused"])


async def prompts(scene: Scene, http: httpx.AsyncClient) -> Outcome:
    """Videos with prompts of eight megabytes, and lists of what is kept."""
    said: Counter[str] = Counter()

    async def post(number: int) -> None:
        body = {"model": MODEL, "prompt": f"{number} " * (PROMPT_CHARS // 4)}
        said[str((await http.post("/v1/videos", json=body, timeout=60.0)).status_code)] += 1

    await asyncio.gather(*(post(number) for number in range(scene.count(20, 2))))
    deadline = scene.deadline()
    lists = 0
    while asyncio.get_running_loop().time() < deadline:
        answers = await asyncio.gather(*(http.get("/v1/videos?limit=1", timeout=60.0) for _ in range(8)))
        lists += sum(answer.status_code == 200 for answer in answers)
    return Outcome(f"{in_words(said)}, {lists} lists", [] if set(said) == {"400"} else ["such a prompt was taken"])


PART = Part(
    "tasks",
    "Clients of images and videos",
    (
        Attack(
            "heads of forms",
            "Sends forms to `/v1/videos` with a megabyte in the head of a field: parameters, lines, escapes.",
            beside_a_worker_of_videos(heads),
            Shape(),
            short=False,
        ),
        Attack(
            "kept prompts",
            "Asks for videos with prompts of 8 MB, and lists what is kept, eight times at once.",
            beside_a_worker_of_videos(prompts),
            Shape(),
            short=False,
        ),
    ),
)
