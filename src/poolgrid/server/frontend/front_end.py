"""The parts of a front end, which its endpoints share."""

from __future__ import annotations

from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Request

from poolgrid.kernel.requests.inference import InferenceBackend
from poolgrid.server.frontend.access.gate import GateKeys, caller_of
from poolgrid.server.frontend.access.owner import Owner, owner_of
from poolgrid.server.frontend.access.tenants import CacheDomains, Caller
from poolgrid.server.frontend.guide_check import GuideCheck
from poolgrid.server.frontend.media.loader import MediaLoader
from poolgrid.server.frontend.metrics import FrontendMetrics
from poolgrid.server.frontend.preparation import Preparation
from poolgrid.server.frontend.prepared_request import PreparedRequest
from poolgrid.server.frontend.prompts import tokenize
from poolgrid.server.frontend.request_body import BodyReader, RequestIds
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.frontend.tokenization import TokenizationPool
from poolgrid.server.frontend.traffic import Traffic
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.lifecycle import GroupPlace
from poolgrid.server.process.tracing.tracing import Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """One front end."""

    app: FastAPI
    opened: AsyncExitStack
    """Ends what endpoints open, in reverse order."""
    settings: FrontendSettings
    backend: InferenceBackend
    preparation: Preparation
    tokenization: TokenizationPool
    bodies: BodyReader
    request_ids: RequestIds
    metrics: FrontendMetrics
    clock: Clock
    media: MediaLoader
    guides: GuideCheck
    domains: CacheDomains
    traffic: Traffic
    tracing: Tracing | None
    keys: GateKeys | None
    place: GroupPlace | None
    """This process among those that share the port."""
    data_dir: Path | None

    def directory(self, name: Path) -> Path | None:
        """Return where something is kept that the processes of a router share; ``None`` = a process has its own."""
        directory = self.data_dir
        if directory is None and self.place is not None:
            directory = self.place.directory
        return None if directory is None else directory / name

    def owner_of(self, caller: Caller | None) -> Owner | None:
        """Return whose the things of a caller are; ``None`` where nothing is kept for it."""
        return owner_of(caller, self.settings.isolate_tenants)

    async def count_prompt(self, request: Request, raw: bytes, job: PreparedRequest) -> int:
        """Return the tokens of a prompt, its media included; ``raw`` is the body that it is of."""
        caller = caller_of(request.scope)
        if caller is not None:
            caller.check_model(job.body.model)
            if job.media:
                caller.check_feature("media")
        self.domains.claim(job, caller, request.headers.raw)
        with closing(self.media.lease()) as lease:
            job.items = await self.media.load(job.media, lease, job.domain, job.served.media.item_bytes_max)
            (prompt,) = await self.tokenization.run(len(raw), partial(tokenize, job))
        return prompt.isl
