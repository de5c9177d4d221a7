"""``python -m poolgrid.server.frontend.guide_compiler``: the process that tries guides, and may die of them.

Its standard input is a connection (``multiprocessing.connection``), on which guides come as MessagePack and a verdict
goes for each, one after the other, until it ends. A guide is first measured
(``poolgrid.server.structured_output.guide_limits``), then compiled, and then a short answer is made with it. What goes
beyond the bounds ends this process, and its parent sees by which signal:

- the *stack* it compiles on has ``STACK_BYTES``, an eighth of what a thread of an engine has;
- ``SIGPROF`` comes after so much CPU time, however busy the machine is;
- a *step*, the search for the token that may come next, has a limit of its own, and ends no other request: an engine
  does it between two steps of all answers;
- memory beyond ``MEMORY_BYTES_MAX`` is not given.

Only what is too much is refused here, and what no text keeps to. Another guide that ``llguidance`` does not take may be
one that a worker's engine takes; so that is the worker's to say.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from poolgrid.kernel.wire.limits import FRAME_BYTES_MAX
from poolgrid.kernel.wire.requests import Sampling
from poolgrid.server.structured_output.guide_limits import objection
from poolgrid.server.structured_output.structural_tags import NOTHING_KEEPS_TO_IT, error_of, matcher

STACK_BYTES = 1024 * 1024
"""Threads of engines have 8 MiB, or the 2 MiB that Rust gives them; what fits into one fits there."""

MEMORY_BYTES_MAX = 1024 * 1024 * 1024
"""Address space of the process; the largest guides within the other limits take some 100 MB."""

STEPS = 64
"""Tokens of the answer that is made: a guide may be cheap to compile and dear to begin."""

NICENESS = 10
"""Guides are tried with what other work leaves of the processor."""

_END = 256


class _Bytes:
    """A tokenizer with a token for each byte: what a guide costs hardly depends on the vocabulary."""

    eos_token_id = _END
    bos_token_id = None
    tokens = (*(bytes((byte,)) for byte in range(256)), b"</s>")
    special_token_ids = (_END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def verdict(tokenizer: Any, guide: dict[str, Any], step_limit_ms: float) -> str:
    """Return why a guide is too much, or nothing."""
    sampling = Sampling(max_tokens=STEPS, **guide)
    wrong = objection(sampling)
    if wrong is not None:
        return wrong
    try:
        made = matcher(tokenizer, sampling)
    except (ValueError, AssertionError):
        return ""
    for step in range(STEPS):
        began_ns = time.thread_time_ns()
        mask = made.compute_bitmask()
        took_ms = (time.thread_time_ns() - began_ns) / 1e6
        if took_ms > step_limit_ms:
            return (
                f"token {step + 1} of an answer takes {took_ms:.0f} ms of CPU time to find, allowed are up to "
                f"{step_limit_ms:g}"
            )
        if made.is_error():
            # Engines have other limits than this trial, but where nothing may be the first token, none has one.
            nothing = step == 0 and error_of(made) == NOTHING_KEEPS_TO_IT
            return NOTHING_KEEPS_TO_IT if nothing else ""
        allowed = [token for token in range(_END) if mask[token >> 3] >> (token & 7) & 1]
        if not allowed or not made.consume_token(allowed[(7 * step) % len(allowed)]):
            break
    return ""


def _serve(limit_s: float, step_limit_ms: float) -> None:
    from llguidance import LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))
    connection = Connection(sys.stdin.fileno())
    with suppress(EOFError):
        while True:
            guide = msgspec.msgpack.decode(connection.recv_bytes(FRAME_BYTES_MAX))
            signal.setitimer(signal.ITIMER_PROF, limit_s)
            found = verdict(tokenizer, guide, step_limit_ms)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(found.encode())


def main(limit_ms: float, step_limit_ms: float) -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started it, whose end ends the input
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(limit_ms / 1000, step_limit_ms), name="compiler")
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
