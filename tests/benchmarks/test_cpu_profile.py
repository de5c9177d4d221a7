from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from lab.benchmarks.cpu_profile import GROUPS, LINES, find_py_spy, group_of, shares, short_path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "poolgrid"
RUN = [
    "run_service (cli/service_process.py:35)",
    "run (process/lifecycle.py:40)",
    "Runner.run (asyncio/runners.py:86)",
]
SERVE = [
    "InferenceEndpoint.__call__ (frontend/inference_endpoint.py:104)",
    "_Exchange.run (frontend/inference_endpoint.py:151)",
]
DRAIN = "CallbackSocket._drain (transport/zmq_socket.py:68)"
FOLD = ["JournalApplier.on_records (router/journal_applier.py:3)", "PrefixIndex.store (router/core/prefix_index.py:4)"]
DISPATCH = ["RouterService.submit (router/service.py:340)", "RouterService._dispatch (router/service.py:520)"]


@pytest.mark.parametrize(
    ("inner", "group"),
    [
        ([], "event loop"),
        (["RequestParser.on_message_complete (http/request_parser.py:177)"], "HTTP parse"),
        (SERVE, "endpoint"),
        ([*SERVE, "parse (frontend/schema.py:328)"], "preparation"),
        ([*SERVE, "_Fastokens.encode (frontend/prompt_encoder.py:81)"], "tokenization"),
        ([*SERVE, *DISPATCH], "dispatch encode"),
        ([*SERVE, *DISPATCH, "Selector.select (router/core/selector.py:115)"], "decision"),
        ([*SERVE, *DISPATCH, "Selector.book (router/core/selector.py:2)", "__init__ (<string>:2)"], "decision"),
        ([*SERVE, *DISPATCH, "DecisionLog.add (router/core/decision.py:172)"], "recording"),
        ([*SERVE, *DISPATCH, "Socket.send (zmq/sugar/socket.py:638)"], "ZMQ send"),
        ([DRAIN], "ZMQ receive"),
        ([DRAIN, "WorkerLink.on_frame (serving/links.py:116)"], "token intake"),
        ([*SERVE, *DISPATCH, "Socket.send (zmq/sugar/socket.py:6)", "0x7f (zmq/backend/cython/_zmq.so)"], "ZMQ send"),
        ([*SERVE, "_Exchange._whole (frontend/inference_endpoint.py:371)"], "answer encode"),
        ([*SERVE, "HttpExchange._send_body (http/exchange.py:87)"], "write"),
        (FOLD, "event stream"),
        ([*FOLD, "Socket.recv_multipart (zmq/sugar/socket.py:785)"], "ZMQ receive"),
        (["f (elsewhere/else.py:1)"], "event loop"),
    ],
)  # fmt: skip
def test_a_stack_counts_for_the_innermost_frame_that_says_what_is_done(inner: list[str], group: str) -> None:
    assert group_of([*RUN, *inner]) == group


def test_a_stack_of_nothing_known_is_other() -> None:
    assert group_of(["f (elsewhere/else.py:1)"]) == "other"


def test_shares_are_weighted_with_the_cpu_of_threads_and_add_up() -> None:
    stacks = [
        f"thread (1): MainThread;{';'.join([*RUN, *SERVE])} 3\n",
        f"thread (1): MainThread;{';'.join(RUN)};uv_run (core.c:464);read (libc.so.6) 1\n",
        f"thread (1): MainThread;{';'.join(RUN)};uv__io_poll (linux.c:1452);epoll_pwait (libc.so.6) 500\n",
        "thread (2): pool;_worker (concurrent/futures/thread.py:69);PyThread_acquire_lock_timed (p.so);f (c) 900\n",
    ]

    found = shares(stacks, {1: 8.0, 2: 1.0, 3: 1.0})

    assert found["endpoint"] == pytest.approx(0.6)
    assert found["event loop"] == pytest.approx(0.2)
    assert found["tokenization"] == pytest.approx(0.1)
    assert found["ZMQ threads"] == pytest.approx(0.1)
    assert sum(found.values()) == pytest.approx(1)


def _functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            found |= {f"{owner.name}.{each.name}" for each in owner.body if hasattr(each, "name")}
    return found


@pytest.mark.parametrize(("path", "pattern", "group"), LINES)
def test_a_line_names_a_file_and_functions_that_exist(path: str, pattern: str, group: str) -> None:
    top = path.partition("/")[0]
    found = PACKAGE / path

    assert group in GROUPS
    assert found.exists() or (not (PACKAGE / top).is_dir() and importlib.util.find_spec(top) is not None)
    if found.is_file():
        assert any(re.fullmatch(pattern, function) for function in _functions(found)), pattern


@pytest.mark.parametrize("installed", ["src/poolgrid", "poolgrid"])
def test_a_path_is_shown_from_its_package_on(installed: str) -> None:
    assert short_path(str(ROOT / installed / "router" / "service.py")) == "router/service.py"


def test_a_missing_profiler_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(FileNotFoundError, match="no py-spy beside"):
        find_py_spy(str(tmp_path / "python"))
