"""Embeddings, images and videos at the HTTP API: what is asked of workers, and what clients get."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from poolgrid.kernel.requests.inference import InferenceRequest, Refused, ServedModel, StreamDelta
from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.kernel.wire.tasks import EmbeddingTask, TaskResult, VisualTask
from poolgrid.plugins.simulated.core import pictures
from poolgrid.plugins.tasks import result_files, videos
from poolgrid.plugins.tasks.forms import HEAD_BYTES_MAX, read_form
from poolgrid.plugins.tasks.result_files import ResultFiles
from poolgrid.plugins.tasks.schema import PROMPT_CHARS_MAX, read_video
from poolgrid.server.frontend.access import key_file
from poolgrid.server.frontend.access.key_file import Key, KeyDocument, Tenant
from poolgrid.server.frontend.access.owner import Owner
from poolgrid.server.frontend.errors import RequestError
from tests.frontend.fake_backend import FakeBackend, Step
from tests.frontend.server import application, in_process, served_in_thread

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")

MODELS = (
    ServedModel("words", 1, 1, generates=False, tasks=(Stage.EMBEDDING,)),
    ServedModel("flux", 1, 1, generates=False, tasks=(Stage.IMAGE,)),
    ServedModel("wan", 1, 1, generates=False, tasks=(Stage.VIDEO,)),
    ServedModel("tiny", 1, 262_144),
)
VECTOR = np.array([0.25, -1.0], "<f4").tobytes()
PNG = pictures.image(VisualTask("a reference"), 4, 4)


def done(result: TaskResult) -> list[Step]:
    return [[StreamDelta(b"", progress=50)], [StreamDelta(b"", finish_reason="stop", result=result)]]


def work(request: InferenceRequest) -> list[Step]:
    task = request.task
    if isinstance(task, EmbeddingTask):
        return done(TaskResult((VECTOR,) * len(task.inputs), prompt_tokens=7))
    assert isinstance(task, VisualTask)
    if task.video:
        return done(TaskResult((b"a film",), "video/mp4"))
    return done(TaskResult((PNG + b"1", PNG + b"2")[: task.count], "image/png"))


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(work, served=MODELS)


@pytest.fixture
def client(backend: FakeBackend) -> Iterator[openai.OpenAI]:
    with (
        served_in_thread(application(backend)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


@asynccontextmanager
async def asked(backend: FakeBackend, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with in_process(application(backend, **settings)) as client:
        yield client


async def ended(client: httpx.AsyncClient, video_id: str) -> dict[str, Any]:
    async with asyncio.timeout(120):
        while True:
            described: dict[str, Any] = (await client.get(f"/v1/videos/{video_id}")).json()
            if described["status"] in videos.ENDED:
                return described
            await asyncio.sleep(0.01)


# -- embeddings --------------------------------------------------------------------------------------------------------


def test_the_official_client_gets_vectors_in_the_order_of_its_texts(
    client: openai.OpenAI, backend: FakeBackend
) -> None:
    answer = client.embeddings.create(model="words", input=["a", "b"], dimensions=2)

    assert [row.index for row in answer.data] == [0, 1]
    assert answer.data[1].embedding == [0.25, -1.0]
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("words", 7, 7)
    [request] = backend.requests
    assert (request.task, request.token_ids) == (EmbeddingTask(("a", "b"), 2), b"")


@pytest.mark.parametrize(
    ("given", "inputs"),
    [("a", ("a",)), (["a"], ("a",)), ([5, 6], ((5, 6),)), ([[5], [6, 7]], ((5,), (6, 7))), (["a", [5]], ("a", (5,)))],
)
async def test_texts_and_token_ids_are_taken(given: Any, inputs: Any, backend: FakeBackend) -> None:
    async with asked(backend) as client:
        answer = await client.post("/v1/embeddings", json={"input": given, "encoding_format": "float"})
        assert answer.json()["data"][0]["embedding"] == [0.25, -1.0]
    task = backend.requests[0].task
    assert isinstance(task, EmbeddingTask)
    assert task.inputs == inputs


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "why"),
    [
        ("embeddings", {"model": "words"}, 400, "input", "is missing"),
        ("embeddings", {"model": "words", "input": []}, 400, "input", "allowed are 1 to 2048"),
        ("embeddings", {"model": "words", "input": ["a", ""]}, 400, "input[1]", "not empty"),
        ("embeddings", {"model": "words", "input": [[-1]]}, 400, "input[0]", "token ids"),
        ("embeddings", {"model": "tiny", "input": "a"}, 404, "model", "embeddings; embeddings are served by words"),
        ("embeddings", {"model": "nope", "input": "a"}, 404, "model", "does not exist here"),
        ("images/generations", {"model": "words", "prompt": "x"}, 404, "model", "images are served by flux"),
        ("images/generations", {"model": "flux"}, 400, "prompt", "is missing"),
        ("images/generations", {"model": "flux", "prompt": "x", "n": 11}, 400, "n", "is 11"),
        ("images/generations", {"model": "flux", "prompt": "x", "size": "5000x5"}, 400, "size", "each up to 4096"),
        ("images/generations", {"model": "flux", "prompt": "x", "width": 5}, 400, "height", "together"),
        (
            "images/generations",
            {"model": "flux", "prompt": "x", "quality": "hd"},
            400,
            "quality",
            "num_inference_steps",
        ),
        ("images/generations", {"model": "flux", "prompt": "x", "stream": True}, 400, "stream", "whole"),
        ("videos", {"model": "wan", "prompt": "x", "seconds": "soon"}, 400, "seconds", "above 0"),
        ("videos", {"model": "wan", "prompt": "x", "input_reference": "http://x/y"}, 400, "input_reference", "base64"),
        ("videos", {"model": "wan", "prompt": "x", "input_reference": "AAAA"}, 400, "input_reference", "not an image"),
        (
            "videos",
            {"model": "wan", "prompt": "x", "nvext": {"guidance_scale_2": 1}},
            400,
            "nvext.guidance_scale_2",
            "",
        ),
        (
            "chat/completions",
            {"model": "flux", "messages": [{"role": "user", "content": "x"}]},
            404,
            "model",
            "it serves tasks (image)",
        ),
    ],
)
async def test_what_is_wrong_is_refused_by_name(
    path: str, body: dict[str, Any], status: int, param: str, why: str, backend: FakeBackend
) -> None:
    async with asked(backend) as client:
        answer = await client.post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert why in error["message"]
    assert not backend.requests


# -- images ------------------------------------------------------------------------------------------------------------


def test_the_official_client_gets_images_by_url_or_as_base64(client: openai.OpenAI, backend: FakeBackend) -> None:
    inline = client.images.generate(model="flux", prompt="a cat", n=2, size="256x256", response_format="b64_json")
    linked = client.images.generate(model="flux", prompt="a cat")

    assert inline.data is not None
    assert linked.data is not None
    assert [base64.b64decode(each.b64_json or "") for each in inline.data] == [PNG + b"1", PNG + b"2"]
    fetched = httpx.get(linked.data[0].url or "")
    assert (fetched.content, fetched.headers["content-type"]) == (PNG + b"1", "image/png")
    assert backend.requests[0].task == VisualTask("a cat", count=2, width=256, height=256)


async def test_what_clients_say_reaches_the_engine_by_either_name(backend: FakeBackend) -> None:
    flat = {"negative_prompt": "dog", "num_inference_steps": 9, "guidance_scale": 2.5, "seed": 3}
    more = {"input_reference": base64.b64encode(PNG).decode(), "extra_params": {"a": 1}, "output_format": "webp"}

    async with asked(backend) as client:
        for body in ({**flat, **more}, {"nvext": flat, **more}):
            answer = await client.post("/v1/images/generations", json={"prompt": "x", **body})
            assert answer.status_code == 200, answer.text
    wanted = VisualTask(
        "x",
        negative_prompt="dog",
        steps=9,
        guidance_scale=2.5,
        seed=3,
        reference=PNG,
        extra=b'{"a":1}',
        output_format="webp",
    )
    assert [request.task for request in backend.requests] == [wanted, wanted]


async def test_a_client_that_leaves_cancels_its_task(backend: FakeBackend) -> None:
    never = asyncio.Event()
    backend.script = lambda request: [never]

    async with asked(backend) as client:
        asking = asyncio.create_task(client.post("/v1/images/generations", json={"prompt": "x"}))
        await backend.submitted.wait()
        asking.cancel()
        await asyncio.wait([asking])
    assert backend.streams[0].cancels == 1


@pytest.mark.parametrize(
    ("last", "status", "code"),
    [
        (StreamDelta(b"", "error", error="no webp here", unsupported=True), 400, "unsupported_by_worker"),
        (StreamDelta(b"", "error", error="no room", retry_after_s=3.0), 429, "busy"),
        (StreamDelta(b"", "error", error="two workers", poison=True), 422, "workers_lost"),
        (StreamDelta(b"", "error", error="it broke"), 500, "generation_failed"),
    ],
)
async def test_a_task_that_fails_is_answered_as_a_completion_is(
    last: StreamDelta, status: int, code: str, backend: FakeBackend
) -> None:
    backend.script = lambda request: [[last]]

    async with asked(backend) as client:
        answer = await client.post("/v1/images/generations", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(("said", "shown"), [("image/webp", "webp"), ("", None), ("image/odd", "octet-stream")])
async def test_output_format_is_null_where_the_worker_names_no_media_type(said: str, shown: str | None) -> None:
    backend = FakeBackend(lambda _: done(TaskResult((PNG,), said)), served=MODELS)
    async with asked(backend) as client:
        image = await client.post("/v1/images/generations", json={"prompt": "x"})
        video = await client.post("/v1/videos", json={"prompt": "x", "response_format": "b64_json"})
    assert image.json()["output_format"] == shown
    assert [row["output_format"] for row in video.json()["data"]] == [shown]


# -- videos ------------------------------------------------------------------------------------------------------------


def test_the_official_client_makes_a_video_and_downloads_it(client: openai.OpenAI, backend: FakeBackend) -> None:
    made = client.videos.create_and_poll(model="wan", prompt="a cat", seconds="4", size="1280x720", poll_interval_ms=20)

    assert (made.status, made.progress, made.seconds, made.size) == ("completed", 100, "4", "1280x720")
    assert client.videos.download_content(made.id).read() == b"a film"
    assert [each.id for each in client.videos.list()] == [made.id]
    assert client.videos.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(made.id)
    assert backend.requests[0].task == VisualTask("a cat", video=True, width=1280, height=720, seconds=4.0)


def test_the_official_client_sends_a_reference_as_a_file(client: openai.OpenAI, backend: FakeBackend) -> None:
    file = io.BytesIO(PNG)
    client.videos.create(model="wan", prompt="7", input_reference=("cat.png", file), extra_body={"seed": 5, "fps": 8})

    assert backend.requests[0].task == VisualTask("7", video=True, reference=PNG, seed=5, frame_rate=8.0), (
        "what looks like a number stays a text where it is one"
    )


@pytest.mark.parametrize("where", ["url", "b64_json"])
async def test_with_a_response_format_a_video_is_answered_in_dynamos_form(where: str, backend: FakeBackend) -> None:
    body = {"prompt": "x", "response_format": where, "seconds": 2, "nvext": {"fps": 12, "num_frames": 9}}
    async with asked(backend) as client:
        answer = (await client.post("/v1/videos", json=body)).json()
        assert (answer["object"], answer["status"], answer["progress"]) == ("video", "completed", 100)
        [row] = answer["data"]
        assert row["output_format"] == "mp4"
        if where == "url":
            assert (await client.get(row["url"])).content == b"a film"
        else:
            assert base64.b64decode(row["b64_json"]) == b"a film"
    assert backend.requests[0].task == VisualTask("x", video=True, seconds=2.0, frame_rate=12.0, frames=9)


async def test_a_job_shows_its_progress_and_its_content_only_when_it_is_completed(backend: FakeBackend) -> None:
    goes_on = asyncio.Event()
    result = TaskResult((b"a film",), "video/mp4")
    backend.script = lambda request: [
        [StreamDelta(b"", progress=40)],
        goes_on,
        [StreamDelta(b"", finish_reason="stop", result=result)],
    ]

    async with asked(backend) as client:
        video_id = (await client.post("/v1/videos", json={"prompt": "x"})).json()["id"]
        while (described := (await client.get(f"/v1/videos/{video_id}")).json())["progress"] != 40:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert described["status"] == "in_progress"
        early = await client.get(f"/v1/videos/{video_id}/content")
        assert (early.status_code, early.json()["error"]["code"]) == (400, "video_not_ready")
        goes_on.set()
        assert (await ended(client, video_id))["status"] == "completed"


async def test_a_job_that_is_deleted_is_cancelled_by_any_process(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(videos, "TOUCH_S", 0.02)
    backend.script = lambda request: [asyncio.Event()]

    app = application(backend)
    async with in_process(app) as client:
        own = (await client.post("/v1/videos", json={"prompt": "x"})).json()["id"]
        other = (await client.post("/v1/videos", json={"prompt": "y"})).json()["id"]
        assert (await client.delete(f"/v1/videos/{own}")).status_code == 200
        await asyncio.wait_for(backend.streams[0].cancelled.wait(), 120)
        files = app.state.videos.files  # as another process deletes it
        assert files.forget(Owner("", 1), other)
        await asyncio.wait_for(backend.streams[1].cancelled.wait(), 120)


async def test_a_job_that_is_deleted_while_it_tells_its_progress_is_cancelled_too(
    backend: FakeBackend, tmp_path: Path
) -> None:
    """To describe it once more would make it wanted again, and a worker would make a film without a client."""
    deleted = asyncio.Event()
    percent = [StreamDelta(b"", progress=each) for each in range(1, 90)]
    backend.script = lambda request: [percent[:1], deleted, *([each] for each in percent[1:]), asyncio.Event()]

    app = application(backend)
    async with in_process(app) as client:
        video_id = (await client.post("/v1/videos", json={"prompt": "x"})).json()["id"]
        assert app.state.videos.files.forget(Owner("", 1), video_id)
        deleted.set()
        await asyncio.wait_for(backend.streams[0].cancelled.wait(), 120)
        assert (await client.get("/v1/videos")).json()["data"] == []


def test_a_result_that_is_forgotten_is_not_kept_again(tmp_path: Path) -> None:
    files, owner, name = ResultFiles(tmp_path), Owner("alice", 1), f"video_{1:032x}"
    assert not files.keep_again(owner, name, b"{}")
    files.keep(owner, name, b"{}")
    assert files.keep_again(owner, name, b"{}", b"film")
    assert files.forget(owner, name)

    assert not files.keep_again(owner, name, b"{}", b"film")

    assert (files.describe(owner, name), files.content(owner, name)) == (None, None)


async def test_a_job_that_fails_says_why_and_one_that_is_refused_is_none(backend: FakeBackend) -> None:
    backend.script = lambda request: [[StreamDelta(b"", "error", error="it broke")]]

    async with asked(backend) as client:
        video_id = (await client.post("/v1/videos", json={"prompt": "x"})).json()["id"]
        failed = await ended(client, video_id)
        assert (failed["status"], failed["error"]["code"]) == ("failed", "generation_failed")
        backend.refusal = Refused(429, "busy", "full", 3.0)
        refused = await client.post("/v1/videos", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
        assert len((await client.get("/v1/videos")).json()["data"]) == 1


async def test_a_job_whose_router_ended_has_failed(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "LOST_S", -1.0)
    backend.script = lambda request: [asyncio.Event()]

    async with asked(backend) as client:
        video_id = (await client.post("/v1/videos", json={"prompt": "x"})).json()["id"]
        assert (await ended(client, video_id))["error"]["code"] == "router_lost"


async def test_a_page_of_another_site_cannot_send_a_form(backend: FakeBackend) -> None:
    async with asked(backend) as client:
        headers = {"origin": "https://evil.example", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
        answer = await client.post("/v1/videos", files={"prompt": (None, "x")}, headers=headers)
        assert answer.status_code == 415
    assert not backend.requests


# -- tenants and files -------------------------------------------------------------------------------------------------


async def test_results_are_their_tenants_and_jobs_count_towards_its_limit(backend: FakeBackend, tmp_path: Path) -> None:
    backend.script = lambda request: [asyncio.Event()] if request.task.video else work(request)  # type: ignore[union-attr]
    tenants = {
        name: Tenant(keys=(Key(key_file.hash_key(f"key-{name}")),), concurrent_requests=2) for name in ("alice", "bob")
    }
    keys = tmp_path / "keys.json"
    key_file.write(keys, KeyDocument(1, "5" * 64, tenants))
    alice, bob = ({"authorization": f"Bearer key-{name}"} for name in ("alice", "bob"))

    async with asked(backend, api_keys=keys) as client:
        linked = (await client.post("/v1/images/generations", json={"prompt": "x"}, headers=alice)).json()
        url = linked["data"][0]["url"]
        statuses = [(await client.get(url, headers=each)).status_code for each in (alice, bob, {})]
        assert statuses == [200, 404, 401]
        codes = []
        for _ in range(3):
            answer = await client.post("/v1/videos", json={"prompt": "x"}, headers=alice)
            codes.append(answer.status_code)
        assert codes == [200, 200, 429]
        assert (await client.post("/v1/videos", json={"prompt": "x"}, headers=bob)).status_code == 200
        assert len((await client.get("/v1/videos", headers=bob)).json()["data"]) == 1


def test_the_oldest_results_go_when_there_is_no_more_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_files, "BYTES_MAX", 2 * 2 * 7)
    files, owner = ResultFiles(tmp_path), Owner("alice", 2)
    names = [f"image_{number:032x}" for number in range(4)]
    for name in names:
        files.keep(owner, name, b"{}", b"12345")

    assert [files.content(owner, name) is not None for name in names] == [False, False, True, True]
    assert files.describe(Owner("bob", 2), names[3]) is None
    assert files.describe(owner, "../../etc/passwd") is None
    assert len(list(tmp_path.rglob("*"))) == 1 + 2 * 2


@pytest.mark.parametrize(
    "raw",
    [b"", b"--x\r\n", b"--x--", b"\0" * 100, b"--x\r\nContent-Disposition: form-data\r\n\r\n1\r\n--x--\r\n"],
)
def test_a_form_that_is_none_is_refused_and_breaks_nothing(raw: bytes) -> None:
    with pytest.raises(Exception) as refused:  # noqa: PT011 - the status says it
        read_video(raw, b"multipart/form-data; boundary=x")
    assert getattr(refused.value, "status", 0) == 400


def test_a_form_is_read_as_the_json_that_means_the_same() -> None:
    parts = {"model": "7", "prompt": "12", "seconds": "4", "seed": "-5", "guidance_scale": "1.5", "nvext[fps]": "8"}
    body = "".join(
        f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in parts.items()
    )

    read = json.loads(read_form(f"{body}--x--\r\n".encode(), b"multipart/form-data; boundary=x"))

    assert read == {
        "model": "7",
        "prompt": "12",
        "seconds": "4",
        "seed": -5,
        "guidance_scale": 1.5,
        "nvext": {"fps": 8},
    }


HEADS = {
    "parameters": lambda size: b'Content-Disposition: form-data; name="prompt"' + b"; a=b" * (size // 5),
    "lines": lambda size: b'Content-Disposition: form-data; name="prompt"\r\n' + b"x-a: b\r\n" * (size // 8),
    "folded": lambda size: b"Content-Disposition: form-data;\r\n" + b" a=b;\r\n" * (size // 7) + b' name="prompt"',
    "escaped": lambda size: b'Content-Disposition: form-data; name="' + b"\\a" * (size // 2) + b'"',
    "spaces": lambda size: b"Content-Disposition:" + b" " * size + b'form-data; name="prompt"',
    "open": lambda size: b'Content-Disposition: form-data; name="' + b"a" * size,
    "semicolons": lambda size: b"Content-Disposition: form-data" + b"; " * (size // 2) + b'name="prompt"',
}


@pytest.mark.parametrize("shape", HEADS)
def test_a_form_costs_its_bytes_whatever_the_heads_of_its_fields_are(shape: str) -> None:
    """A head of a megabyte, which took a parser of mails minutes, and the longest ones that are read."""
    content_type = b"multipart/form-data; boundary=B"
    began_s = time.process_time()
    long = b"--B\r\n" + HEADS[shape](1_000_000) + b"\r\n\r\nhello\r\n--B--\r\n"
    with pytest.raises(RequestError, match="longer than"):
        read_form(long, content_type)
    head = HEADS[shape](HEAD_BYTES_MAX - 100)[: HEAD_BYTES_MAX - 8]
    with suppress(RequestError):
        read_form((b"--B\r\n" + head + b"\r\n\r\nhello\r\n") * 60 + b"--B--\r\n", content_type)
    with suppress(RequestError):
        read_form(b"--B--", b"multipart/form-data; " + b"boundary=; " * 5000)

    assert time.process_time() - began_s < 1.0


def test_a_form_with_a_file_and_an_escaped_name_is_read_as_clients_write_it() -> None:
    body = (
        b'--B\r\nContent-Type: image/png\r\ncontent-disposition: form-data; name="input_reference"; '
        b'filename="a;name=\\"x\\".png"\r\n\r\n\x00\r\n1\r\n'
        b'--B\r\nContent-Disposition: form-data; filename=""; name=b\r\n\r\n\r\n'
        b'--B\r\nContent-Disposition: form-data; name="a\\"b"\r\n\r\n--x\r\n--B--'
    )

    read = json.loads(read_form(body, b"multipart/form-data; charset=x; boundary=B; a=b"))

    assert read == {"input_reference": base64.b64encode(b"\x00\r\n1").decode(), "b": "", 'a"b': "--x"}


@pytest.mark.parametrize("name", ["filename=a.png", "filename*=UTF-8''a.png", "FileName*=utf-8'en'a.png"])
def test_a_part_with_a_file_name_of_any_form_is_a_file(name: str) -> None:
    head = f"Content-Disposition: form-data; name=input_reference; {name}".encode()

    read = json.loads(read_form(b"--B\r\n" + head + b"\r\n\r\n12\r\n--B--", b"multipart/form-data; boundary=B"))

    assert read == {"input_reference": base64.b64encode(b"12").decode()}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/images/generations", "/v1/videos"])
async def test_no_body_is_read_where_no_model_serves_its_task(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poolgrid.plugins.tasks.schema.read_form", lambda *_: pytest.fail("it was read"))
    async with asked(FakeBackend(work, served=MODELS[3:])) as client:
        for body in ({"json": {"prompt": "x"}}, {"files": {"prompt": (None, "x")}}):
            answer = await client.post(path, **body)
            assert answer.status_code in ((404, 415) if "files" in body and path != "/v1/videos" else (404,))


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/videos"])
async def test_what_is_kept_of_a_prompt_is_bounded(backend: FakeBackend, path: str, field: str) -> None:
    async with asked(backend) as client:
        body = {"prompt": "x", field: "x" * (PROMPT_CHARS_MAX + 1)}
        answer = await client.post(path, json=body)
        assert answer.status_code == 400
        assert field in answer.json()["error"]["message"]


def test_descriptions_count_for_the_room_and_for_the_number_of_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_files, "BYTES_MAX", 10_000)
    monkeypatch.setattr(result_files, "RESULTS_MAX", 30)
    files, large, many = ResultFiles(tmp_path), Owner("large", 1), Owner("many", 3)
    for number in range(40):
        files.keep(large, f"video_{number:032x}", b'{"status": "queued", "prompt": "%s"}' % (b"x" * 3000))
        files.keep(many, f"video_{number:032x}", b"{}")

    kept = {owner.name: len(list(files._folder(owner).glob("*.json"))) for owner in (large, many)}
    assert kept == {"large": 3, "many": 10}


def test_a_page_of_videos_reads_what_it_shows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, owner = ResultFiles(tmp_path), Owner("alice", 1)
    names = []
    for number in range(20):
        monkeypatch.setattr(time, "time_ns", lambda number=number: (1_700_000_000_000 + number) * 1_000_000)
        names.append(result_files.new_id("video"))
        files.keep(owner, names[-1], json.dumps({"id": names[-1], "status": "queued", "n": number}).encode())
        files.keep(owner, result_files.new_id("image"), b"{}")
    read: list[str] = []
    describe = ResultFiles.describe

    def counted(files: ResultFiles, owner: Owner, name: str) -> tuple[bytes, float] | None:
        read.append(name)
        return describe(files, owner, name)

    monkeypatch.setattr(ResultFiles, "describe", counted)

    newest = files.page(owner, "video", 3, True, None)
    assert newest is not None
    assert [item["n"] for item in newest] == [19, 18, 17]
    oldest = files.page(owner, "video", 2, False, names[4])
    assert oldest is not None
    assert [item["n"] for item in oldest] == [5, 6]
    assert files.page(owner, "video", 2, False, "video_none") is None
    assert len(read) == 5


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize(
    ("said", "served"),
    [
        ("image/png", "image/png"),
        ("video/mp4", "video/mp4"),
        ("text/html", "application/octet-stream"),
        ("image/svg+xml", "application/octet-stream"),
        ("image/png; x=<script>", "application/octet-stream"),
        ("IMAGE/PNG\r\nset-cookie: a=b", "application/octet-stream"),
        ("", "application/octet-stream"),
    ],
)
async def test_a_result_is_no_page_of_the_router_whatever_its_worker_says_it_is(
    kind: str, said: str, served: str
) -> None:
    backend = FakeBackend(lambda _: done(TaskResult((b"<script>alert(1)</script>",), said)), served=MODELS)
    async with asked(backend) as client:
        body = {"prompt": "x", "response_format": "url"}
        path = "/v1/images/generations" if kind == "image" else "/v1/videos"
        answer = await client.post(path, json=body)
        content = await client.get(answer.json()["data"][0]["url"])

    assert content.content == b"<script>alert(1)</script>"
    assert content.headers["content-type"] == served
    assert content.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in content.headers["content-security-policy"]
    assert content.headers["content-disposition"] == ("inline" if served == said else "attachment")
    assert "set-cookie" not in content.headers
