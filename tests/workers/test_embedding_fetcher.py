"""The fetches of embeddings: whoever began one hears how it ended, once, whatever happens to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.multimodal import TensorDescriptor, TensorList
from poolgrid.kernel.wire.requests import Generate
from poolgrid.kernel.worker_protocol.tensor_transfer import Tensor, TensorUnavailable
from poolgrid.server.workers.tensor_transfer.zmq_transfer import TensorTransfer
from poolgrid.server.workers.transfers import EmbeddingFetcher
from tests.workers.builders import make_request

PICTURE = np.ones(4, np.float16)


class Source(TensorTransfer):
    """Gives each tensor what it is told to give, and keeps those waiting about which it is told nothing."""

    kind = "zmq"

    def __init__(self, given: dict[str, Tensor | Exception]) -> None:
        self.given = given
        self.begun: list[str] = []
        self.given_up: list[str] = []

    async def fetch(self, descriptor: TensorDescriptor) -> Tensor:
        self.begun.append(descriptor.tensor_id)
        try:
            if descriptor.tensor_id not in self.given:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up.append(descriptor.tensor_id)
            raise
        given = self.given[descriptor.tensor_id]
        if isinstance(given, Exception):
            raise given
        return given

    def offer(self, name: str, tensor: Tensor) -> TensorDescriptor:
        raise NotImplementedError

    def withdraw(self, tensor_id: str) -> bool:
        raise NotImplementedError

    def on_gone(self, told: Callable[[str, bool], None]) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class Scene:
    """A fetcher, and what it told."""

    def __init__(self, given: dict[str, Tensor | Exception]) -> None:
        self.source = Source(given)
        self.fetcher = EmbeddingFetcher(self.source, 2)
        self.fetched: list[tuple[str, Any]] = []
        self.failed: list[tuple[str, Any]] = []
        self.told = asyncio.Event()
        self.fetcher.start(
            lambda request_id, tensors: self._tell(self.fetched, (request_id, len(tensors))),
            lambda request_id, why: self._tell(self.failed, (request_id, why)),
        )

    def _tell(self, told: list[tuple[str, Any]], what: tuple[str, Any]) -> None:
        told.append(what)
        self.told.set()

    def begin(self, request_id: str, *tensor_ids: str) -> None:
        tensors = TensorList(
            tuple(TensorDescriptor(each, each, "float16", (4,), 8, "tcp://127.0.0.1:1") for each in tensor_ids)
        )
        self.fetcher.begin(_with(make_request(request_id), tensors))


def _with(request: Generate, tensors: TensorList) -> Generate:
    return msgspec.structs.replace(request, disaggregated_params=codec.tensor_list.encode(tensors))


async def test_all_tensors_of_a_request_arrive_together_in_order() -> None:
    scene = Scene({"a": PICTURE, "b": PICTURE})
    scene.begin("r", "a", "b")
    await scene.told.wait()

    assert (scene.fetched, scene.failed) == ([("r", 2)], [])


@pytest.mark.parametrize(
    ("failure", "words"),
    [(TensorUnavailable("its source is gone"), "its source is gone"), (KeyError("a bug of ours"), "KeyError")],
)
async def test_one_that_fails_is_told_and_the_others_of_its_request_are_given_up(
    failure: Exception, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene({"a": failure})
    scene.begin("r", "a", "b")
    await scene.told.wait()

    assert scene.fetched == []
    assert [(request_id, words in why) for request_id, why in scene.failed] == [("r", True)]
    assert scene.source.given_up == ["b"]
    scene.begin("r", "b")  # its place is free again
    await scene.fetcher.close()

    assert words in caplog.text


async def test_whoever_gives_a_fetch_up_hears_nothing_of_it() -> None:
    scene = Scene({})
    scene.begin("r", "a")
    scene.begin("s", "b")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    scene.fetcher.end("r")
    await scene.fetcher.close()

    assert sorted(scene.source.given_up) == ["a", "b"]
    assert (scene.fetched, scene.failed) == ([], [])
