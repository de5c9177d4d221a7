"""Checks of a processor's arguments, which come from clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from poolgrid.wire.limits import U32_MAX

TOKEN_LIST_MAX = 65_536
"""Token ids that one argument may list: half of a large vocabulary, well below the bound of the arguments' bytes."""


def no_others(arguments: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ``ValueError`` for an argument that the processor does not have."""
    for name in arguments:
        if name not in known:
            raise ValueError(f"argument {name!r} is unknown, allowed are {', '.join(known)}")


def token_list(arguments: Mapping[str, Any], name: str, vocabulary_size: int) -> list[int]:
    """Return an argument that lists token ids, or raise ``ValueError``; a vocabulary size of 0 is not known."""
    value = arguments.get(name)
    if not isinstance(value, list) or not 1 <= len(value) <= TOKEN_LIST_MAX:
        raise ValueError(f"argument {name!r} is wrong, allowed is a list of 1 to {TOKEN_LIST_MAX} token ids")
    highest = (vocabulary_size or U32_MAX + 1) - 1
    for index, token_id in enumerate(value):
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id <= highest:
            raise ValueError(f"{name}[{index}] is {token_id!r}, allowed are token ids from 0 to {highest}")
    return value
