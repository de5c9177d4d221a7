"""JSON as clients write it: any spacing, any escapes, keys repeated. Strategies for tests of what edits its bytes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

SPACES = st.sampled_from(["", "", "", " ", "\n", "\r\n\t", "  "])
NUMBERS = st.sampled_from(
    ["0", "-0", "1", "12", "1.0", "1e3", "-1.5E-7", "9007199254740993", "18446744073709551615", "0.30000000000000004"]
)
NAMES = st.sampled_from(
    ["model", "stream", "cache_salt", "stream_options", "messages", "a", "é", 'q"uote', "back\\", ""]
)


@st.composite
def strings(draw: st.DrawFn, text: st.SearchStrategy[str] | None = None) -> str:
    """A JSON string, each character as it is or escaped, where that is allowed."""
    plain = draw(text if text is not None else st.text(max_size=8))
    if draw(st.booleans()):
        return json.dumps(plain, ensure_ascii=draw(st.booleans()))
    return '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 0x10000 else json.dumps(c)[1:-1] for c in plain) + '"'


@st.composite
def values(draw: st.DrawFn, depth: int = 2, odd: bool = False) -> str:
    kinds = ["string", "number", "word"] + (["array", "object"] if depth else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "string":
        return draw(strings())
    if kind == "number":
        return draw(NUMBERS)
    if kind == "word":
        words = ["true", "false", "null"] + (["NaN", "Infinity", "-Infinity", '"\\ud83d"'] if odd else [])
        return draw(st.sampled_from(words))
    if kind == "object":
        return draw(objects(depth - 1, odd))
    return draw(arrays(values(depth - 1, odd)))


@st.composite
def arrays(draw: st.DrawFn, elements: st.SearchStrategy[str]) -> str:
    found = draw(st.lists(elements, max_size=4))
    spaced = [draw(SPACES) + element + draw(SPACES) for element in found]
    return "[" + (",".join(spaced) if spaced else draw(SPACES)) + "]"


@st.composite
def objects(draw: st.DrawFn, depth: int = 2, odd: bool = False) -> str:
    members = []
    for _ in range(draw(st.integers(0, 5))):
        key, value = draw(strings(NAMES)), draw(values(depth, odd))
        members.append(draw(SPACES) + key + draw(SPACES) + ":" + draw(SPACES) + value + draw(SPACES))
    return "{" + (",".join(members) if members else draw(SPACES)) + "}"


@st.composite
def bodies(draw: st.DrawFn, odd: bool = False) -> bytes:
    """The bytes of an object, with space or a byte order mark around it."""
    text = draw(SPACES) + draw(objects(odd=odd)) + draw(SPACES)
    mark = draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf"]))
    return mark + text.encode()


def read(data: bytes) -> Any:
    """As the engines' parser reads it; ``NaN`` equals itself."""
    return json.loads(data, parse_constant=str)
