"""Read a request body whole, as far as it may be long, whoever serves the connection."""

from __future__ import annotations

from starlette.types import Receive

from frontend.errors import RequestError


def check_announced(content_type: bytes, content_length: bytes, limit: int) -> None:
    """Refuse what the headers say already; raises ``RequestError`` 415 and 413."""
    media_type = content_type.partition(b";")[0].strip().lower()
    if media_type and media_type != b"application/json" and not media_type.endswith(b"+json"):
        raise RequestError(
            415,
            "unsupported_media_type",
            f"reading the request body: content-type is {media_type.decode('latin-1')!r}, allowed is "
            "application/json (curl: -H 'content-type: application/json')",
            param="content-type",
            headers=((b"connection", b"close"),),
        )
    if content_length.isdigit() and int(content_length) > limit:
        raise too_large(content_length.decode(), limit)


async def receive_body(receive: Receive, limit: int) -> bytes | None:
    """Return the body, or ``None`` when the client left before it was complete; raises ``RequestError`` 413."""
    message = await receive()
    if message["type"] == "http.disconnect":
        return None
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(body) > limit:
            raise too_large(str(len(body)), limit)
        return body
    parts = [body]
    size = len(body)
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part: bytes = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > limit:
            raise too_large(f"{size} so far", limit)
        if not message.get("more_body", False):
            return b"".join(parts)


def too_large(size: str, limit: int) -> RequestError:
    """Return the 413 that names the limit."""
    return RequestError(
        413,
        "body_too_large",
        f"reading the request body: it has {size} bytes, allowed are up to {limit} (setting max_body_bytes)",
        headers=((b"connection", b"close"),),
    )
