"""A thing that stands in an ``AgeList``: its links lie in itself."""

from __future__ import annotations

from typing import Any

import msgspec


class Aged(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """What can stand in an ``AgeList``, in one at a time."""

    older: Any = None
    newer: Any = None

    __repr__ = object.__repr__
    """Not by its fields, which lead to all the others."""
