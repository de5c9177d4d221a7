"""Client of an engine server: its facts and probes."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec

from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.secret_texts import blotted, without_received_bytes
from poolgrid.plugins.engine_check.core.evidence import CheckProbe, ServerStatement
from poolgrid.server.process.clock import Clock
from poolgrid.server.workers.engines.registry import server_kinds
from poolgrid.server.workers.engines.server.core.server_facts import ServerFacts
from poolgrid.server.workers.engines.server.kinds import learn
from poolgrid.server.workers.engines.server.server_client import ServerClient, ServerError

ANSWER_BYTES_SHOWN = 300
"""How much of a refusal stands in a finding."""

RANK_HEADER = "x-data-parallel-rank"
"""The global rank that a request is for."""


class ProbeAnswer(msgspec.Struct, frozen=True):
    """What came back of a probe."""

    output: tuple[int, ...] = ()
    cached_tokens: int | None = None
    failure: str = ""
    prompt_tokens: int | None = None


class EngineServer:
    """One engine server over HTTP."""

    def __init__(self, client: httpx.AsyncClient, url: str, clock: Clock, api_key: str = "") -> None:
        """Raises ``ValueError`` for a URL or a key that is none."""
        self._client = client
        self._asked = ServerClient(url, clock, api_key)
        self._url = self._asked.target.url
        self._secrets = (api_key.encode(),)

    def _shown(self, answer: bytes) -> str:
        return blotted(answer, self._secrets)[:ANSWER_BYTES_SHOWN].decode(errors="replace")

    def close(self) -> None:
        self._asked.close()

    # What it says of itself

    async def learn(self, kind: str, model: str) -> ServerFacts:
        """Return the server's facts; raises ``ServerError`` without an answer and for a server that cannot be probed,
        ``ValueError`` without such a model."""
        kinds = server_kinds()
        try:
            facts = await learn(self._asked, kinds, kind if kind in kinds else "", model)
        except DecodeError as error:
            raise ServerError(f"asking {self._url}: {error}; is --url right?") from error
        if not kinds[facts.kind].owned_by:
            # It reports nothing of its cache: the settings have the rest.
            return ServerFacts(facts.kind, model=facts.model, max_sequence_length=facts.max_sequence_length)
        if facts.role not in ("", "aggregated"):
            raise ServerError(
                f"{kinds[facts.kind].title} at {self._url} was started for {facts.role}: it takes no request without "
                "its partner, so no probe can be sent. Check the same server without that role; of this one, /health "
                "of its worker reports the events"
            )
        return facts

    async def metrics_page(self) -> str:
        try:
            return (await self._asked.ask("/metrics")).decode(errors="replace")
        except ServerError:
            return ""

    # Probes

    async def probe(self, probe: CheckProbe, told: ServerStatement) -> ProbeAnswer:
        """Send a probe; a refusal is an answer too."""
        path, body = _generate(probe) if told.kind == "sglang" else _completion(probe, told.model)
        headers = {} if probe.rank is None else {RANK_HEADER: str(probe.rank)}
        try:
            answer = await self._client.post(f"{self._url}{path}", json=body, headers=headers)
        except httpx.HTTPError as error:
            return ProbeAnswer(failure=f"asking {path}: {without_received_bytes(error)}")
        if answer.status_code != 200:
            return ProbeAnswer(failure=f"{path} answered {answer.status_code}: {self._shown(answer.content)}")
        try:
            return _answer(msgspec.json.decode(answer.content))
        except (msgspec.MsgspecError, KeyError, TypeError, IndexError, ValueError) as error:
            return ProbeAnswer(failure=f"{path} answered what cannot be read ({error}): {self._shown(answer.content)}")


def _completion(probe: CheckProbe, model: str) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "model": probe.lora or model,
        "prompt": list(probe.tokens),
        "max_tokens": probe.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if probe.salt:
        body["cache_salt"] = probe.salt
    return "/v1/completions", body


def _generate(probe: CheckProbe) -> tuple[str, dict[str, Any]]:
    sampling = {"max_new_tokens": probe.max_tokens, "temperature": 0, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": list(probe.tokens), "sampling_params": sampling}
    if probe.salt:
        body["extra_key"] = body["cache_salt"] = probe.salt  # versions before 0.5.23 know the first alone
    if probe.lora:
        body["lora_path"] = probe.lora
    if probe.rank is not None:
        body["routed_dp_rank"] = probe.rank
    return "/generate", body


def _answer(body: dict[str, Any]) -> ProbeAnswer:
    if "meta_info" in body:
        said = body["meta_info"]
        return ProbeAnswer(
            tuple(body.get("output_ids") or ()),
            _count(said.get("cached_tokens")),
            prompt_tokens=_count(said.get("prompt_tokens")),
        )
    usage = body.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    output = body["choices"][0].get("token_ids") or ()
    return ProbeAnswer(
        tuple(map(int, output)),
        _count(details.get("cached_tokens")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
    )


def _count(value: object) -> int | None:
    return value if type(value) is int else None
