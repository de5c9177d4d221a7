"""What the clients of a soak send, and when each of them leaves: drawn from a seeded generator.

Every request says what a right answer looks like, so that a wrong one is found and not only counted.
"""

from __future__ import annotations

import gzip
import random
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Leaving = Literal["never", "close", "within request", "before answer", "within answer", "at end", "half-close", "slow"]
"""When and how a client goes: ``close`` after a whole answer; ``half-close`` ends its own side and reads on; ``slow``
stops reading for a while, so that the server has to hold back."""

ENDINGS: dict[Leaving, int] = {
    "never": 52,
    "close": 10,
    "within request": 5,
    "before answer": 9,
    "within answer": 16,
    "at end": 4,
    "half-close": 1,
    "slow": 3,
}
"""Weights. More than a quarter of all requests end with a client that is gone."""

WORDS = [
    f"{first}{second}" for first in ("ka", "lo", "mi", "ne", "ru", "so", "te", "vu") for second in "abdegiklmnoprstu"
]
SYSTEM_PROMPTS = 24
"""Prefixes that conversations share; some are evicted while they are in use."""

SYSTEM_WORDS = 120
CHUNK_BYTES = 200
"""Of an event stream, for one token."""

LONG_SHARE = 0.03
"""Requests whose prompt is tokenized in a thread."""

SESSION_SHARE = 0.3
"""Requests that name a session."""

SESSIONS = 50_000
"""Names of sessions, several times as many as a router knows."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a place",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]


@dataclass(frozen=True, slots=True)
class Planned:
    """One request, what its answer must be, and how its client behaves."""

    kind: str
    data: bytes
    """Everything that goes over the wire."""
    status: int
    """Of a right answer."""
    end: bytes
    """Must be in the last bytes of a right answer; empty: anything will do."""
    leaving: Leaving
    reset: bool
    """Leave with a reset connection and not with an orderly end."""
    patience: float
    """0 to 1: how much of the request, or of the longest wait, the client stays for."""
    leave_at: int
    """Bytes of the answer after which a client leaves within it."""
    streams: bool
    """Counts as one of the concurrent streams (the malformed ones do not)."""
    closes: bool = False
    """The server closes the connection after its answer."""


class Plan:
    """The requests of one client, the same for the same seed."""

    def __init__(self, seed: int, client: int, model: str, longest_answer: int) -> None:
        self._random = random.Random(f"{seed}/{client}")
        self._model = model
        self._longest_answer = longest_answer
        self._kinds = {
            self._completion: 22,
            self._token_completion: 20,
            self._chat: 28,
            self._stopped_chat: 8,
            self._tool_chat: 6,
            self._choices: 3,
            self._response: 8,
            self._malformed: 5,
        }

    def next(self) -> Planned:
        """Draw the next request."""
        (make,) = self._random.choices(list(self._kinds), list(self._kinds.values()))
        planned: Planned = make()
        return planned

    def _text(self, least: int = 8, most: int = 200) -> str:
        words = self._random.randint(least, most)
        if self._random.random() < LONG_SHARE:
            words = self._random.randint(2000, 6000)
        return " ".join(self._random.choices(WORDS, k=words))

    def _system(self) -> str:
        words = random.Random(f"system/{self._random.randrange(SYSTEM_PROMPTS)}")
        return " ".join(words.choices(WORDS, k=SYSTEM_WORDS))

    def _osl(self) -> int:
        return self._random.randint(1, self._longest_answer)

    def _completion(self) -> Planned:
        return self._generate("completion", "/v1/completions", {"prompt": self._text()})

    def _token_completion(self) -> Planned:
        ids = random.Random(f"ids/{self._random.randrange(SYSTEM_PROMPTS)}").choices(range(300, 4000), k=96)
        ids += self._random.choices(range(300, 4000), k=self._random.randint(1, 400))
        return self._generate("token completion", "/v1/completions", {"prompt": ids})

    def _messages(self) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self._system()}]
        for _ in range(self._random.randint(0, 3)):
            messages.append({"role": "user", "content": self._text(4, 40)})
            messages.append({"role": "assistant", "content": self._text(4, 40)})
        return [*messages, {"role": "user", "content": self._text()}]

    def _chat(self) -> Planned:
        return self._generate("chat", "/v1/chat/completions", {"messages": self._messages()})

    def _stopped_chat(self) -> Planned:
        # Single letters turn up soon in the simulated engine's text, and often across two tokens' border.
        stop = self._random.sample(["e", "st", "zz", "the", "\u00e9"], 2)
        body = {"messages": self._messages(), "stop": stop}
        return self._generate("chat with stop strings", "/v1/chat/completions", body, counted=False)

    def _tool_chat(self) -> Planned:
        body = {"messages": self._messages(), "tools": TOOLS, "tool_choice": "auto"}
        return self._generate("chat with tools", "/v1/chat/completions", body)

    def _choices(self) -> Planned:
        body = {"prompt": self._text(), "n": self._random.randint(2, 4), "temperature": 1.0}
        return self._generate("several choices", "/v1/completions", body, counted=False)

    def _response(self) -> Planned:
        stream = self._random.random() < 0.7
        body = {
            "model": self._model,
            "input": self._text(),
            "instructions": self._system(),
            "max_output_tokens": max(16, self._osl()),
            "stream": stream,
            "store": False,
        }
        # An answer that ran into its bound is `incomplete`, one that found its end is `completed`.
        return self._planned("response", "/v1/responses", body, b'"response"', True)

    def _generate(self, kind: str, path: str, fields: dict[str, Any], *, counted: bool = True) -> Planned:
        stream = self._random.random() < 0.85
        osl = self._osl()
        body: dict[str, Any] = {"model": self._model, "max_tokens": osl, "ignore_eos": True, **fields}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        end = b'"completion_tokens":%d' % osl if counted else b"data: [DONE]" if stream else b'"usage"'
        return self._planned(kind if stream else f"{kind}, whole", path, body, end, True)

    def _planned(self, kind: str, path: str, body: dict[str, Any], end: bytes, streams: bool) -> Planned:
        content = msgspec.json.encode(body)
        headers = b""
        if self._random.random() < 0.05:
            content = gzip.compress(content, 1, mtime=0)
            headers = b"content-encoding: gzip\r\n"
        if self._random.random() < SESSION_SHARE:
            headers += b"x-session-id: soak-%d\r\n" % self._random.randrange(SESSIONS)
        patience = self._random.random()
        leave_at = int(patience**2 * CHUNK_BYTES * self._longest_answer / 2)
        (leaving,) = self._random.choices(list(ENDINGS), list(ENDINGS.values()))
        return Planned(
            kind,
            post(path, content, headers),
            200,
            end,
            leaving,
            self._random.random() < 0.5,
            patience,
            leave_at,
            streams,
        )

    def _malformed(self) -> Planned:
        wrong = self._random.choice(list(MALFORMED))
        data, status, closes = MALFORMED[wrong]
        return Planned(f"malformed: {wrong}", data, status, b"", "never", False, 0.0, 0, False, closes)


def post(path: str, content: bytes, headers: bytes = b"") -> bytes:
    """Return the bytes of a POST of JSON."""
    return (
        b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n"
        % (path.encode(), headers, len(content))
    ) + content


MALFORMED: dict[str, tuple[bytes, int, bool]] = {
    "no JSON": (post("/v1/completions", b'{"model": "tiny", "prompt": '), 400, False),
    "no UTF-8": (post("/v1/chat/completions", b'{"model": "tiny", "messages": "\xff\xfe"}'), 400, False),
    "wrong type": (post("/v1/completions", b'{"model": "tiny", "prompt": "a", "max_tokens": "many"}'), 400, False),
    "no messages": (post("/v1/chat/completions", b'{"model": "tiny", "messages": []}'), 400, False),
    "unknown model": (post("/v1/completions", b'{"model": "nobody", "prompt": "a"}'), 404, False),
    "token out of range": (post("/v1/completions", b'{"model": "tiny", "prompt": [1, 999999]}'), 400, False),
    "broken gzip": (post("/v1/completions", b"\x1f\x8b\x08nonsense", b"content-encoding: gzip\r\n"), 400, False),
    "unknown path": (post("/v1/nothing", b"{}"), 404, False),
    "wrong method": (b"GET /v1/completions HTTP/1.1\r\nhost: localhost\r\n\r\n", 405, False),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, True),
}
"""Name of the fault → bytes, status of the answer, whether the server closes the connection after it."""
