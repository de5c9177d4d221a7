"""What is asked of videos, and of results that are kept: ``/v1/videos`` and ``/v1/images``."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import Query, Request, Response
from starlette.responses import FileResponse

from poolgrid.plugins.tasks.result_files import FOLDER, ResultFiles, not_found, shown_type
from poolgrid.plugins.tasks.videos import VideoJobs
from poolgrid.server.frontend.access.gate import caller_of
from poolgrid.server.frontend.access.owner import Owner
from poolgrid.server.frontend.errors import RequestError, invalid, quoted
from poolgrid.server.frontend.front_end import FrontEnd
from poolgrid.server.frontend.list_page import PAGE_MAX, page_of

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
