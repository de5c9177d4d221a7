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
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import FastAPI, Query, Request, Response
from starlette.responses import FileResponse

from poolgrid.frontend.access.tenants import CONCURRENCY_RETRY_S, Caller
from poolgrid.frontend.errors import RequestError, quoted, refused
from poolgrid.frontend.responses_api.kept import PAGE_MAX, page_of
from poolgrid.frontend.responses_api.store import Owner
from poolgrid.frontend.stream_head import REFUSAL_WAIT_S
from poolgrid.frontend.tasks.output import TaskOutput
from poolgrid.frontend.tasks.result_files import TTL_S, ResultFiles
from poolgrid.frontend.tasks.schema import VideoBody
from poolgrid.inference.inference_request import InferenceRequest
from poolgrid.inference.ports import InferenceBackend, Refused
from poolgrid.process.clock import Clock
from poolgrid.process.tasks import cancel_all, detached

log: Final = logging.getLogger(__name__)

RUNNING_MAX: Final = 4096
"""Jobs of one process that are queued or run: as many as wait in a router's queue by default."""

TOUCH_S: Final = 1.0

LOST_S: Final = 15.0
"""After this time without a touch a job is lost: fifteen times as long as a busy process needs."""

ENDED: Final = ("completed", "failed")


def new_id(kind: str) -> str:
    """Return an id of a result that no client can guess."""
    return f"{kind}_{secrets.token_hex(16)}"


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
        """Cancel every job."""
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
    """Name what could not be kept, and why."""
    try:
        yield
    except OSError as error:
        raise RequestError(503, "results_unavailable", f"keeping video {job.id}: {error}") from None


def not_found(kind: str, result_id: str) -> RequestError:
    """Return the 404 for a result that is not kept."""
    return RequestError(
        404,
        "not_found",
        f"no {kind} {quoted(result_id)} is kept here: it never was, it was deleted, or there was no more room",
        param=f"{kind}_id",
    )


VIDEOS_PATH: Final = "/v1/videos"
VIDEO_PATH: Final = "/v1/videos/{video_id}"
VIDEO_CONTENT_PATH: Final = "/v1/videos/{video_id}/content"
IMAGE_CONTENT_PATH: Final = "/v1/images/{image_id}/content"


def add_result_endpoints(app: FastAPI, jobs: VideoJobs, owner_of: Callable[[Request], Owner | None]) -> None:
    """Add what is asked of results to an application."""

    def owner(request: Request, kind: str, result_id: str) -> Owner:
        found = owner_of(request)
        if found is None:
            raise not_found(kind, result_id)
        return found

    async def content(owner: Owner, kind: str, result_id: str, described: dict[str, Any]) -> Response:
        path = await asyncio.to_thread(jobs.files.content, owner, result_id)
        if path is None:
            raise not_found(kind, result_id)
        return FileResponse(path, media_type=described.get("media_type") or "application/octet-stream")

    @app.get(VIDEOS_PATH, tags=["videos"])
    async def list_videos(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """List the videos that are kept, and those that are being made."""
        found = owner_of(request)
        rows = [] if found is None else await asyncio.to_thread(partial(jobs.files.of, found, "video"))
        items = [item for item in map(msgspec.json.decode, rows) if "status" in item]
        return page_of(sorted(items, key=lambda item: item["created_at"]), limit, order, after)

    @app.get(VIDEO_PATH, tags=["videos"])
    async def get_video(request: Request, video_id: str) -> dict[str, Any]:
        """Tell how far a video is."""
        return await jobs.describe(owner(request, "video", video_id), video_id)

    @app.get(VIDEO_CONTENT_PATH, tags=["videos"])
    async def get_video_content(request: Request, video_id: str, variant: Literal["video"] = "video") -> Response:
        """Return a video that is completed."""
        whose = owner(request, "video", video_id)
        described = await jobs.describe(whose, video_id)
        status = described.get("status", "completed")
        if status != "completed":
            raise RequestError(
                400,
                "video_not_ready",
                f"video {video_id} is {status}; ask GET /v1/videos/{video_id} until it is completed",
            )
        return await content(whose, "video", video_id, described)

    @app.delete(VIDEO_PATH, tags=["videos"])
    async def delete_video(request: Request, video_id: str) -> dict[str, Any]:
        """Forget a video; one that is being made is cancelled."""
        if not await jobs.forget(owner(request, "video", video_id), video_id):
            raise not_found("video", video_id)
        return {"id": video_id, "object": "video.deleted", "deleted": True}

    @app.get(IMAGE_CONTENT_PATH, tags=["images"])
    async def get_image_content(request: Request, image_id: str) -> Response:
        """Return an image that was asked for by URL."""
        whose = owner(request, "image", image_id)
        found = await asyncio.to_thread(jobs.files.describe, whose, image_id)
        if found is None:
            raise not_found("image", image_id)
        return await content(whose, "image", image_id, msgspec.json.decode(found[0]))
