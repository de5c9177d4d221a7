"""The fleet page's server side: what viewers are sent, in which bounds, and what keeps the page harmless."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from poolgrid.plugins.fleet_page import hub as hub_module
from poolgrid.plugins.fleet_page.endpoints import DIRECTORY, TYPES, add_fleet_page, assets
from poolgrid.plugins.fleet_page.hub import FleetHub, Picture, Row
from poolgrid.server.frontend.access import key_file
from poolgrid.server.frontend.access.gate import PathClass, path_class
from poolgrid.server.frontend.access.key_file import Key, KeyDocument, Tenant
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.http.http_server import HttpServer
from poolgrid.server.process.clock import SystemClock
from tests.frontend.fake_backend import FakeBackend
from tests.frontend.server import application

INTERVAL_MS = 1.0


class Source:
    """A pool that a test changes; ``pictures`` counts how often it was looked at."""

    columns: Mapping[str, Sequence[str]] = {"workers": ("state", "running")}

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {"w1": ("ready", 0)}
        self.values: dict[str, Any] = {"queue": {"requests": 0}}
        self.pictures = 0
        self.begun = 0
        self.ended = asyncio.Event()

    def begin(self) -> None:
        self.begun += 1

    def end(self) -> None:
        self.ended.set()

    async def look(self) -> Picture:
        self.pictures += 1
        return Picture(dict(self.values), {"workers": dict(self.rows)})

    async def request(self, request_id: str) -> dict[str, Any] | None:
        return {"explanation": {"request_id": request_id}, "legs": []} if request_id == "known" else None


def parsed(frame: bytes) -> list[tuple[str, str, dict[str, Any]]]:
    """The events of a frame: kind, id, data."""
    found = []
    for event in frame.decode().strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in event.split("\n") if not line.startswith(":"))
        if fields:
            found.append((fields["event"], fields.get("id", ""), json.loads(fields["data"])))
    return found


async def following(stream: AsyncGenerator[bytes, None], source: Source, **rows: Row) -> list[tuple[str, str, Any]]:
    """Change rows of the source and return the next events."""
    source.rows.update(rows)
    return parsed(await anext(stream))


def hub_of(source: Source, viewers_max: int = 4) -> FleetHub:
    return FleetHub(source, SystemClock(), INTERVAL_MS, viewers_max)


async def test_a_viewer_gets_the_whole_picture_and_then_what_changes_of_it() -> None:
    source = Source()
    hub = hub_of(source)
    stream = hub.frames("")
    [(kind, _, data)] = parsed(await anext(stream))
    assert kind == "whole"
    assert data["tables"]["workers"] == {"columns": ["state", "running"], "rows": [["w1", "ready", 0]]}
    assert data["values"] == {"queue": {"requests": 0}}

    [(kind, _, data)] = await following(stream, source, w1=("ready", 3), w2=("ready", 0))
    assert kind == "change"
    assert data["values"] == {}
    assert data["tables"]["workers"]["rows"] == [["w1", "ready", 3], ["w2", "ready", 0]]

    del source.rows["w1"]
    source.values["queue"] = {"requests": 7}
    [(_, _, data)] = parsed(await anext(stream))
    assert data["tables"]["workers"] == {"rows": [], "gone": ["w1"]}
    assert data["values"] == {"queue": {"requests": 7}}
    await stream.aclose()
    hub.close()


async def test_nothing_runs_while_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "LINGER_S", 0.0)

    source = Source()
    hub = hub_of(source)
    assert (source.begun, hub.is_looking) == (0, False)
    one, other = hub.frames(""), hub.frames("")
    await anext(one)
    await anext(other)
    assert (source.begun, hub.viewers) == (1, 2)
    await one.aclose()
    assert hub.is_looking
    await other.aclose()
    await source.ended.wait()
    assert (hub.is_looking, hub.viewers) == (False, 0)


async def test_who_comes_back_gets_what_was_missed_and_beyond_what_is_kept_the_whole() -> None:
    source = Source()
    hub = hub_of(source)
    stays, goes = hub.frames(""), hub.frames("")
    await anext(stays)
    [(_, last, _)] = parsed(await anext(goes))
    await goes.aclose()
    for running in (1, 2, 3):
        await following(stays, source, w1=("ready", running))

    back = parsed(await anext(hub.frames(last)))
    assert [kind for kind, _, _ in back] == ["change"] * 3
    assert [data["tables"]["workers"]["rows"][0][2] for _, _, data in back] == [1, 2, 3]

    for running in range(hub_module.CHANGES_KEPT + 1):
        await following(stays, source, w1=("ready", 100 + running))
    assert [kind for kind, _, _ in parsed(await anext(hub.frames(last)))] == ["whole"]
    assert [kind for kind, _, _ in parsed(await anext(hub.frames("another-3")))] == ["whole"]
    hub.close()


async def test_a_slow_viewer_keeps_nobody_waiting_and_gets_what_it_missed_in_one_piece() -> None:
    source = Source()
    hub = hub_of(source)
    slow, quick = hub.frames(""), hub.frames("")
    await anext(slow)
    await anext(quick)
    for running in range(5):
        await following(quick, source, w1=("ready", 10 + running))

    assert len(parsed(await anext(slow))) == 5
    hub.close()


async def test_one_viewer_too_many_is_refused_and_the_end_ends_every_stream() -> None:
    hub = hub_of(Source(), viewers_max=1)
    stream = hub.frames("")
    await anext(stream)
    with pytest.raises(RequestError) as refused:
        hub.check_room()
    assert (refused.value.status, refused.value.code) == (503, "too_many_viewers")

    hub.close()
    rest = [frame async for frame in stream]
    assert parsed(rest[-1])[0][0] == "bye"
    with pytest.raises(RequestError) as refused:
        hub.check_room()
    assert refused.value.code == "not_ready"


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def served(source: Source, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, FleetHub]]:
    app = application(FakeBackend(), **settings)
    hub = hub_of(source)
    add_fleet_page(app, hub, source)
    server = HttpServer(app, "127.0.0.1", 0, "port")
    server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=30) as client:
            yield client, hub
    finally:
        hub.close()
        await server.stop()


async def test_the_stream_is_events_over_http_and_a_viewer_that_leaves_is_counted_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_module, "LINGER_S", 0.0)

    source = Source()
    async with served(source) as (client, hub):
        async with client.stream("GET", "/v1/fleet/stream") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-store"
            text = b""
            async for part in answer.aiter_bytes():
                text += part
                if b"\n\n" in text:
                    break
            assert parsed(text)[0][0] == "whole"
            assert hub.viewers == 1
        await source.ended.wait()
        assert hub.viewers == 0

        head = await client.head("/v1/fleet/stream")
        assert (head.status_code, head.content, hub.viewers) == (200, b"", 0)


async def test_a_request_is_explained_by_its_name() -> None:
    async with served(Source()) as (client, _):
        assert (await client.get("/v1/fleet/requests/known")).json()["explanation"] == {"request_id": "known"}
        missing = await client.get("/v1/fleet/requests/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "decision_not_found")


async def test_the_files_of_the_page_are_served_with_what_keeps_it_harmless() -> None:
    async with served(Source()) as (client, _):
        page = await client.get("/ui")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        for name in ("/ui", *(f"/ui/{name}" for name in assets())):
            answer = await client.get(name)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-frame-options"] == "DENY"
            again = await client.get(name, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for wrong in ("nothing.js", "..%2Fassets.py", "__init__.py"):
            assert (await client.get(f"/ui/{wrong}")).status_code == 404


async def test_what_the_page_shows_needs_an_operators_key_and_its_files_do_not(tmp_path: Path) -> None:
    keys = {name: Key(key_file.hash_key(f"pg-{name}")) for name in ("acme", "ops")}
    tenants = {"acme": Tenant(keys=(keys["acme"],)), "ops": Tenant(keys=(keys["ops"],), operator=True)}
    path = tmp_path / "keys.json"
    key_file.write(path, KeyDocument(1, "5" * 64, tenants))

    async with served(Source(), api_keys=path) as (client, _):
        for name in ("/ui", *(f"/ui/{name}" for name in assets())):
            assert (await client.get(name)).status_code == 200
        shown = ("/v1/fleet/stream", "/v1/fleet/requests/known")
        for name in shown:
            assert path_class(name, metrics_need_key=False) is PathClass.OPERATOR
            assert (await client.get(name)).status_code == 401
            tenant = await client.get(name, headers={"authorization": "Bearer pg-acme"})
            assert (tenant.status_code, tenant.json()["error"]["code"]) == (403, "operator_only")
        for name in shown[1:]:
            assert (await client.get(name, headers={"authorization": "Bearer pg-ops"})).status_code == 200
        head = await client.head(shown[0], headers={"authorization": "Bearer pg-ops"})
        assert head.status_code == 200


# -- the files themselves ----------------------------------------------------------------------------------------------


def test_the_page_loads_nothing_from_elsewhere_and_has_no_markup_that_runs() -> None:
    for name, found in assets().items():
        text = found.body.decode()
        # Names of XML are no addresses that anybody fetches.
        addresses = {each for each in re.findall(r"https?://[^\s\"'`)]+", text) if "www.w3.org" not in each}
        assert not addresses, f"{name} names {addresses}"
        for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert banned not in text, f"{name} uses {banned}"
    page = assets()["index.html"].body.decode()
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\ssrc=)", page)


def test_every_file_of_the_page_is_used_and_every_file_that_is_used_is_there() -> None:
    names = set(assets())
    assert {path.name for path in DIRECTORY.iterdir()} == names, f"only {', '.join(TYPES)} are served"
    used = {"index.html"} | set(re.findall(r'(?:href|src)="ui/([^"]+)"', assets()["index.html"].body.decode()))
    for name, found in assets().items():
        if name.endswith(".js"):
            used |= set(re.findall(r'from "\./([^"]+)"', found.body.decode()))
    assert used == names
