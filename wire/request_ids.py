"""How requests and their dispatches are named between processes, so that no two are ever called the same.

Rules
    1. A request's id is ``NAME~UNIQUE``: the name that its client chose, and a part that the front end adds, which
       differs between all requests of all front ends. One whose client chose none is ``UNIQUE``, and perhaps ``-N``.
    2. A dispatch of a request is called ``ID`` the first time, then ``ID~1``, ``ID~2``, … (legs, migrations).
    3. A name has no ``~``, and ``UNIQUE`` neither; ``UNIQUE`` begins with a letter. So the id of one request is never
       that of another one, nor of another one's dispatch, whatever names clients choose.

Only rule 1's name is the client's. Answers show it, people look requests up by it, and ties and seeds are drawn from
it, so that the same name is drawn the same; nothing is found, cancelled or reserved by it.
"""

from __future__ import annotations

SEPARATOR = "~"


def internal_id(name: str, unique: str) -> str:
    """Return the id of a request whose client calls it ``name``."""
    return f"{name}{SEPARATOR}{unique}"


def dispatch_id(request_id: str, number: int) -> str:
    """Return what a request's dispatch ``number`` (from 0) is called."""
    return request_id if number == 0 else f"{request_id}{SEPARATOR}{number}"


def dispatch_of(name: str) -> tuple[str, int]:
    """Return the request and the number of a later dispatch; ``(name, 0)`` for what is called like no such one."""
    request_id, _, number = name.rpartition(SEPARATOR)
    if request_id and number.isascii() and number.isdecimal():
        return request_id, int(number)
    return name, 0


def name_of(request_id: str) -> str:
    """Return what the client calls a request, given its id or that of a dispatch; the unique part if it has no name."""
    return request_id.partition(SEPARATOR)[0]
