"""What can be wrong with bytes or values that come from another process.

``WireError``
    ``DecodeError``   untrusted bytes break the contract; the frame is dropped, the process continues
    ``LimitError``    a value of our own is beyond a named limit of ``poolgrid.kernel.wire.limits``; nothing was sent
"""

from __future__ import annotations


class WireError(Exception):
    """Base of everything ``wire`` raises."""


class DecodeError(WireError):
    """Bytes from another process do not decode as ``what``; nothing of them was applied."""

    def __init__(self, what: str, detail: str) -> None:
        self.what = what
        self.detail = detail
        super().__init__(f"cannot decode {what}: {detail}")


class LimitError(WireError):
    """A value of our own exceeds a limit of the contract; it was not sent."""

    def __init__(self, what: str, value: int, maximum: int) -> None:
        self.what = what
        self.value = value
        self.maximum = maximum
        super().__init__(f"{what} is {value}, allowed are at most {maximum}; it was not sent")
