"""Why a medium is not taken: one code per reason, each with its HTTP status.

The 4xx are the client's to mend, 502 and 504 are those of a remote server, 429 is ours and passes.
"""

from __future__ import annotations

STATUS_BY_CODE = {
    "media_not_supported": 400,
    "media_too_many": 400,
    "media_reference_invalid": 400,
    "media_scheme_not_allowed": 403,
    "media_address_not_allowed": 403,
    "media_path_not_allowed": 403,
    "media_not_found": 400,
    "media_host_unknown": 400,
    "media_redirect_refused": 400,
    "media_encoding_invalid": 400,
    "media_type_not_allowed": 400,
    "media_broken": 400,
    "media_too_large": 413,
    "media_too_many_pixels": 400,
    "media_embeddings_unsafe": 400,
    "media_placeholder_mismatch": 400,
    "media_busy": 429,
    "media_fetch_failed": 502,
    "media_fetch_timeout": 504,
}
"""Every code that media can be refused with; also the values of the metric's ``reason`` label."""


class MediaRefused(Exception):
    """One medium is not taken; the message says what was found and what is allowed, not where in the body it stood.

    It is raised where it is found, and returned (``alone``) from one task or thread to another: an exception that a
    task ends with is in a circle with the frames that wait for it, and 50 MB would wait for the garbage collector.
    """

    def __init__(self, code: str, message: str) -> None:
        assert code in STATUS_BY_CODE, f"an unlisted code: {code}"
        self.code = code
        self.message = message
        super().__init__(message)

    def alone(self) -> MediaRefused:
        """Return the same without where it was raised: an exception holds its frames, and these hold a medium."""
        return MediaRefused(self.code, self.message)

    @property
    def status(self) -> int:
        return STATUS_BY_CODE[self.code]
