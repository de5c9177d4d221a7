"""Where the CPU of our router goes, by what it does for a request: samples of py-spy, folded into groups.

Rules
    1. A sample counts for the first of its frames, the innermost first, that a line of ``LINES`` names. What many
       share (dataclass constructors, clocks, codecs) has no line: it counts for whoever called it.
    2. What is done for events of the stream counts for ``event stream`` whatever it calls, but for reading sockets.
    3. The sampler takes waiting threads for working ones now and then: with native frames it can be seen, and stacks
       that end in a wait (``WAITS``) do not count.
    4. Shares are per thread and weighted with the thread's CPU time from the scheduler. Threads without Python (those
       of ZMQ) have a line of their own.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.table import Table

SAMPLES_PER_S = 200
"""Each stops the process for a millisecond, native frames are slow to find: a third of the time, which is no CPU."""

STOP_TIMEOUT_S = 60.0
"""A minute of samples is written in a second."""

PARSE, ENDPOINT, PREPARATION = "HTTP parse", "endpoint", "preparation"
TOKENIZATION, HASHING, DECISION, RECORDING = "tokenization", "hashing", "decision", "recording"
DISPATCH, SEND, RECEIVE = "dispatch encode", "ZMQ send", "ZMQ receive"
INTAKE, ENCODE, WRITE = "token intake", "answer encode", "write"
EVENTS, LOOP, ZMQ_THREADS, OTHER = "event stream", "event loop", "ZMQ threads", "other"
GROUPS = (
    PARSE, ENDPOINT, PREPARATION, TOKENIZATION, HASHING, DECISION, RECORDING, DISPATCH, SEND, ZMQ_THREADS, RECEIVE,
    INTAKE, ENCODE, WRITE, EVENTS, LOOP, OTHER,
)  # fmt: skip
"""In the order in which a request passes through."""

LINES: tuple[tuple[str, str, str], ...] = (
    ("zmq/sugar/socket.py", r".*\.send\w*", SEND),
    ("server/transport/zmq_socket.py", r".*\.send", SEND),
    ("server/transport/dealer.py", r"StreamDealer\.send", SEND),
    ("server/transport/zmtp.py", r"framed|long_header|ZmtpConnection\.(send|send_long|flush)", SEND),
    ("server/transport/dealer.py", r".*", RECEIVE),
    ("server/transport/zmtp.py", r".*", RECEIVE),
    ("zmq/sugar/", r".*", RECEIVE),
    ("server/transport/zmq_socket.py", r".*", RECEIVE),
    ("server/http/guard.py", r"Guard\.(write|_begun|end_request)", WRITE),
    ("server/http/guard.py", r"Guard\..*", PARSE),
    ("server/http/guard.py", r"GuardedApplication\..*", ENDPOINT),
    ("server/http/request_framing.py", r".*", PARSE),
    ("uvicorn/", r"RequestResponseCycle\.send.*|.*\.on_response_complete", WRITE),
    ("uvicorn/", r"RequestResponseCycle\..*", ENDPOINT),
    ("uvicorn/", r".*", PARSE),
    ("server/frontend/inference_endpoint.py", r"InferenceExchange\.(start_stream|write|end)", WRITE),
    (
        "server/frontend/inference_endpoint.py",
        r"InferenceExchange\.response_headers|_Answer\.(whole|stream|_usage|_events|_events_of_one)",
        ENCODE,
    ),
    ("server/frontend/inference_endpoint.py", r"_Answer\.(_take|_absorb)|_Pumps\..*", INTAKE),
    ("server/frontend/responses.py", r".*", ENCODE),
    ("server/frontend/parsed_answers.py", r".*", ENCODE),
    ("server/frontend/stream_head.py", r".*", ENCODE),
    ("server/frontend/sequence_output.py", r".*", INTAKE),
    ("server/frontend/detokenization.py", r".*", INTAKE),
    ("server/frontend/sequence_output.py", r".*", INTAKE),
    ("server/frontend/metrics.py", r".*", RECORDING),
    ("server/frontend/prompt_encoder.py", r".*", TOKENIZATION),
    ("server/frontend/tokenization.py", r".*", TOKENIZATION),
    ("server/frontend/prompt_model.py", r".*\.encode\w*", TOKENIZATION),
    ("concurrent/futures/", r".*", TOKENIZATION),
    ("server/frontend/prompt_model.py", r".*", PREPARATION),
    ("server/frontend/preparation.py", r".*", PREPARATION),
    ("server/frontend/schema.py", r".*", PREPARATION),
    ("server/frontend/chat_template.py", r".*", PREPARATION),
    ("jinja2/", r".*", PREPARATION),
    ("server/frontend/", r".*", ENDPOINT),
    ("kernel/wire/hashing.py", r"(?!(un)?pack_tokens).*", HASHING),
    ("server/serving/prompt_paths.py", r".*", HASHING),
    ("server/router/choosing.py", r"Chooser\.path\w*", HASHING),
    ("kernel/decision/decision.py", r".*", RECORDING),
    ("server/router/decision_journal/", r".*", RECORDING),
    ("server/router/metrics.py", r".*", RECORDING),
    ("prometheus_client/", r".*", RECORDING),
    ("kernel/routing/", r".*", DECISION),
    ("server/router/service.py", r"RouterService\.(ended|room_changed|_give_up)", INTAKE),
    ("server/serving/links.py", r"WorkerLink\.(on|_take)_\w+", INTAKE),
    ("kernel/requests/request_machine.py", r"RequestMachine\.begin", DISPATCH),
    ("kernel/requests/request_machine.py", r".*", INTAKE),
    ("kernel/requests/token_delivery.py", r".*", INTAKE),
    ("server/serving/request_tracker.py", r".*", INTAKE),
    ("server/serving/", r".*", DISPATCH),
    ("server/router/", r".*", DISPATCH),
    ("asyncio/", r".*", LOOP),
    ("server/process/lifecycle.py", r".*", LOOP),
)
"""Beginning of the file's path, function, group; the first line that fits counts."""

EVENT_FRAMES = ("kernel/consolidation/", "server/consolidator/", "server/router/feeds.py")
EVENT_FUNCTIONS = ("JournalApplier.on_records", "JournalApplier.on_snapshot", "JournalApplier._step")

WAITS = frozenset(
    (
        "epoll_wait",
        "epoll_pwait",
        "epoll_pwait2",
        "PyThread_acquire_lock_timed",
        "take_gil",
        "sem_wait",
        "sem_timedwait",
    )
)
"""Functions in which a thread does nothing: waiting for sockets, a lock, the interpreter."""

WAIT_DEPTH = 6
"""Innermost frames that are looked at for a wait: what the C library does inside has other names everywhere."""

_FRAME = re.compile(r"(.*) \((.*?)(?::\d+)?\)")
_THREAD = re.compile(r"thread \((\d+)\)")


def find_py_spy(python: str) -> str:
    """Return the py-spy beside a Python, or the one on the path; raises ``FileNotFoundError``."""
    beside = Path(python).parent / "py-spy"
    found = str(beside) if beside.is_file() else shutil.which("py-spy")
    if found is None:
        raise FileNotFoundError(f"profiling: there is no py-spy beside {python} nor on the path; nothing was measured")
    return found


class Recording:
    """Samples a process from now until ``shares`` is asked for."""

    def __init__(self, py_spy: str, pid: int, stacks: Path) -> None:
        """Write folded stacks to ``stacks``."""
        self._pid = pid
        self._stacks = stacks
        self._before = thread_cpu_s(pid)
        command = [py_spy, "record", "--format", "raw", "--threads", "--native", "--rate", str(SAMPLES_PER_S)]
        command += ["--duration", "unlimited", "--output", str(stacks), "--pid", str(pid)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def shares(self) -> dict[str, float]:
        """End it and return each group's share of the CPU time; raises ``RuntimeError`` when nothing was sampled."""
        after = thread_cpu_s(self._pid)
        self._process.send_signal(signal.SIGINT)
        fault = self._process.communicate(timeout=STOP_TIMEOUT_S)[1].decode()
        if self._process.returncode or not self._stacks.is_file():
            raise RuntimeError(f"py-spy could not sample process {self._pid}: {fault.strip()[-500:]}")
        used = {thread_id: seconds - self._before.get(thread_id, 0.0) for thread_id, seconds in after.items()}
        with self._stacks.open() as lines:
            return shares(lines, used)

    def close(self) -> None:
        """End it, whatever became of it."""
        self._process.kill()
        self._process.communicate()


def thread_cpu_s(pid: int) -> dict[int, float]:
    """Return the CPU seconds of each thread of a process, from the scheduler's counts."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            pass  # it ended meanwhile
    return found


def shares(stacks: Iterable[str], cpu_s: Mapping[int, float]) -> dict[str, float]:
    """Return each group's share of the CPU time, from folded stacks with threads and the CPU of each thread."""
    samples: dict[int, Counter[str]] = {}
    waits: dict[int, Counter[str]] = {}
    for line in stacks:
        stack, _, count = line.rstrip("\n").rpartition(" ")
        frames = stack.split(";")
        thread = _THREAD.match(frames[0])
        if thread is not None:
            kind = waits if is_waiting(frames) else samples
            kind.setdefault(int(thread[1]), Counter())[group_of(frames[1:])] += int(count)
    total = sum(cpu_s.values()) or 1.0
    found: dict[str, float] = dict.fromkeys(GROUPS, 0.0)
    for thread_id, seconds in cpu_s.items():
        # A thread that was never seen at work had little of it, and did it where it was seen to wait.
        of_thread = samples.get(thread_id) or waits.get(thread_id)
        if of_thread is None:
            found[ZMQ_THREADS] += seconds / total
            continue
        for group, samples_of_group in of_thread.items():
            found[group] += seconds / total * samples_of_group / of_thread.total()
    return found


def is_waiting(frames: Sequence[str]) -> bool:
    """Return whether a stack (outermost frame first) ends in a wait."""
    return any(frame.partition(" (")[0] in WAITS for frame in frames[-WAIT_DEPTH:])


def group_of(frames: Iterable[str]) -> str:
    """Return what a stack (outermost frame first) is doing."""
    parsed = [(match[1], short_path(match[2])) for frame in frames if (match := _FRAME.fullmatch(frame)) is not None]
    is_event = any(path.startswith(EVENT_FRAMES) or function in EVENT_FUNCTIONS for function, path in parsed)
    for function, path in reversed(parsed):
        for beginning, pattern, group in LINES:
            if path.startswith(beginning) and re.fullmatch(pattern, function):
                return EVENTS if is_event and group not in (RECEIVE, SEND) else group
        if is_event and (path.startswith(EVENT_FRAMES) or function in EVENT_FUNCTIONS):
            return EVENTS
    return OTHER


def short_path(path: str) -> str:
    """Return a path from its package on, wherever the package is installed; ours as in the repository."""
    for root in sorted(sys.path, key=len, reverse=True):
        if root and path.startswith(f"{root}/"):
            path = path[len(root) + 1 :]
            break
    return path.removeprefix("src/").removeprefix("poolgrid/")


def profile_table(us: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a table of CPU µs per request by what they are spent for, with a column per load."""
    table = Table("CPU µs per request of our router", *us, title="where the CPU goes")
    for group in GROUPS:
        table.add_row(group, *(f"{each[group]:.1f} ({each[group] / sum(each.values()):.0%})" for each in us.values()))
    table.add_row("together", *(f"{sum(each.values()):.0f}" for each in us.values()))
    return table
