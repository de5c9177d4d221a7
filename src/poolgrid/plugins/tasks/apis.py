"""The APIs of tasks: ``/v1/embeddings``, ``/v1/images`` and ``/v1/videos``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from poolgrid.plugins.tasks.endpoint import EMBEDDINGS_PATH, IMAGES_PATH, TaskEndpoint
from poolgrid.plugins.tasks.result_endpoints import (
    IMAGE_CONTENT_PATH,
    VIDEO_CONTENT_PATH,
    VIDEO_PATH,
    VIDEOS_PATH,
    add_image_endpoints,
    add_video_endpoints,
    jobs_of,
)
from poolgrid.plugins.tasks.schema import EmbeddingBody, ImageBody, VideoBody
from poolgrid.server.frontend.api_endpoint import ApiEndpoint
from poolgrid.server.frontend.description import (
    BAD_REQUEST,
    COUNT,
    INTEGER,
    ITEM_LIST,
    NUMBER,
    TEXT,
    ApiDescription,
    InferenceOperation,
    Operation,
    list_of,
    nullable,
    record,
)
from poolgrid.server.frontend.front_end import FrontEnd
from poolgrid.server.frontend.inference_endpoint import InferenceEndpoint


def _join_embeddings(front: FrontEnd) -> Mapping[str, InferenceEndpoint]:
    return _serving(front, EMBEDDINGS_PATH)


def _join_images(front: FrontEnd) -> Mapping[str, InferenceEndpoint]:
    add_image_endpoints(front)
    return _serving(front, IMAGES_PATH)


def _join_videos(front: FrontEnd) -> Mapping[str, InferenceEndpoint]:
    add_video_endpoints(front)
    return _serving(front, VIDEOS_PATH)


def _serving(front: FrontEnd, path: str) -> Mapping[str, InferenceEndpoint]:
    return {path: TaskEndpoint(front, path, jobs_of(front))}


_EMBEDDING = record(object={"const": "embedding"}, index=COUNT, embedding={"anyOf": [list_of(NUMBER), TEXT]})
_RESULT_PLACE = record({"url": TEXT, "b64_json": TEXT, "output_format": TEXT})
_VIDEO = record(
    {
        "created_at": INTEGER,
        "created": INTEGER,
        "completed_at": nullable(INTEGER),
        "expires_at": nullable(INTEGER),
        "prompt": TEXT,
        "seconds": TEXT,
        "size": TEXT,
        "data": list_of(_RESULT_PLACE),
        "error": nullable(record(code=TEXT, message=TEXT)),
        "inference_time_s": NUMBER,
    },
    id=TEXT,
    object={"const": "video"},
    model=TEXT,
    status={"enum": ["queued", "in_progress", "completed", "failed"]},
    progress=COUNT,
)
_NO_RESULT: Final = {"404": "No such result is kept", "400": "It is not completed, or a parameter is wrong"}

EMBEDDINGS: Final = ApiEndpoint(
    _join_embeddings,
    ApiDescription(
        bodies=(EmbeddingBody,),
        answers={
            "EmbeddingList": record(
                object={"const": "list"},
                data=list_of(_EMBEDDING),
                model=TEXT,
                usage=record(prompt_tokens=COUNT, total_tokens=COUNT),
            ),
        },
        inference=(InferenceOperation(EMBEDDINGS_PATH, "Embed texts", "embedding", EmbeddingBody, "EmbeddingList"),),
    ),
    {},
)
IMAGES: Final = ApiEndpoint(
    _join_images,
    ApiDescription(
        bodies=(ImageBody,),
        answers={
            "ImageList": record(created=INTEGER, data=list_of(_RESULT_PLACE), output_format=nullable(TEXT)),
        },
        inference=(InferenceOperation(IMAGES_PATH, "Make images", "image", ImageBody, "ImageList"),),
        operations=(Operation("get", IMAGE_CONTENT_PATH, "", _NO_RESULT),),
    ),
    {},
)
VIDEOS: Final = ApiEndpoint(
    _join_videos,
    ApiDescription(
        bodies=(VideoBody,),
        answers={
            "ItemList": ITEM_LIST,
            "Video": _VIDEO,
            "DeletedVideo": record(id=TEXT, object={"const": "video.deleted"}, deleted={"const": True}),
        },
        inference=(
            InferenceOperation(
                VIDEOS_PATH, "Begin a video, or with `response_format` make it", "video", VideoBody, "Video"
            ),
        ),
        operations=(
            Operation("get", VIDEO_PATH, "Video", _NO_RESULT),
            Operation("delete", VIDEO_PATH, "DeletedVideo", {"404": _NO_RESULT["404"]}),
            Operation("get", VIDEOS_PATH, "ItemList", {"400": BAD_REQUEST["400"]}),
            Operation("get", VIDEO_CONTENT_PATH, "", _NO_RESULT),
        ),
    ),
    {},
)
