"""Images over encode, prefill and decode workers: answers depend on every byte of them, whatever dies in between."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from poolgrid.kernel.wire.card import MediaSpec
from poolgrid.kernel.wire.multimodal import MediaItem, MediaKind, MultimodalInput, digest_media
from poolgrid.plugins.simulated.core.media import key_of, mark_media
from poolgrid.server.frontend.media.placeholders import place_media
from tests.e2e.expectation import PLAIN, expected_text
from tests.e2e.processes import (
    PATIENT_ROUTER,
    Process,
    eventually,
    index_equals_workers,
    metric,
    pool_is_quiet,
    ready_workers,
)
from tests.frontend.fake_backend import TINY
from tests.frontend.media.samples import data_url, image, png, safetensors

pytestmark = pytest.mark.e2e

SPEC = MediaSpec(("image", "embeddings"), "<image>", None, 16, 0)
TRANSPORT = os.environ.get("POOLGRID_TRANSPORT_UNDER_TEST", "zmq")
"""How embeddings travel; ``python -m tests.nixl`` says ``nixl``."""

MAKER = (
    *("--served-model-name", "tiny", "--vocabulary-size", "4096", "--speedup", "50", "--modality", "multimodal"),
    *("--tensor-transport", TRANSPORT),
)
CAT, DOG = png(color=(1, 1, 1)), image("JPEG", color=(2, 2, 2))
LENGTHY = "Look closely at every part of it and say what you see. " * 40


class EncodingPool:
    """A router, two encode workers, a prefill and a decode worker, each its own process."""

    def __init__(self, router: Process, workers: dict[str, Process]) -> None:
        self.url = router.url
        self.workers = workers

    def body(self, *parts: bytes | str) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, bytes):
                content.append({"type": "image_url", "image_url": {"url": data_url(part)}})
            elif part.startswith("/"):
                content.append({"type": "image_url", "image_url": {"url": part}})
            else:
                content.append({"type": "text", "text": part})
        return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 12}

    def post(
        self, body: dict[str, Any], request_id: str | None = None, path: str = "/v1/chat/completions"
    ) -> httpx.Response:
        headers = {} if request_id is None else {"x-request-id": request_id}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=60)

    def ask(self, *parts: bytes | str, request_id: str | None = None) -> httpx.Response:
        return self.post(self.body(*parts), request_id)

    def dry_run(self, body: dict[str, Any], request_id: str | None = None) -> httpx.Response:
        return self.post(body, request_id, "/v1/route")

    def legs(self) -> dict[str, float]:
        return {
            stage: metric(self.url, "poolgrid_router_legs_total", stage=stage)
            for stage in ("encode", "prefill", "decode")
        }

    def workers_of(self, request_id: str) -> list[str]:
        answer = httpx.get(f"{self.url}/v1/decisions/{request_id}").json()
        return [attempt["worker"] for attempt in answer["attempts"]]

    def nothing_is_kept(self) -> bool:
        return all(
            httpx.get(f"{worker.url}/health").json()[kind] == 0
            for worker in self.workers.values()
            for kind in ("running_requests", "waiting_requests", "fetching_requests", "kept_transfers")
        ) and all(metric(worker.url, "poolgrid_worker_tensors_kept") == 0 for worker in self.workers.values())


@pytest.fixture(scope="module")
def media_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="module")
def pool(media_directory: Path) -> Iterator[EncodingPool]:
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(
            Process("router", "--port", "0", "--allowed-local-media-path", str(media_directory), *PATIENT_ROUTER)
        ).wait_ready()
        roles = {"e0": "encode", "e1": "encode", "p0": "prefill", "d0": "decode"}
        workers = {
            name: stack.enter_context(
                Process(
                    *("worker", "--worker-id", name, "--role", role, *MAKER),
                    *("--consolidator", router.word("ingest")),
                )
            )
            for name, role in roles.items()
        }
        for worker in workers.values():
            worker.wait_ready()
        made = EncodingPool(router, workers)
        eventually("every worker is reachable", lambda: len(ready_workers(router.url)) == len(workers))
        yield made


def right_answer(text: str, *media: bytes, kind: MediaKind = MediaKind.IMAGE) -> str:
    """Return what one worker would say that has the whole request and the bytes of its media."""
    prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    items = [MediaItem(kind, data, "image/png", digest_media(data)) for data in media]
    tokens, placed = place_media(prompt, items, SPEC, TINY.encode)
    return expected_text(key_of(mark_media(MultimodalInput(prompt, placed))) + tokens, 12, vocabulary=PLAIN)


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_an_image_is_encoded_prefilled_and_decoded_on_three_workers_and_the_answer_is_that_of_one(
    pool: EncodingPool,
) -> None:
    before = pool.legs()
    answer = pool.ask(LENGTHY, CAT, "And this? ", DOG)

    assert said(answer) == right_answer(f"{LENGTHY}<image>And this? <image>", CAT, DOG)
    assert answer.headers["x-poolgrid-worker"] == "d0"
    assert {stage: count - before[stage] for stage, count in pool.legs().items()} == {
        "encode": 1,
        "prefill": 1,
        "decode": 1,
    }
    eventually("nothing is kept", pool.nothing_is_kept)


def test_equal_images_hit_the_cache_and_other_images_change_everything_after_them(pool: EncodingPool) -> None:
    first = pool.ask("Now: ", png(color=(9, 9, 9)), LENGTHY)
    again = pool.ask("Now: ", png(color=(9, 9, 9)), LENGTHY)
    other = pool.ask("Now: ", png(color=(9, 9, 8)), LENGTHY)

    assert said(first) == said(again) == right_answer(f"Now: <image>{LENGTHY}", png(color=(9, 9, 9)))
    assert said(other) == right_answer(f"Now: <image>{LENGTHY}", png(color=(9, 9, 8)))
    cached = [
        answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] // 32 for answer in (first, again, other)
    ]
    assert cached == [0, (again.json()["usage"]["prompt_tokens"] - 1) // 32, 0]
    eventually("the index equals what the workers hold", lambda: index_equals_workers(pool.url))


def test_equal_images_go_to_the_encode_worker_that_had_them_before(pool: EncodingPool) -> None:
    chosen: dict[int, set[str]] = {}
    for turn in range(2):
        for color in range(6):
            request_id = f"affinity-{turn}-{color}"
            said(pool.ask("Which? ", png(color=(color, 0, 7)), request_id=request_id))
            chosen.setdefault(color, set()).add(pool.workers_of(request_id)[0])

    assert all(len(workers) == 1 for workers in chosen.values()), chosen
    assert set.union(*chosen.values()) == {"e0", "e1"}


def test_precomputed_embeddings_need_no_encode_worker(pool: EncodingPool, media_directory: Path) -> None:
    before = pool.legs()["encode"]
    path = media_directory / "cat.safetensors"
    path.write_bytes(safetensors())

    assert said(pool.ask(LENGTHY, str(path))) == right_answer(
        f"{LENGTHY}<image>", safetensors(), kind=MediaKind.EMBEDDINGS
    )
    assert pool.legs()["encode"] == before


def test_a_dry_run_says_where_a_request_with_media_goes_and_what_of_it_is_there(
    pool: EncodingPool, media_directory: Path
) -> None:
    path = media_directory / "dog.safetensors"
    path.write_bytes(safetensors())
    with_picture = pool.body("Where does this go? ", png(color=(4, 4, 4)))
    with_embeddings = pool.body("Look again, please. " * 30, str(path))
    before = pool.legs()

    picture = pool.dry_run(with_picture, "dry-picture").json()["routes"]
    first = pool.dry_run(with_embeddings, "dry-embeddings").json()["routes"]
    assert pool.legs() == before, "nothing was dispatched"
    said(pool.post(with_picture, "dry-picture"))
    said(pool.post(with_embeddings, "dry-embeddings"))

    assert [(route["stage"], route["worker"]) for route in picture] == [("encode", pool.workers_of("dry-picture")[0])]
    assert [(route["stage"], route["worker"], route["overlap_blocks"]) for route in first] == [("prefill", "p0", 0)]

    def found() -> bool:
        (route,) = pool.dry_run(with_embeddings).json()["routes"]
        return bool(route["overlap_blocks"] == route["isl"] // route["block_size"] > 0)

    eventually("the router knows the blocks, those of the medium too", found)
    broken = pool.dry_run(pool.body(str(media_directory / "nobody.safetensors")))
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "media_not_found")


def test_answers_stay_right_when_encode_workers_die_until_none_is_left(pool: EncodingPool) -> None:
    for name in ("e0", "e1"):
        pool.workers.pop(name).kill()
        for color in range(3):
            picture = png(color=(color, 5, 5))
            assert said(pool.ask("Still? ", picture)) == right_answer("Still? <image>", picture)
    eventually("nothing is kept", pool.nothing_is_kept)
    eventually("the ledger is empty", lambda: pool_is_quiet(pool.url))
