"""Prompts that clients have kept, within their tenants' budgets, over real processes and with the official clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from poolgrid.server.frontend.access import key_file
from poolgrid.server.frontend.access.key_file import Key, KeyDocument, Tenant
from tests.e2e.processes import Process, assert_decisions_replay, running_pool
from tests.installed import needs

pytestmark = pytest.mark.e2e

RICH, POOR = "pg-rich", "pg-poor"
BUDGET_TOKENS = 2000
BLOCKS = 64
"""Of 32 tokens: two of the prompts below, and one that floods."""
TEXT = "The next train stops at the old harbour, and then at the new one. " * 40
FLOOD = "Another client asks for other words, which have nothing to do with trains at all. " * 30
CONTROL: Any = {"type": "ephemeral"}


def tenant(key: str, **rules: Any) -> Tenant:
    return Tenant(keys=(Key(key_file.hash_key(key)),), **rules)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    directory = tmp_path_factory.mktemp("kept")
    keys = directory / "keys.json"
    tenants = {"rich": tenant(RICH, kept_tokens_max=BUDGET_TOKENS), "poor": tenant(POOR), "ops": tenant("pg-ops")}
    key_file.write(keys, KeyDocument(1, "5" * 64, tenants))
    options = ("--part-option", f"worker.total-kv-blocks={BLOCKS}", "--api-keys", str(keys))
    data = directory / "data"
    with running_pool(*options, "--data-dir", str(data), workers=1) as up:
        yield up
    assert assert_decisions_replay(data) > 0


def flood(url: str) -> None:
    """Fill the cache with other prompts, several times over."""
    for number in range(4):
        body = {"model": "tiny", "messages": [{"role": "user", "content": f"{number} {FLOOD}"}], "max_tokens": 1}
        headers = {"authorization": f"Bearer {POOR}"}
        httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60).raise_for_status()


@needs("/v1/messages")
def test_a_prompt_with_cache_control_outlasts_a_flood_within_its_tenants_budget(pool: Process) -> None:
    def ask(key: str, name: str) -> Any:
        with anthropic.Anthropic(base_url=pool.url, api_key=key, max_retries=0) as client:
            content: Any = [{"type": "text", "text": f"{name}: {TEXT}", "cache_control": CONTROL}]
            messages: Any = [{"role": "user", "content": content}]
            return client.messages.create(model="tiny", max_tokens=2, messages=messages).usage

    poor, rich = ask(POOR, "poor"), ask(RICH, "rich")
    assert poor.cache_creation_input_tokens == 0, "no operator gave it a budget"
    assert rich.cache_creation.ephemeral_5m_input_tokens == rich.cache_creation_input_tokens > 500
    assert rich.input_tokens == 1
    flood(pool.url)

    poor, again = ask(POOR, "poor"), ask(RICH, "rich")
    assert poor.cache_read_input_tokens < 100
    assert again.cache_read_input_tokens >= rich.cache_creation_input_tokens - 32
    assert again.cache_read_input_tokens + again.cache_creation_input_tokens + again.input_tokens == (
        rich.cache_creation_input_tokens + rich.input_tokens
    )


@needs("/v1/responses")
def test_a_budget_is_of_all_prompts_that_are_kept_at_a_time(pool: Process) -> None:
    with openai.OpenAI(base_url=f"{pool.url}/v1", api_key=RICH, max_retries=0) as client:

        def ask(number: int) -> Any:
            response = client.responses.create(
                model="tiny",
                input=f"{number} {TEXT}",
                max_output_tokens=16,
                prompt_cache_retention="24h",
                prompt_cache_key=f"session-{number}",
            )
            assert response.usage is not None
            return response.usage.input_tokens_details

        kept = [ask(number).cache_write_tokens for number in range(4)]
    assert kept[-1] == 0
    assert 0 < sum(kept) <= BUDGET_TOKENS
