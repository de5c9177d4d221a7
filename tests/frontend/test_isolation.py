"""What tenants can learn of each other through the front end: nothing by the work of their requests, nor by answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers

from poolgrid.kernel.requests.inference import WHOLE, Refused, ServedModel
from poolgrid.kernel.wire.card import MediaSpec
from poolgrid.server.frontend.access import key_file
from poolgrid.server.frontend.access.key_file import KeyDocument, Tenant
from poolgrid.server.frontend.access.tenants import Tenants
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.frontend.prompt_encoder import PromptEncoder
from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.frontend.settings import FrontendSettings
from tests.frontend.fake_backend import FakeBackend, speak
from tests.frontend.media.hostile_server import answer, hostile_server
from tests.frontend.media.samples import png
from tests.frontend.server import application, in_process

SECRET = "5" * 64
TENANTS = ("acme", "other")
LONG = "".join(f"<|im_start|>user\nquestion {number} {'of many words ' * 60}<|im_end|>\n" for number in range(4))
WITH_MEDIA = ServedModel("tiny", 0, 262_144, media=MediaSpec(("image",), placeholder="<image>"))


def keys_of(*tenants: str) -> KeyDocument:
    return KeyDocument(
        1, SECRET, {name: Tenant(keys=(key_file.Key(key_file.hash_key(f"pg-{name}")),)) for name in tenants}
    )


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    key_file.write(path, keys_of(*TENANTS))
    return path


class Server:
    """An application of its own model, and what its tokenizer is asked."""

    def __init__(self, client: httpx.AsyncClient, backend: FakeBackend, encoder: PromptEncoder) -> None:
        self.client = client
        self.backend = backend
        self._encoder = encoder

    async def work(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> int:
        """Send a request and return how many characters of its prompt were tokenized for it."""
        asked: list[int] = []
        whole = self._encoder._backend.encoder

        class Watched:
            def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[bytes]:
                asked.append(sum(map(len, texts)))
                return whole.encode(texts, add_special_tokens)

        self._encoder._backend.encoder = Watched()
        try:
            response = await self.client.post(path, json={"model": "tiny", **body}, headers=headers)
        finally:
            self._encoder._backend.encoder = whole
        assert response.status_code == 200, response.text
        return sum(asked)


@asynccontextmanager
async def server(backend: FakeBackend | None = None, **settings: Any) -> Any:
    made = FrontendSettings(**settings)
    model = PromptModel.load(TINY_MODEL_PATH, word_cache=made.word_cache)
    assert model.encoder is not None
    assert model.encoder.delimiters
    # What the fake worker answers is tokenized once, before anybody watches.
    steps = speak("yes", model=model)
    backend = backend or FakeBackend(lambda request: [list(each) if isinstance(each, list) else each for each in steps])
    async with in_process(application(backend, models={"tiny": model}, **settings)) as client:
        yield Server(client, backend, model.encoder)


def key(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer pg-{tenant}"}


CHAT = {"messages": [{"role": "user", "content": LONG}]}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/tokenize": CHAT,
}


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_prompt_takes_the_same_work_whether_another_tenant_has_sent_it_or_not(keys: Path, path: str) -> None:
    async with server(api_keys=keys) as service:
        first = await service.work(path, ENDPOINTS[path], key("other"))
        for sent in ENDPOINTS:
            await service.work(sent, ENDPOINTS[sent], key("other"))

        assert await service.work(path, ENDPOINTS[path], key("acme")) == first
        if path != "/tokenize":
            again = await service.work(path, ENDPOINTS[path], key("acme"))
            assert again < first / 2, "its own prompts are known to a tenant"


async def test_a_salt_divides_what_a_tenant_knows(keys: Path) -> None:
    async with server(api_keys=keys) as service:
        chat = "/v1/chat/completions"
        first = await service.work(chat, {**CHAT, "cache_salt": "x"}, key("acme"))

        assert await service.work(chat, CHAT, key("acme")) == first
        assert await service.work(chat, {**CHAT, "nvext": {"cache_salt": "y"}}, key("acme")) == first
        assert await service.work(chat, {**CHAT, "cache_salt": "x"}, key("acme")) < first / 2


async def test_media_are_fetched_for_each_tenant_and_shared_within_one(keys: Path) -> None:
    backend = FakeBackend(served=(WITH_MEDIA,))
    async with (
        hostile_server() as origin,
        server(backend, api_keys=keys, media_allowed_networks=("127.0.0.0/8",)) as service,
    ):
        origin.plays["/cat.png"] = answer(png())
        url = f"http://127.0.0.1:{origin.port}/cat.png"
        body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
        fetches = []
        for tenant, salt in (("other", ""), ("acme", ""), ("acme", ""), ("acme", "x"), ("other", "")):
            await service.work("/v1/chat/completions", {**body, "cache_salt": salt}, key(tenant))
            fetches.append(origin.connections)

        assert fetches == [1, 2, 2, 3, 3]


async def test_nobody_waits_for_another_tenants_fetch_of_the_same_url(keys: Path) -> None:
    asked = asyncio.Semaphore(0)
    gate = asyncio.Event()

    async def slow(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.release()
        await gate.wait()
        writer.write(answer(png()))
        await writer.drain()

    backend = FakeBackend(served=(WITH_MEDIA,))
    async with (
        hostile_server() as origin,
        server(backend, api_keys=keys, media_allowed_networks=("127.0.0.0/8",)) as service,
    ):
        origin.plays["/cat.png"] = slow
        url = f"http://127.0.0.1:{origin.port}/cat.png"
        content = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
        posts = [
            asyncio.ensure_future(service.client.post("/v1/chat/completions", json=body, headers=key(tenant)))
            for tenant in TENANTS
        ]
        for _ in TENANTS:
            await asyncio.wait_for(asked.acquire(), 120)
        gate.set()

        assert [(await post).status_code for post in posts] == [200, 200]
        assert origin.connections == 2


def test_caches_are_divided_among_the_tenants_of_the_file_and_begin_anew_when_these_change() -> None:
    tenants = Tenants(keys_of("a", "b"))

    def shares(name: str) -> Any:
        return tenants.accounts[name].cache_shares

    before = shares("a")
    assert (before.tenants, shares("b")) == (2, before)
    tenants.use(keys_of("a", "b"))
    assert shares("a") is before, "limits and keys may change without"
    tenants.use(keys_of("a", "c"))
    assert shares("c").tenants == 2
    assert shares("c").edition > before.edition
    assert shares("c").edition > WHOLE.edition


def words(unknown: str) -> Tokenizer:
    """A tokenizer that knows the letters a and b; what it makes of others is the token ``unknown``."""
    vocabulary = {"a": 0, "b": 1, "<one>": 2, "<two>": 3}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def remembered(word_cache: bool) -> bool:
    """Whether a word is answered as it was when it came first, although the tokenizer has changed since."""
    tokenizer = words("<one>")
    encoder = PromptEncoder(tokenizer, word_cache=word_cache, fast=False)
    assert encoder.encode("azzb") == encoder.encode("azzb")
    before = encoder.encode("azzb")
    tokenizer.model.unk_token = "<two>"
    return encoder.encode("azzb") == before


def test_a_tokenizer_of_tenants_remembers_no_words() -> None:
    assert remembered(word_cache=True), "or this test could not tell"
    assert not remembered(word_cache=False)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"isolate_tenants": True}, False),
        ({"api_keys": "keys.json"}, False),
    ],
)
def test_words_are_remembered_where_there_is_one_tenant(settings: dict[str, Any], expected: bool) -> None:
    made = FrontendSettings(**settings)

    assert made.word_cache is expected


def test_fastokens_which_cannot_forget_words_is_not_used_for_tenants() -> None:
    fast = PromptModel.load(TINY_MODEL_PATH).encoder
    isolated = PromptModel.load(TINY_MODEL_PATH, word_cache=False).encoder
    assert fast is not None
    assert isolated is not None

    assert fast.is_fast
    assert not isolated.is_fast
    assert "remembers words" in isolated.slow_because
    assert isolated.encode(LONG) == fast.encode(LONG)


# -- isolate_tenants ---------------------------------------------------------------------------------------------------


def salts(requests: list[dict[str, Any]], **settings: Any) -> list[str]:
    """The salts of requests, each a body with ``headers``, and that nothing of them was kept."""

    async def run() -> list[str]:
        async with server(isolate_tenants=True, **settings) as service:
            for request in requests:
                headers = request.pop("headers", {})
                first = await service.work("/v1/chat/completions", {**CHAT, **request}, headers)
                assert await service.work("/v1/chat/completions", {**CHAT, **request}, headers) == first
            assert service._encoder.cache_used_bytes == 0
            made = service.backend.requests
        assert all(request.cache_shares is None for request in made)
        return [request.cache_salt for request in made]

    return asyncio.run(run())


def test_isolated_requests_that_say_nothing_are_alone() -> None:
    found = salts([{}, {}])

    assert len(set(found)) == 4
    assert all(len(salt) == 32 for salt in found)


def test_isolated_requests_with_a_salt_share_with_those_that_know_it() -> None:
    first, again, other, _ = salts([{"cache_salt": "a secret"}, {"cache_salt": "another"}])

    assert first == again != other


def test_all_choices_of_an_isolated_request_share_its_prompt() -> None:
    first, second, *_ = salts([{"n": 2}])

    assert first == second


def test_a_header_names_the_tenant_and_nobody_can_write_anothers_salt() -> None:
    acme, _, acme_x, _, other, _, bypassing, _ = salts(
        [
            {"headers": {"x-tenant-id": "acme"}},
            {"headers": {"x-tenant-id": "acme"}, "cache_salt": "x"},
            {"headers": {"x-tenant-id": "other"}, "cache_salt": "x"},
            {"cache_salt": salts([{"headers": {"x-tenant-id": "acme"}}], tenant_header="X-Tenant-Id")[0]},
        ],
        tenant_header="X-Tenant-Id",
    )

    assert len({acme, acme_x, other, bypassing}) == 4


@pytest.mark.parametrize("settings", [{"tenant_header": "x-tenant-id"}, {"tenant_header": "two words"}])
def test_a_tenant_header_without_use_is_refused(settings: dict[str, Any], keys: Path) -> None:
    with pytest.raises(ValidationError):
        FrontendSettings(**settings)
    with pytest.raises(ValidationError):
        FrontendSettings(**settings, isolate_tenants=True, api_keys=keys)


@pytest.mark.parametrize("isolate", [False, True])
async def test_answers_say_where_they_were_made_only_where_tenants_may_know(isolate: bool, keys: Path) -> None:
    async with server(api_keys=keys, isolate_tenants=isolate) as service:
        for stream in (False, True):
            body = {"model": "tiny", "stream": stream, **CHAT}
            response = await service.client.post("/v1/chat/completions", json=body, headers=key("acme"))

            assert ("x-poolgrid-worker" in response.headers) is not isolate
            assert ("x-poolgrid-decision" in response.headers) is not isolate
            assert response.headers["x-request-id"]


@pytest.mark.parametrize("isolate", [False, True])
async def test_refusals_say_what_others_use_only_where_tenants_may_know(isolate: bool, keys: Path) -> None:
    words = "17 requests with 5000 prompt tokens are waiting"
    backend = FakeBackend(refusal=Refused(429, "busy", words, 3.0))
    async with server(backend, api_keys=keys, isolate_tenants=isolate) as service:
        body = {"model": "tiny", **CHAT}
        response = await service.client.post("/v1/chat/completions", json=body, headers=key("acme"))

        assert response.status_code == 429
        assert response.headers["retry-after"] == "3"
        assert response.headers["x-poolgrid-refusal"] == response.json()["error"]["code"] == "busy"
        assert (words in response.json()["error"]["message"]) is not isolate


async def test_metrics_of_isolated_tenants_need_an_operators_key(keys: Path) -> None:
    async with server(api_keys=keys) as service:
        assert (await service.client.get("/metrics")).status_code == 200
    async with server(api_keys=keys, isolate_tenants=True) as service:
        assert (await service.client.get("/metrics")).status_code == 401
        assert (await service.client.get("/metrics", headers=key("acme"))).status_code == 403
