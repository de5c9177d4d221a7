"""Videos, which take minutes: jobs that continue after their request is answered, and are queried by id.

Rules
    1. A job is queued, in progress, then completed or failed; its description among the results says so, and how much
       of it is done. The process that runs it touches the description every second.
    2. A description that is not touched any more was a process's that has ended: its job has failed.
    3. A job that is deleted is cancelled on its worker within a second, whichever HTTP process was asked.
    4. A tenant's jobs that run count towards its ``concurrent_requests``; at most ``RUNNING_MAX`` run in a process.
    5. What is refused within ``REFUSAL_WAIT_S`` is the answer to the request, and there is no job.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from poolgrid.kernel.requests.inference import InferenceBackend, InferenceRequest, Refused
from poolgrid.plugins.tasks.output import TaskOutput
from poolgrid.plugins.tasks.result_files import TTL_S, ResultFiles, new_id, not_found
from poolgrid.plugins.tasks.schema import VideoBody
from poolgrid.server.frontend.access.owner import Owner
from poolgrid.server.frontend.access.tenants import CONCURRENCY_RETRY_S, Caller
from poolgrid.server.frontend.errors import RequestError, refused
from poolgrid.server.frontend.stream_head import REFUSAL_WAIT_S
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import cancel_all, detached

log: Final = logging.getLogger(__name__)

RUNNING_MAX: Final = 4096
"""Jobs of one process that are queued or run: as many as wait in a router's queue by default."""

TOUCH_S: Final = 1.0

LOST_S: Final = 15.0
"""After this time without a touch a job is lost: fifteen times as long as a busy process needs."""

ENDED: Final = ("completed", "failed")


@dataclass(frozen=True, slots=True)
class NewVideo:
    """A video that is asked for."""

    body: VideoBody
    model: str
    owner: Owner
    caller: Caller | None


class _Job:
    """A job that this process runs."""

    def __init__(self, video: NewVideo, created_s: int) -> None:
        body = video.body
        self.owner = video.owner
        self.id = new_id("video")
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Resolved when it has a worker; fails when it is refused."""
        self.task: asyncio.Task[None] | None = None
        self.described: dict[str, Any] = {
            "id": self.id,
            "object": "video",
            "created_at": created_s,
            "completed_at": None,
            "expires_at": None,
            "status": "queued",
            "progress": 0,
            "model": video.model,
            "prompt": body.prompt,
            "seconds": "" if body.seconds is None else f"{float(body.seconds):g}",
            "size": f"{body.width}x{body.height}" if body.width else body.size or "auto",
            "error": None,
        }

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.described)


class VideoJobs:
    """The jobs of one process, and the results of all."""

    def __init__(self, backend: InferenceBackend, files: ResultFiles, clock: Clock) -> None:
        self.files = files
        self._backend = backend
        self._clock = clock
        self._running: dict[str, _Job] = {}
        self._toucher: asyncio.Task[None] | None = None

    async def begin(self, video: NewVideo, request: InferenceRequest) -> bytes:
        """Begin a job and return its description; raises ``Refused`` and ``RequestError``, and then there is none."""
        self._check_room(video)
        job = _Job(video, self._clock.wall_ms() // 1000)
        with _unavailable(job):
            await asyncio.to_thread(self.files.keep, job.owner, job.id, job.encoded())
        self._running[job.id] = job
        job.task = detached(self._run(job, TaskOutput(request)), f"video {job.id}")
        if self._toucher is None or self._toucher.done():
            self._toucher = detached(self._touch(), "touches of videos")
        try:
            await asyncio.wait((job.started,), timeout=REFUSAL_WAIT_S)
            if job.started.done():
                job.started.result()
            else:
                job.started.set_result(None)
        except BaseException:
            job.task.cancel()
            await asyncio.to_thread(self.files.forget, job.owner, job.id)
            raise
        return job.encoded()

    async def describe(self, owner: Owner, video_id: str) -> dict[str, Any]:
        """Return what is known of a video; raises ``RequestError`` 404."""
        found = await asyncio.to_thread(self.files.describe, owner, video_id)
        if found is None:
            raise not_found("video", video_id)
        described: dict[str, Any] = msgspec.json.decode(found[0])
        if described.get("status") not in (None, *ENDED) and found[1] > LOST_S:
            lost = {"code": "router_lost", "message": "the router that ran it has ended; send the request again"}
            described |= {"status": "failed", "error": lost}
        return described

    async def forget(self, owner: Owner, video_id: str) -> bool:
        """Forget a video, and cancel it where it is still being made."""
        job = self._running.get(video_id)
        if job is not None and job.owner.name == owner.name and job.task is not None:
            job.task.cancel()
        return await asyncio.to_thread(self.files.forget, owner, video_id)

    async def close(self) -> None:
        tasks = [job.task for job in self._running.values() if job.task is not None]
        await cancel_all([*tasks, *([] if self._toucher is None else [self._toucher])])
        self.files.close()

    def _check_room(self, video: NewVideo) -> None:
        if len(self._running) >= RUNNING_MAX:
            raise Refused(429, "busy", f"{len(self._running)} videos are being made, allowed are {RUNNING_MAX}", 60.0)
        if video.caller is None:
            return
        limit = video.caller.account.tenant.concurrent_requests
        own = sum(job.owner.name == video.owner.name for job in self._running.values())
        if limit is not None and own >= limit:
            message = (
                f"tenant {video.owner.name} has {own} videos in the making, allowed are {limit} requests at a time"
            )
            raise Refused(429, "concurrency_limited", message, CONCURRENCY_RETRY_S)

    async def _keep_again(self, job: _Job, content: bytes | None = None) -> bool:
        with _unavailable(job):
            return await asyncio.to_thread(self.files.keep_again, job.owner, job.id, job.encoded(), content)

    async def _run(self, job: _Job, output: TaskOutput) -> None:
        try:
            output.stream = await self._backend.submit(output.request)
            if not job.started.done():
                job.started.set_result(None)
            job.described["status"] = "in_progress"
            while output.result is None:
                if not await self._keep_again(job):
                    return
                await output.next()
                job.described["progress"] = min(99, output.progress)
            result = output.result
            now_s = self._clock.wall_ms() // 1000
            ended = {"status": "completed", "progress": 100, "completed_at": now_s, "expires_at": now_s + int(TTL_S)}
            job.described |= {**ended, "media_type": result.media_type}
            await self._keep_again(job, result.items[0])
        except (RequestError, Refused) as error:
            await self._fail(job, error)
        except Exception as error:
            log.exception("making %s failed: this is a bug", job.id)
            await self._fail(job, RequestError(500, "internal_error", f"making the video failed: {error!r}"))
        finally:
            del self._running[job.id]
            if output.stream is not None and output.finish_reason is None:
                output.stream.cancel()

    async def _fail(self, job: _Job, error: RequestError | Refused) -> None:
        if not job.started.done():
            job.started.set_exception(error)
            return
        shown = refused(error) if isinstance(error, Refused) else error
        job.described |= {"status": "failed", "error": {"code": shown.code, "message": shown.message}}
        with suppress(RequestError):
            await self._keep_again(job)

    async def _touch(self) -> None:
        """Show that the jobs of this process run, and cancel those that no client wants any more."""
        while self._running:
            await asyncio.sleep(TOUCH_S)
            for job in list(self._running.values()):
                if not await asyncio.to_thread(self.files.touch, job.owner, job.id) and job.task is not None:
                    job.task.cancel()


@contextmanager
def _unavailable(job: _Job) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RequestError(503, "results_unavailable", f"keeping video {job.id}: {error}") from None
