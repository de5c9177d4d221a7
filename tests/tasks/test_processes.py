"""Tasks through real processes: a router with two HTTP processes, workers of every kind, and the loss of one."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner
from PIL import Image

from poolgrid.server.cli.main import app
from tests.e2e.processes import PATIENT_ROUTER, Process, eventually, metric, worker_rows
from tests.fakes import FAKES_PATH

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore:The Sora API")]

SPEEDUP = "20"
ENDED = ("completed", "failed")


@dataclass
class Studio:
    """A router, and a worker or two for each kind of task."""

    url: str
    admins: list[str]
    """Each HTTP process counts for itself."""
    workers: dict[str, Process]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def metric(self, name: str, **labels: str) -> float:
        return sum(metric(url, name, **labels) for url in self.admins)

    def running(self, name: str) -> list[int]:
        return [int(str(worker_rows(url)[name]["running_requests"])) for url in self.admins]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def studio(recorded: Path) -> Iterator[Studio]:
    kinds = {
        "e": ("--modality", "embedding", "--served-model-name", "words"),
        "i": ("--modality", "image_diffusion", "--served-model-name", "flux"),
        "v0": ("--modality", "video_diffusion", "--served-model-name", "wan"),
        "v1": ("--modality", "video_diffusion", "--served-model-name", "wan"),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(
            "PYTHONPATH", os.pathsep.join([str(FAKES_PATH), os.environ.get("PYTHONPATH", "")])
        )
        router = stack.enter_context(
            Process("router", "--port", "0", "--http-workers", "2", "--data-dir", str(recorded), *PATIENT_ROUTER)
        ).wait_ready()
        ingest = ("--consolidator", router.word("ingest"), "--shutdown-timeout-ms", "500")
        workers = {
            name: stack.enter_context(Process("worker", "--worker-id", name, *ingest, "--speedup", SPEEDUP, *words))
            for name, words in kinds.items()
        }
        for engine in ("image_diffusion", "video_diffusion"):
            name = f"trtllm-{engine}"
            workers[name] = stack.enter_context(
                Process(
                    *("worker", "--engine", "trtllm", "--model-path", name, "--modality", engine, "--worker-id", name),
                    *ingest,
                    environment={"TRTLLM_FAKE": json.dumps({"version": "1.3"})},
                )
            )
        for worker in workers.values():
            worker.wait_ready()
        made = Studio(router.url, router.word("admin").split(","), workers)
        eventually("every worker is reachable", lambda: set(states(made.url).values()) == {"ready"})
        yield made


def states(url: str) -> dict[str, object]:
    return {name: row["state"] for name, row in worker_rows(url).items()}


def ended(client: openai.OpenAI, video: Any) -> Any:
    eventually("the video has ended", lambda: client.videos.retrieve(video.id).status in ENDED)
    return client.videos.retrieve(video.id)


def test_the_official_client_is_served_every_kind_of_task(studio: Studio) -> None:
    with studio.client() as client:
        vectors = client.embeddings.create(model="words", input=["a", "b", "a"], dimensions=8)
        pictures = client.images.generate(model="flux", prompt="a cat", size="64x32", response_format="b64_json")
        small: Any = {"size": "64x32", "seconds": "1"}  # the client's types know sizes and lengths of one vendor
        video = client.videos.create(model="wan", prompt="a cat", **small)
        assert ended(client, video).status == "completed"
        film = client.videos.download_content(video.id).read()

    assert vectors.data[0].embedding == vectors.data[2].embedding != vectors.data[1].embedding
    assert pictures.data is not None
    assert Image.open(io.BytesIO(base64.b64decode(pictures.data[0].b64_json or ""))).size == (64, 32)
    assert (film[4:8], film.count(b"\x89PNG")) == (b"ftyp", 24)
    assert studio.metric("poolgrid_router_decisions_total", policy="fewest-requests") >= 3
    roles = {row["role"] for row in httpx.get(f"{studio.url}/health").json()["served"]}
    assert roles == {"embedding", "image", "video"}


def test_tensorrt_llms_visual_gen_is_served_the_same_way(studio: Studio) -> None:
    with studio.client() as client:
        picture = client.images.generate(model="trtllm-image_diffusion", prompt="a cat", n=2)
        assert picture.data is not None
        fetched = [httpx.get(each.url or "").content for each in picture.data]
        second: Any = "1"
        video = client.videos.create(model="trtllm-video_diffusion", prompt="a cat", seconds=second)
        assert ended(client, video).status == "completed"
        film = client.videos.download_content(video.id).read()
    assert [Image.open(io.BytesIO(each)).size for each in fetched] == [(48, 32)] * 2
    assert film.count(b"\x89PNG") == 16


def test_videos_are_spread_and_any_http_process_knows_and_cancels_them(studio: Studio) -> None:
    with studio.client() as client:
        long = {"model": "wan", "prompt": "x", "size": "1280x720", "seconds": "30"}
        begun: list[str] = []
        for _ in range(2):
            begun.append(httpx.post(f"{studio.url}/v1/videos", json=long).json()["id"])
            eventually("it is alone", lambda: (studio.running("v0") + studio.running("v1")).count(1) == 2 * len(begun))
        for _ in range(8):  # each on a connection of its own, which either process may take
            listed = {row["id"] for row in httpx.get(f"{studio.url}/v1/videos").json()["data"]}
            assert listed >= set(begun)
        for video_id in begun:
            assert client.videos.delete(video_id).deleted
        eventually("nothing is made any more", lambda: not any(studio.running("v0") + studio.running("v1")))


def test_decisions_on_tasks_are_recorded_and_replay_bit_for_bit(studio: Studio, recorded: Path) -> None:
    with studio.client() as client:
        client.embeddings.create(model="words", input="a", extra_headers={"x-request-id": "explained"})

    def replayed() -> dict[str, Any]:
        out = CliRunner().invoke(app, ["replay", str(recorded), "--json"]).stdout
        return dict(json.loads(out)["routers"])

    eventually("the decisions are on disk", lambda: sum(each["identical"] for each in replayed().values()) >= 6)
    assert all(each["difference"] is None for each in replayed().values())
    explain = ["explain", "explained", "--journal", str(recorded)]
    eventually("the last one too", lambda: "fewest-requests" in CliRunner().invoke(app, explain).stdout)


def test_a_video_whose_worker_is_killed_is_made_by_another_one(studio: Studio) -> None:
    with studio.client() as client:
        made: list[Any] = []

        def has_one() -> bool:
            if not made or client.videos.retrieve(made[-1].id).status == "completed":  # before anybody looked
                size: Any = "320x240"
                made.append(client.videos.create(model="wan", prompt="a cat", size=size, seconds="4"))
            return sum(studio.running("v0") + studio.running("v1")) == 2

        eventually("a worker has it", has_one)
        video = made[-1]
        [name] = [name for name in ("v0", "v1") if any(studio.running(name))]
        studio.workers[name].kill()

        video = ended(client, video)

        assert video.status == "completed", video.error
        assert client.videos.download_content(video.id).read().count(b"\x89PNG") == 96
    assert studio.metric("poolgrid_router_migrations_total", cause="before_output") >= 1
