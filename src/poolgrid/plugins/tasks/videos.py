"""Videos, which take minutes: jobs that continue after their request is answered, and are queried by id.

Rules
    1. A job is queued, in progress, then completed or failed; its description among the results says so, and how much
       of it is done. The process that runs it touches the description every second.
    2. A description that is not touched any more was a process's that has ended: its job has failed.
    3. A job that is deleted is cancelled on its worker within a second, whichever HTTP process was asked.
    4. A tenant's jobs that run count towards its ``concurrent_requests``; at most ``RUNNING_MAX`` run in a process.
    5. What is refused within ``REFUSAL_WAIT_S`` is the answer to the request, and there is no job.

Results that are fetched later, by URL: files in a directory, which the HTTP processes of one router share.

Rules
    1. A result is found by its *owner* (the tenant that asked for it) and its id only: ``ID.json`` describes it,
       ``ID.bin`` is its content.
    2. Results are kept for ``TTL_S``, and those of one owner up to its equal part of ``BYTES_MAX`` (descriptions
       included) and of ``RESULTS_MAX``; beyond that the oldest go first. One that alone is larger is refused by
       ``RESULT_BYTES_MAX`` before.
    3. Without a directory they are in a temporary one, which is gone with the process.
    4. A result that is forgotten stays forgotten: a process that still makes it is told so when it describes it
       again. A lock on the owner's folder holds across processes.

The methods wait for the disk: callers run them in a thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import Query, Request, Response
from starlette.responses import FileResponse

from poolgrid.kernel.requests.inference import InferenceBackend, InferenceRequest, Refused
from poolgrid.plugins.tasks.output import TaskOutput
from poolgrid.plugins.tasks.schema import VideoBody
from poolgrid.server.frontend.access.gate import caller_of
from poolgrid.server.frontend.access.owner import Owner
from poolgrid.server.frontend.access.tenants import CONCURRENCY_RETRY_S, Caller
from poolgrid.server.frontend.errors import RequestError, invalid, quoted, refused
from poolgrid.server.frontend.front_end import FrontEnd
from poolgrid.server.frontend.list_page import PAGE_MAX, page_of
from poolgrid.server.frontend.stream_head import REFUSAL_WAIT_S
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import cancel_all, detached

FOLDER: Final = Path("results")
"""Where results are kept within a data_dir."""

TTL_S: Final = 86_400.0
"""How long a result is kept: videos are fetched when they are done, and are large."""

BYTES_MAX: Final = 1024 * 1024 * 1024
"""Bytes of all results: some twenty videos of the largest size, or a thousand usual ones."""

RESULTS_MAX: Final = 16_384
"""Results of all owners: each costs a look when room is made for another."""

TIME_HEX: Final = 12
"""Leading hexadecimal digits of an id that are its time in milliseconds: ids in order are results in order."""

MEDIA_TYPES: Final = frozenset(
    ("image/png", "image/jpeg", "image/webp", "image/gif", "image/avif", "video/mp4", "video/webm", "video/x-msvideo")
)
"""Types as which a result is served. A worker chooses its own; a page would be one of the router's origin."""

_ID: Final = re.compile(r"(image|video)_[0-9a-f]{32}")


class ResultFiles:
    """The results of one router."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._temporary: Path | None = None

    def close(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def keep(self, owner: Owner, result_id: str, description: bytes, content: bytes | None = None) -> None:
        """Keep a new result; raises ``OSError``."""
        folder = self._folder(owner)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(folder):
            _place(folder / f"{result_id}.json", description, content, owner, is_new=True)

    def keep_again(self, owner: Owner, result_id: str, description: bytes, content: bytes | None = None) -> bool:
        """Describe a result again, with its content once it is made; return whether it is still wanted.

        Raises ``OSError``.
        """
        path = self._folder(owner) / f"{result_id}.json"
        if not path.parent.exists():
            return False
        with _locked(path.parent):
            if not path.exists():
                return False
            _place(path, description, content, owner)
        return True

    def describe(self, owner: Owner, result_id: str) -> tuple[bytes, float] | None:
        """Return a description and how many seconds ago it was written or touched; ``None`` = there is none."""
        if _ID.fullmatch(result_id) is None:
            return None
        path = self._folder(owner) / f"{result_id}.json"
        try:
            return path.read_bytes(), time.time() - path.stat().st_mtime
        except OSError:
            return None

    def content(self, owner: Owner, result_id: str) -> Path | None:
        path = self._folder(owner) / f"{result_id}.bin"
        return path if _ID.fullmatch(result_id) and path.is_file() else None

    def touch(self, owner: Owner, result_id: str) -> bool:
        """Show that a result is still being made; return whether it is still wanted."""
        try:
            os.utime(self._folder(owner) / f"{result_id}.json")
        except FileNotFoundError:
            return False
        return True

    def forget(self, owner: Owner, result_id: str) -> bool:
        """Forget a result; return whether there was one."""
        if self.describe(owner, result_id) is None:
            return False
        path = self._folder(owner) / f"{result_id}.json"
        with _locked(path.parent):
            _remove(path)
        return True

    def page(
        self, owner: Owner, prefix: str, limit: int, newest_first: bool, after: str | None
    ) -> list[dict[str, Any]] | None:
        """Return the descriptions of up to so many jobs behind one of them, by age; ``None`` where that is not kept.

        Only these are read.
        """
        names = sorted((path.stem for path in self._folder(owner).glob(f"{prefix}*.json")), reverse=newest_first)
        if after is not None:
            if after not in names:
                return None
            names = names[names.index(after) + 1 :]
        found: list[dict[str, Any]] = []
        for name in names:
            described = self.describe(owner, name)
            if described is not None and "status" in (item := msgspec.json.decode(described[0])):
                found.append(item)
                if len(found) == limit:
                    break
        return found

    def _folder(self, owner: Owner) -> Path:
        if self._directory is None and self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="poolgrid-results-"))
        directory = self._directory or self._temporary
        assert directory is not None, "made above"
        # A name of a tenant may hold what a file system cannot.
        return directory / hashlib.sha256(owner.name.encode()).hexdigest()[:32]


def _aged(folder: Path) -> list[tuple[float, int, Path]]:
    """Return the time of the last change, the bytes and the description of each result, the oldest first."""
    found: list[tuple[float, int, Path]] = []
    for path in folder.glob("*.json"):
        with suppress(FileNotFoundError):  # another process may forget it meanwhile
            content, described = path.with_suffix(".bin"), path.stat()
            size = content.stat().st_size if content.exists() else 0
            found.append((described.st_mtime, described.st_size + size, path))
    return sorted(found)


def _make_room(folder: Path, budget: int, results_max: int) -> None:
    """Forget the oldest results until the rest is within a budget; those that are being made are always young."""
    results = _aged(folder)
    for _, _, path in results[: max(0, len(results) - results_max)]:
        _remove(path)
    results = results[-results_max:]
    used = sum(size for _, size, _ in results)
    oldest = time.time() - TTL_S
    for modified, size, path in results:
        if used <= budget and modified >= oldest:
            return
        used -= size
        _remove(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep the other threads and processes out of a folder."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _place(path: Path, description: bytes, content: bytes | None, owner: Owner, is_new: bool = False) -> None:
    if content is not None or is_new:
        owners = max(1, owner.owners)
        size = len(description) + len(content or b"")
        _make_room(path.parent, BYTES_MAX // owners - size, max(1, RESULTS_MAX // owners - 1))
    if content is not None:
        _write(path.with_suffix(".bin"), content)
    _write(path, description)


def _remove(description: Path) -> None:
    for path in (description, description.with_suffix(".bin")):
        path.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    """Write a file whole, or not at all: others may read it meanwhile."""
    partial = path.with_suffix(f".{time.monotonic_ns()}.part")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


log: Final = logging.getLogger(__name__)

RUNNING_MAX: Final = 4096
"""Jobs of one process that are queued or run: as many as wait in a router's queue by default."""

TOUCH_S: Final = 1.0

LOST_S: Final = 15.0
"""After this time without a touch a job is lost: fifteen times as long as a busy process needs."""

ENDED: Final = ("completed", "failed")


def new_id(kind: str) -> str:
    """Return an id of a result that no client can guess, and that is behind those before it."""
    return f"{kind}_{time.time_ns() // 1_000_000:0{TIME_HEX}x}{secrets.token_hex(10)}"


def shown_type(media_type: str) -> str:
    """Return the type as which a worker's result is served."""
    return media_type if media_type in MEDIA_TYPES else "application/octet-stream"


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


def not_found(kind: str, result_id: str) -> RequestError:
    """Return the 404 for a result that is not kept."""
    return RequestError(
        404,
        "not_found",
        f"no {kind} {quoted(result_id)} is kept here: it never was, it was deleted, or there was no more room",
        param=f"{kind}_id",
    )


ALONE: Final = {"x-content-type-options": "nosniff", "content-security-policy": "sandbox; default-src 'none'"}
"""A result is no page: nothing in it runs, or is taken for another type."""

VIDEOS_PATH: Final = "/v1/videos"
VIDEO_PATH: Final = "/v1/videos/{video_id}"
VIDEO_CONTENT_PATH: Final = "/v1/videos/{video_id}/content"
IMAGE_CONTENT_PATH: Final = "/v1/images/{image_id}/content"


def jobs_of(front: FrontEnd) -> VideoJobs:
    """Return the jobs and results of a front end, which its endpoints of tasks share."""
    state = front.app.state
    if not hasattr(state, "videos"):
        state.videos = VideoJobs(front.backend, ResultFiles(front.directory(FOLDER)), front.clock)
        front.opened.push_async_callback(state.videos.close)
    jobs: VideoJobs = state.videos
    return jobs


def _owner(front: FrontEnd, request: Request, kind: str, result_id: str) -> Owner:
    found = front.owner_of(caller_of(request.scope))
    if found is None:
        raise not_found(kind, result_id)
    return found


async def _content(files: ResultFiles, owner: Owner, kind: str, result_id: str, described: dict[str, Any]) -> Response:
    path = await asyncio.to_thread(files.content, owner, result_id)
    if path is None:
        raise not_found(kind, result_id)
    shown = shown_type(described.get("media_type") or "")
    where = "attachment" if shown == "application/octet-stream" else "inline"
    return FileResponse(path, media_type=shown, headers={"content-disposition": where, **ALONE})


def add_image_endpoints(front: FrontEnd) -> None:
    """Add what is asked of images that are kept to a front end."""
    files = jobs_of(front).files

    @front.app.get(IMAGE_CONTENT_PATH, tags=["images"])
    async def get_image_content(request: Request, image_id: str) -> Response:
        """Return an image that was asked for by URL."""
        whose = _owner(front, request, "image", image_id)
        found = await asyncio.to_thread(files.describe, whose, image_id)
        if found is None:
            raise not_found("image", image_id)
        return await _content(files, whose, "image", image_id, msgspec.json.decode(found[0]))


def add_video_endpoints(front: FrontEnd) -> None:
    """Add what is asked of videos to a front end."""
    app, jobs = front.app, jobs_of(front)

    @app.get(VIDEOS_PATH, tags=["videos"])
    async def list_videos(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """List the videos that are kept, and those that are being made."""
        found = front.owner_of(caller_of(request.scope))
        items: list[dict[str, Any]] | None = [] if after is None else None
        if found is not None:
            newest_first = order == "desc"
            items = await asyncio.to_thread(jobs.files.page, found, "video", limit + 1, newest_first, after)
        if items is None:
            raise invalid("after", f"after is {quoted(after)}: allowed is the id of an item of the list")
        # In the order of the page, whatever that is.
        return page_of(items, limit, "asc", None)

    @app.get(VIDEO_PATH, tags=["videos"])
    async def get_video(request: Request, video_id: str) -> dict[str, Any]:
        """Tell how far a video is."""
        return await jobs.describe(_owner(front, request, "video", video_id), video_id)

    @app.get(VIDEO_CONTENT_PATH, tags=["videos"])
    async def get_video_content(request: Request, video_id: str, variant: Literal["video"] = "video") -> Response:
        """Return a video that is completed."""
        whose = _owner(front, request, "video", video_id)
        described = await jobs.describe(whose, video_id)
        status = described.get("status", "completed")
        if status != "completed":
            raise RequestError(
                400,
                "video_not_ready",
                f"video {video_id} is {status}; ask GET /v1/videos/{video_id} until it is completed",
            )
        return await _content(jobs.files, whose, "video", video_id, described)

    @app.delete(VIDEO_PATH, tags=["videos"])
    async def delete_video(request: Request, video_id: str) -> dict[str, Any]:
        """Forget a video; one that is being made is cancelled."""
        if not await jobs.forget(_owner(front, request, "video", video_id), video_id):
            raise not_found("video", video_id)
        return {"id": video_id, "object": "video.deleted", "deleted": True}
