"""Read a request body whole, as far as it may be long, whoever serves the connection."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Message, Receive

from poolgrid.frontend.body_shape import check_shape
from poolgrid.frontend.errors import RequestError
from poolgrid.frontend.inflation import BodyInflation, ClientLeft
from poolgrid.frontend.tokenization import TokenizationPool
from poolgrid.http.browser_requests import Headers, is_from_page
from poolgrid.process.tasks import owned


class BodyReader:
    """Reads the bodies of endpoints that are no inference endpoints, within the limits of those.

    An inference endpoint reads its own: it watches its client over the whole request and not for the body alone.
    """

    def __init__(
        self, inflation: BodyInflation, tokenization: TokenizationPool, max_body_bytes: int, max_body_values: int
    ) -> None:
        self._inflation = inflation
        self._tokenization = tokenization
        self._max_body_bytes = max_body_bytes
        self._max_body_values = max_body_values

    async def read(self, request: Request) -> bytes:
        """Return the body, inflated, of a size and shape that may be parsed.

        Raises ``RequestError``: 415, 413, 400 for what is no gzip or whose client left, 429 when the threads have too
        much to do.
        """
        body = await self._whole(request)
        await check_shape(body, self._max_body_values, self._tokenization)
        return body

    async def _whole(self, request: Request) -> bytes:
        headers, limit = request.headers, self._max_body_bytes
        content_type, content_length = (headers.get(name, "").encode() for name in ("content-type", "content-length"))
        check_announced(content_type, content_length, limit, headers.raw)
        raw = await receive_body(request.receive, limit)
        if raw is None:
            raise _client_left()
        encoding = headers.get("content-encoding", "").strip().lower()
        if not encoding:
            return raw
        # After the body only the end of the connection is left to come.
        end = owned(_next_message(request), "end of the connection")
        try:
            return await self._inflation.inflated(
                raw, encoding, lambda: end.done() and end.result()["type"] == "http.disconnect"
            )
        except ClientLeft:
            raise _client_left() from None
        finally:
            end.cancel()


async def _next_message(request: Request) -> Message:
    return await request.receive()


def _client_left() -> RequestError:
    return RequestError(400, "client_left", "reading the request body: the client left before it was complete")


def check_announced(content_type: bytes, content_length: bytes, limit: int, headers: Headers) -> None:
    """Refuse what the headers say already; raises ``RequestError`` 415 and 413.

    A body without a content type is taken, but not of a browser: it sends one for any web page, without asking first.
    """
    # As nearly every client writes it, first.
    media_type = b"" if content_type == b"application/json" else content_type.partition(b";")[0].strip().lower()
    if media_type and media_type != b"application/json" and not media_type.endswith(b"+json"):
        raise RequestError(
            415,
            "unsupported_media_type",
            f"reading the request body: content-type is {media_type.decode('latin-1')!r}, allowed is "
            "application/json (curl: -H 'content-type: application/json')",
            param="content-type",
        )
    if not content_type and is_from_page(headers):
        raise RequestError(
            415,
            "unsupported_media_type",
            "reading the request body: a browser sent it for a web page without a content-type, allowed is "
            "application/json",
            param="content-type",
            headers=((b"connection", b"close"),),
        )
    if content_length.isdigit() and int(content_length) > limit:
        raise too_large(content_length.decode(), limit)


async def receive_body(receive: Receive, limit: int) -> bytes | None:
    """Return the body, or ``None`` when the client left before it was complete; raises ``RequestError`` 413."""
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if size > limit:
            raise too_large(f"{size} so far" if more else str(size), limit)
    return b"".join(parts)  # of one part it makes no copy


def too_large(size: str, limit: int) -> RequestError:
    """Return the 413 that names the limit.

    The connection stays: what is still to come of the body is read and dropped. A client that reads its answer only
    once it has sent everything would see a reset otherwise.
    """
    return RequestError(
        413,
        "body_too_large",
        f"reading the request body: it has {size} bytes, allowed are up to {limit} (setting max_body_bytes)",
    )
