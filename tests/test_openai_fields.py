"""The way of a request's field from the body to the engine: a field that somebody forgot at one of the stops is named.

``CONTRIBUTING.md`` lists the stops.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from poolgrid.kernel.wire.requests import Generate, Routing, Sampling
from poolgrid.plugins.trtllm.core.sampling import plan_sampling
from poolgrid.server.frontend.field_words import engine_fields
from poolgrid.server.frontend.schema import ChatBody, CompletionBody, refusals_of
from tests.frontend.fake_backend import FakeBackend
from tests.frontend.server import application, in_process

ASKED: dict[str, Any] = {
    "max_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 11,
    "frequency_penalty": 0.25,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.5,
    "min_tokens": 3,
    "ignore_eos": True,
    "logprobs": 2,
    "logit_bias": {"9": 4.0},
    "logits_processors": [{"name": "banned_tokens", "arguments": {"token_ids": [7]}}],
    "echo": True,
}
"""A completion that asks for everything at once, but for a guide."""

GUIDES: dict[str, Any] = {
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_grammar": "root ::= 'a'",
    "guided_choice": ["a", "b"],
    "structural_tag": {"structures": [], "triggers": []},
}
NOT_ASKED_FOR = {"bad_token_ids"}
"""What no client asks for in so many words: the front end says it for a tool choice or a template."""


def sampling_of(**fields: Any) -> Sampling:
    """Return what a worker is told when a completion asks for something."""
    backend = FakeBackend()
    body = json.dumps({"model": "tiny", "prompt": "hi", **fields})

    async def go() -> None:
        async with in_process(application(backend)) as client:
            answer = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert backend.requests, answer.text

    asyncio.run(go())
    return backend.requests[0].sampling


def told(sampling: Sampling) -> set[str]:
    """Return the fields that are not what they are when nobody asks."""
    nothing = Sampling(max_tokens=0)
    return {name for name in Sampling.__struct_fields__ if getattr(sampling, name) != getattr(nothing, name)}


def test_every_field_that_a_worker_may_be_told_can_be_asked_for() -> None:
    asked = told(sampling_of(**ASKED)).union(*(told(sampling_of(**{name: value})) for name, value in GUIDES.items()))

    assert asked | NOT_ASKED_FOR == set(Sampling.__struct_fields__)


def test_a_field_that_only_the_engine_reads_arrives_under_its_name() -> None:
    names = {name for body in (ChatBody, CompletionBody) for name in engine_fields(body)}

    assert sampling_of(**ASKED).engine_fields == {name: ASKED[name] for name in names}


def test_every_field_that_a_body_may_have_is_read_or_refused_by_name() -> None:
    frontend = Path(__file__).parents[1] / "src" / "poolgrid" / "server" / "frontend"
    code = "\n".join(path.read_text() for path in frontend.rglob("*.py"))
    forgotten = [
        f"{body.__name__}.{name}"
        for body, refused in ((ChatBody, refusals_of(ChatBody)), (CompletionBody, refusals_of(CompletionBody)))
        for name in body.__struct_fields__
        if name not in (*refused, *engine_fields(body))
        if not re.search(rf'\.{name}\b|getattr\(body, "{name}"', code)
    ]

    assert forgotten == []


def test_every_field_that_a_worker_is_told_reaches_tensorrt_llm() -> None:
    read: set[str] = set()

    class Watched:
        """A ``Sampling`` that notes what is read of it."""

        def __init__(self, sampling: Sampling) -> None:
            self._sampling = sampling

        def __getattr__(self, name: str) -> Any:
            read.add(name)
            return getattr(self._sampling, name)

    request = Generate("r", b"", Sampling(max_tokens=1), routing=Routing())
    for sampling in (Sampling(max_tokens=1), Sampling(max_tokens=1, guided_regex="a")):
        plan_sampling(_Asked(request, Watched(sampling)), (), guide_backend="xgrammar")  # type: ignore[arg-type]

    assert set(Sampling.__struct_fields__) - read == {"logits_processors"}, (
        "those are made by poolgrid.server.workers.logits"
    )


class _Asked:
    """A ``Generate`` with another sampling."""

    def __init__(self, request: Generate, sampling: Any) -> None:
        self._request = request
        self.sampling = sampling

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
