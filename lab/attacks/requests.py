"""Requests of an attacker who has a key: sent from the attacker's own address, counted by status."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx

from lab.attacks.attack import Scene
from lab.attacks.pool import ATTACKER_HOST

CONNECTIONS_MAX = 64


def client(scene: Scene, tenant: str = "attacker") -> httpx.AsyncClient:
    """Return a client of a tenant at the attacker's address."""
    limits = httpx.Limits(max_connections=CONNECTIONS_MAX)
    return httpx.AsyncClient(
        base_url=scene.pool.url,
        headers=scene.pool.tenant(tenant),
        timeout=scene.seconds,
        transport=httpx.AsyncHTTPTransport(local_address=ATTACKER_HOST, limits=limits, verify=False),
    )


async def post(
    http: httpx.AsyncClient, path: str, body: Mapping[str, Any] | bytes, headers: Mapping[str, str] | None = None
) -> str:
    """Return the status of the answer, with its code when it is an error, or what happened in its place."""
    options: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
    try:
        answer = await http.post(path, headers={"content-type": "application/json", **(headers or {})}, **options)
    except httpx.TimeoutException:
        return "no answer in time"
    except httpx.HTTPError as error:
        return type(error).__name__
    if answer.status_code == 200:
        return "200"
    try:
        code = answer.json()["error"]["code"]
    except (ValueError, LookupError, TypeError):
        code = ""
    return f"{answer.status_code} {code}".strip()


async def post_often(
    scene: Scene, requests: list[tuple[str, Mapping[str, Any] | bytes]], times: int, at_once: int = 4
) -> Counter[str]:
    """Send all requests ``times`` times, ``at_once`` at a time, until the time is over; return what came back."""
    said: Counter[str] = Counter()
    deadline = scene.deadline()
    waiting = [request for _ in range(times) for request in requests]
    async with client(scene) as http:

        async def sender() -> None:
            while waiting and asyncio.get_running_loop().time() < deadline:
                path, body = waiting.pop(0)
                said[await post(http, path, body)] += 1

        await asyncio.gather(*(sender() for _ in range(at_once)))
    return said


def in_words(said: Counter[str]) -> str:
    """Return the answers, most frequent first."""
    return ", ".join(f"{count} × {what}" for what, count in said.most_common(5)) or "nothing was sent"
