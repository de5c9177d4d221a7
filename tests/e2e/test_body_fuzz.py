"""Whatever body arrives, a global router answers it or says what is wrong with it: never a 500, never an end.

``POOLGRID_FUZZ_BODIES=10000`` runs the long form; ``POOLGRID_FUZZ_SEED`` varies it.
"""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.fleet import POOL_CONFIGS, running_fleet, small_copy

pytestmark = pytest.mark.e2e

BODIES = int(os.environ.get("POOLGRID_FUZZ_BODIES", "200"))
SEED = int(os.environ.get("POOLGRID_FUZZ_SEED", "1"))
DOCUMENT = POOL_CONFIGS / "agents_with_priorities.json"

SEEDS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "/v1/completions",
        {
            "model": "tiny",
            "prompt": [5, 6, 7],
            "max_tokens": 2,
            "n": 1,
            "stop": ["x"],
            "temperature": 0.5,
            "top_p": 1,
            "seed": 3,
            "logprobs": 1,
            "logit_bias": {"7": 1},
            "user": "u",
            "cache_salt": "s",
            "stop_token_ids": [9],
            "nvext": {"router": {"ttft_target": 300, "itl_target": 20}, "agent_hints": {"priority": 1, "osl": 4}},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_completion_tokens": 2,
            "logprobs": True,
            "top_logprobs": 1,
            "stream": False,
            "presence_penalty": 0,
            "nvext": {"router": {"ttft_target": 0}, "agent_hints": {"priority": -1}},
        },
    ),
)

JUNK: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1.5,
    -0.0,
    2**70,
    -(2**70),
    "",
    "x",
    "NaN",
    "\u0000",
    "\ud83c",
    [],
    {},
    [None],
    [[]],
    {"a": 1},
    [1, "x"],
    float("nan"),
    float("inf"),
    float("-inf"),
    "9" * 400,
    [{"role": "user"}],
    {"ttft_target": float("nan")},
)


def mutate(randomness: random.Random, body: Any) -> Any:
    """Change one place of a body: another value, another type, a key less, a key more."""
    body = copy.deepcopy(body)
    holder, key = _place(randomness, body)
    action = randomness.randrange(4)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        holder[randomness.choice(("extra", "max_tokenz", key + "_", ""))] = randomness.choice(JUNK)
    else:
        holder[key] = randomness.choice(JUNK)
    return body


def _place(randomness: random.Random, body: dict[str, Any]) -> tuple[Any, Any]:
    places: list[tuple[Any, Any]] = []
    pending: list[Any] = [body]
    while pending:
        holder = pending.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            places.append((holder, key))
            if isinstance(holder[key], dict | list):
                pending.append(holder[key])
    return randomness.choice(places) if places else (body, "model")


def encode(randomness: random.Random, body: Any) -> bytes:
    """Return the body as bytes, now and then cut short or with a byte changed."""
    data = bytearray(json.dumps(body).encode("utf-8", "surrogatepass"))
    fault = randomness.randrange(10)
    if fault == 0:
        del data[randomness.randrange(len(data) + 1) :]
    elif fault == 1 and data:
        data[randomness.randrange(len(data))] = randomness.randrange(256)
    return bytes(data)


def test_no_mutated_body_is_a_server_error_and_every_refusal_says_what_is_wrong(tmp_path: Path) -> None:
    # A request without a limit of its own runs to the end of a sequence.
    document = small_copy(DOCUMENT, tmp_path, max_sequence_length=128)
    randomness = random.Random(SEED)
    answered = refused = 0
    with running_fleet(document, speedup=1000) as up, httpx.Client(base_url=up.url, timeout=60) as client:
        for number in range(BODIES):
            path, body = randomness.choice(SEEDS)
            for _ in range(randomness.choice((1, 1, 2, 3))):
                body = mutate(randomness, body)
            if not isinstance(body, dict):
                continue
            data = encode(randomness, body)
            answer = client.post(path, content=data, headers={"content-type": "application/json"})
            where = f"body {number} of seed {SEED}: {data!r} -> {answer.status_code} {answer.text[:300]}"
            assert answer.status_code < 500, where
            if answer.status_code == 200:
                answered += 1
                continue
            refused += 1
            error = answer.json()["error"]
            assert error["message"], where
            assert error["code"], where
            assert error["param"] is not None or error["code"] in ("invalid_json", "invalid_body"), where
        assert client.get("/live").status_code == 200
    assert answered > BODIES // 20
    assert refused > BODIES // 4
