"""The layout shows the architecture, and these rules keep it so: who may import whom, and what is banned where.

``docs/architecture.md`` has a row for each package. Both name packages as their directories
are, without the ``poolgrid`` before it: ``test_import_names.py`` sees to that name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from poolgrid.server.workers.engines.registry import engines

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "poolgrid"
PAGE = ROOT / "docs" / "architecture.md"

ANYTHING = ("",)

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "output_formats": (),
    "wire": ("output_formats",),
    "diagnosis": (),
    "kv_events": ("wire",),
    "kv_events.publisher_sockets": ("wire", "kv_events", "process", "transport"),
    "forwarding": ("wire", "diagnosis"),
    "structured_output": ("wire",),
    "process": ("wire",),
    "transport": ("wire", "process"),
    "http": ("wire", "process", "transport"),
    "inference": ("wire", "process.log_lines", "process.tracing.record"),
    "discovery.registry": ("wire",),
    "discovery": ("wire", "process", "transport"),
    "kubernetes.slices": ("wire", "discovery.registry"),
    "kubernetes": ("wire", "process", "http", "discovery"),
    "frontend": (
        "output_formats",
        "wire",
        "forwarding.multipart",
        "process",
        "http",
        "inference",
        "structured_output",
    ),
    "serving.fair_queue": (),
    "serving": ("wire", "process", "transport", "inference"),
    "serving.router_settings": ("wire", "process", "http", "discovery"),
    "serving.router_process": (
        "wire",
        "process",
        "transport",
        "http",
        "inference",
        "discovery",
        "frontend",
        "serving",
        "fleet_page",
    ),
    "consolidator.core": ("wire", "kv_events"),
    "consolidator": ("wire", "kv_events", "process", "transport", "http", "discovery"),
    "nats": ("wire", "process", "transport", "discovery", "consolidator"),
    "fleet_page": ("wire", "process", "frontend", "serving", "consolidator", "router", "global_router"),
    "router.core": (
        "wire",
        "diagnosis",
        "serving.fair_queue",
        "consolidator.core.session_table",
        "consolidator.core.sharded_map",
    ),
    "router.policies": ("wire", "router.core"),
    "proxy": (
        "forwarding",
        "wire",
        "process",
        "http",
        "inference",
        "frontend",
    ),
    "router": (
        "wire",
        "diagnosis",
        "process",
        "transport",
        "http",
        "inference",
        "discovery",
        "frontend",
        "proxy",
        "serving",
        "consolidator",
    ),
    "global_router.core": ("wire",),
    "global_router": (
        "wire",
        "process",
        "transport",
        "http",
        "inference",
        "discovery",
        "forwarding",
        "frontend",
        "proxy",
        "serving",
    ),
    "workers.core": ("wire", "kv_events"),
    "workers.engines.simulated.core": ("wire", "kv_events", "workers.core"),
    "workers.engines.trtllm.core": ("wire", "kv_events", "structured_output", "workers.core"),
    "workers.engines.trtllm.command": ("workers", "cli"),
    "workers.engines.server.core": ("wire", "kv_events", "workers.core"),
    "workers.engines.server.dialects": ("wire", "kv_events", "workers.core", "workers.engines.server"),
    "workers": ("wire", "kv_events", "structured_output", "process", "transport", "http", "discovery"),
    "tools.simulation": (
        "wire",
        "process",
        "router.core",
        "workers.core",
        "workers.engines.simulated.core",
        "serving.fair_queue",
        "tools.bench.trace",
        "consolidator.core",
        "router.decision_journal",
        "router.policy_loading",
        "cli",
    ),
    "tools.engine_check.core": ("wire", "diagnosis", "kv_events", "process.figures"),
    "tools.engine_check": ("wire", "diagnosis", "process", "transport", "workers.engines", "cli"),
    "tools.bench": ("wire", "process", "http", "frontend", "cli"),
    "tools": (),
    "cli": ANYTHING,
}
"""What a package may import besides itself. The longest name that matches a module counts."""

NOT_SHIPPED = ("tests", "lab")
"""Packages that may import anything of ours, because nothing of ours may import them."""

SERVICES = ("router", "global_router", "workers")
"""Processes that meet in ``wire`` and never import each other."""

PURE = (
    "output_formats",
    "wire",
    "diagnosis",
    "forwarding",
    "structured_output",
    "discovery.registry",
    "kubernetes.slices",
    "serving.fair_queue",
    "router.core",
    "router.policies",
    "consolidator.core",
    "global_router.core",
    "workers.core",
    "workers.engines.simulated.core",
    "workers.engines.trtllm.core",
    "workers.engines.server.core",
    "workers.engines.server.dialects",
    "tools.engine_check.core",
)

BANNED_IN_PURE = {
    "asyncio": "a synchronous method; the shell calls it",
    "zmq": "bytes in and bytes out; sockets live in the shell",
    "socket": "bytes in and bytes out; sockets live in the shell",
    "threading": "a synchronous method; the shell decides where it runs",
    "time": "a time argument (now_ms)",
    "datetime": "a time argument (time_ms)",
    "random": "wire.hashing.stable_u64 of an id",
    "secrets": "an id argument",
    "uuid": "an id argument",
    "logging": "a counter or a returned value; the shell logs",
}

ENGINE_LIBRARIES = ("tensorrt_llm", "torch")
ENGINES = "workers.engines"
REGISTRIES = ("workers.engines.registry", "workers.engines.server.definition")
"""Tables of what engines and kinds of servers there are."""

WORDS_OF_ENGINES = {
    "simulated": ("simulated", "simulation"),
    "trtllm": ("trtllm", "tensorrt"),
    "server.dialects": ("vllm", "sglang", "trtllm-serve", "trtllm_serve"),
}
"""By the directory of each engine: words that no module of ``workers`` has that is in no
engine's directory, the registries excepted."""

BANNED_CALLS = {
    "print": "a logger, or sys.stdout.write for an answer of a command",
    "hash": "wire.hashing.stable_u64: hash() differs from process to process",
    "time.sleep": "the event itself: wait for it",
    "random.random": "random.Random(seed), or wire.hashing.stable_u64 of an id",
    "random.randint": "random.Random(seed), or wire.hashing.stable_u64 of an id",
    "random.choice": "random.Random(seed), or wire.hashing.stable_u64 of an id",
    "random.shuffle": "random.Random(seed), or wire.hashing.stable_u64 of an id",
    "random.seed": "random.Random(seed), or wire.hashing.stable_u64 of an id",
    "datetime.utcnow": "process.clock",
    "datetime.now": "process.clock",
}

SOCKETS = "transport.zmq_socket"
SOCKET_CALLS = {"socket": "make_socket", "connect": "connect", "bind": "bind or listen"}
"""What makes and opens ZMQ's sockets, which know addresses of one family until told otherwise, and what to use."""

TASKS = "process.tasks"
SPAWNS = {
    "create_task": "supervised, owned or detached",
    "ensure_future": "supervised, owned or detached",
    "run_coroutine_threadsafe": "wait_from_thread",
}
"""What starts a task, which would die unobserved. ``create_task`` of an ``asyncio.TaskGroup`` is fine: it owns them."""

OURS = {name.partition(".")[0] for name in MAY_IMPORT} | set(NOT_SHIPPED)


def _is_in(module: str, package: str) -> bool:
    return package == "" or module == package or module.startswith(package + ".")


def _package_of(module: str) -> str | None:
    """The entry of ``MAY_IMPORT`` that a module belongs to."""
    found = [package for package in MAY_IMPORT if _is_in(module, package)]
    return max(found, key=len) if found else None


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every imported module with its line; ``from a import b`` counts as ``a.b``, so that submodules are seen.

    Ours are given as their directories are named.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.removeprefix("poolgrid.")
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level
            else:
                for alias in node.names:
                    yield node.lineno, f"{node.module}.{alias.name}".removeprefix("poolgrid.")


def _may_import(package: str, imported: str) -> bool:
    if imported.partition(".")[0] not in OURS:
        return True
    # A package may use itself; what lies inside it with rules of its own may not reach back up.
    return any(_is_in(imported, allowed) for allowed in (package, *MAY_IMPORT[package]))


def _engine_of(module: str) -> str:
    """The engine in whose directory a module is; empty = in none."""
    return next((engine for engine in WORDS_OF_ENGINES if _is_in(module, f"{ENGINES}.{engine}")), "")


def words_of_engines(module: str, source: str) -> list[str]:
    """What a module that is in no engine's directory says of an engine, one line each."""
    if module in REGISTRIES or _engine_of(module):
        return []
    return [
        f"{module}:{number}: {word!r} is banned here, say what any engine has: {engine} is known in its directory only"
        for engine, words in WORDS_OF_ENGINES.items()
        for number, line in enumerate(source.splitlines(), 1)
        for word in words
        if word in line.lower()
    ]


def _call_name(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return ""


def _task_groups(tree: ast.AST) -> set[str]:
    """Names that ``async with asyncio.TaskGroup() as name`` binds."""
    return {
        item.optional_vars.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if isinstance(item.context_expr, ast.Call)
        and _call_name(item.context_expr) in ("asyncio.TaskGroup", "TaskGroup")
        and isinstance(item.optional_vars, ast.Name)
    }


def _spawns(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Everything that starts a task outside ``process.tasks``: line, what it is, what to use."""
    groups = _task_groups(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in SPAWNS:
            if not (isinstance(node.value, ast.Name) and node.value.id in groups):
                yield node.lineno, node.attr, SPAWNS[node.attr]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name in SPAWNS:
                    yield node.lineno, alias.name, SPAWNS[alias.name]
        elif isinstance(node, ast.Call):
            if _call_name(node) in ("asyncio.Task", "Task"):
                yield node.lineno, "Task()", SPAWNS["create_task"]
            if any(keyword.arg == "return_exceptions" for keyword in node.keywords):
                yield node.lineno, "gather with return_exceptions, which keeps them to itself,", "cancel_all"


def _socket_calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every call of a method that makes or opens a socket, in a module that knows ZMQ."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SOCKET_CALLS:
            yield node.lineno, node.func.attr


def faults(module: str, source: str) -> list[str]:
    """What a module's source does that the architecture does not allow, one line each."""
    tree = ast.parse(source)
    package = _package_of(module)
    assert package is not None, f"{module} belongs to no package of MAY_IMPORT"
    found = []
    for line, imported in _imports(tree):
        where = f"{module}:{line}"
        top = imported.partition(".")[0]
        if imported.startswith("."):
            found.append(f"{where}: a relative import is banned here, use the full name")
            continue
        if not _may_import(package, imported):
            allowed = ", ".join(MAY_IMPORT[package]) or "nothing of ours"
            service = module.partition(".")[0]
            if top in SERVICES and service in SERVICES and top != service:
                found.append(f"{where}: {imported} is banned here, use wire: services never import each other")
            else:
                found.append(f"{where}: {imported} is banned here, use only what {package} may import: {allowed}")
        if any(_is_in(module, pure) for pure in PURE) and top in BANNED_IN_PURE:
            found.append(f"{where}: {imported} is banned here (a pure core), use {BANNED_IN_PURE[top]}")
        if top in ENGINE_LIBRARIES and not _is_in(module, ENGINES):
            found.append(f"{where}: {imported} is banned here, use an engine in {ENGINES}: only they import {top}")
        other = _engine_of(imported)
        if other and package.partition(".")[0] == "workers" and other != _engine_of(module):
            found.append(f"{where}: {imported} is banned here, use {ENGINES}.protocol: only {other} knows itself")
        if imported == "time.sleep":
            found.append(f"{where}: time.sleep is banned here, use {BANNED_CALLS['time.sleep']}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _call_name(node)
            if name in BANNED_CALLS:
                found.append(f"{module}:{node.lineno}: {name}() is banned here, use {BANNED_CALLS[name]}")
    if not _is_in(module, "transport") and any(name.partition(".")[0] == "zmq" for _, name in _imports(tree)):
        found += [
            f"{module}:{line}: {name} of a ZMQ socket is banned here, use {SOCKETS}.{SOCKET_CALLS[name]}"
            for line, name in _socket_calls(tree)
        ]
    if module != TASKS:
        found += [
            f"{module}:{line}: {name} is banned here, use {TASKS}: {instead}" for line, name, instead in _spawns(tree)
        ]
    return found


def circle(sources: Mapping[str, str]) -> list[str]:
    """Modules that import each other in a circle, the first also last; empty when there is none.

    Every import counts, in functions and for types alone too: modules that know each other, at whatever time, are one
    module in two files. What the one needs of the other is a protocol beside it, or an argument. Importing a module
    imports the packages it is in.
    """
    graph: dict[str, list[str]] = {}
    for module, source in sources.items():
        graph[module] = needed = []
        for _, imported in _imports(ast.parse(source)):
            parts = imported.split(".")
            names = [".".join(parts[: end + 1]) for end in range(len(parts))]
            needed += [name for name in names if name in sources and name != module]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _modules() -> Iterator[tuple[str, Path]]:
    for top in sorted({name.partition(".")[0] for name in MAY_IMPORT}):
        directory = (PACKAGE / top).resolve()
        for path in sorted(directory.rglob("*.py")):
            parts = (top, *path.relative_to(directory).with_suffix("").parts)
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def test_every_module_keeps_the_rules() -> None:
    found = [fault for module, path in _modules() for fault in faults(module, path.read_text())]

    assert not found, "\n".join(["", *found])


def test_engines_are_known_in_their_directories_only() -> None:
    found = [
        line
        for module, path in _modules()
        if _is_in(module, "workers")
        for line in words_of_engines(module, path.read_text())
    ]

    assert not found, "\n".join(["", *found])


def test_nothing_imports_tensorrt_llms_folder() -> None:
    """It may be deleted: its engine and its command are found by name."""
    words = re.compile(r"(?:from|import) poolgrid\.plugins\.trtllm\b")
    found = [
        module
        for module, path in _modules()
        if not module.startswith("workers.engines.trtllm") and words.search(path.read_text())
    ]

    assert not found


def test_every_engine_has_its_words() -> None:
    prefix = "poolgrid.server.workers.engines."
    ours = [point.module.removeprefix(prefix) for point in engines().values() if point.module.startswith(prefix)]
    assert {engine.partition(".")[0] for engine in WORDS_OF_ENGINES} == {module.partition(".")[0] for module in ours}
    directories = {path.parent.name for path in (ROOT / ENGINES.replace(".", "/")).glob("*/definition.py")}
    assert directories == {engine.partition(".")[0] for engine in WORDS_OF_ENGINES}


def test_no_modules_import_each_other() -> None:
    found = circle({module: path.read_text() for module, path in _modules()})

    assert not found, f"imports go round in a circle: {' -> '.join(found)}"


def test_every_package_has_a_rule() -> None:
    packages = {path.parent.name for path in (*ROOT.glob("*/__init__.py"), *PACKAGE.glob("*/__init__.py"))}

    assert not packages - OURS, (
        f"say in MAY_IMPORT what {sorted(packages - OURS)} may import, and in docs/architecture.md what it is for"
    )


def test_the_page_has_a_row_for_every_package() -> None:
    printed = set(re.findall(r"^\| `(\w+)/` \|", PAGE.read_text(), re.MULTILINE))

    for package in {each.partition(".")[0] for each in MAY_IMPORT}:
        if (PACKAGE / package).is_dir():
            assert package in printed, f"docs/architecture.md has no row for `{package}/`"


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("wire.codec", "import poolgrid.server.process.clock", "use only what wire may import: output_formats"),
        ("wire.codec", "from poolgrid.server.process import clock", "process.clock is banned here"),
        (
            "frontend.app",
            "from poolgrid.kernel.routing.kv_policy import prompt_cost",
            "use only what frontend may import",
        ),
        (
            "router.service",
            "def f():\n    from poolgrid.server.workers.settings import WorkerSettings",
            "services never import each",
        ),
        ("workers.service", "import poolgrid.server.router.service", "use wire: services never import each other"),
        (
            "router.core.policy",
            "from poolgrid.server.router.settings import RouterSettings",
            "use only what router.core may import",
        ),
        ("consolidator.core.cursor", "from poolgrid.kernel.projection.fleet import Fleet", "router.core.fleet"),
        ("consolidator.service", "from poolgrid.server.router.service import RouterService", "router.service"),
        (
            "tools.simulation.pool",
            "from poolgrid.server.router.service import RouterService",
            "router.service.RouterService is banned here",
        ),
        ("tools.bench.client", "import tests.e2e", "tests.e2e is banned here"),
        ("router.core.policy", "import time", "use a time argument"),
        ("workers.engines.simulated.core.engine", "from random import Random", "use wire.hashing.stable_u64"),
        ("workers.core.outbox", "import logging", "the shell logs"),
        ("router.service", "import torch", "only they import torch"),
        ("workers.service", "from tensorrt_llm.llmapi import LLM", "use an engine in workers.engines"),
        (
            "workers.service",
            "from poolgrid.plugins.simulated.opening import make_card",
            "only simulated knows itself",
        ),
        (
            "workers.engines.trtllm.engine",
            "def f():\n    import poolgrid.plugins.simulated.opening",
            "only simulated knows itself",
        ),
        ("router.service", "print('x')", "print() is banned here, use a logger"),
        ("router.service", "import time\ntime.sleep(1)", "time.sleep() is banned here"),
        ("router.service", "from time import sleep", "time.sleep is banned here"),
        ("router.core.policy", "x = hash('a')", "use wire.hashing.stable_u64"),
        ("router.service", "from . import metrics", "a relative import is banned here, use the full name"),
        (
            "router.service",
            "import asyncio\nasyncio.create_task(f())",
            "use process.tasks: supervised, owned or detached",
        ),
        ("router.service", "loop.create_task(f())", "create_task is banned here"),
        ("router.service", "start = asyncio.ensure_future", "ensure_future is banned here"),
        ("router.service", "from asyncio import create_task", "create_task is banned here"),
        ("router.service", "asyncio.Task(f())", "Task() is banned here"),
        ("router.service", "asyncio.run_coroutine_threadsafe(f(), loop)", "use process.tasks: wait_from_thread"),
        ("router.service", "asyncio.gather(*tasks, return_exceptions=True)", "use process.tasks: cancel_all"),
        ("router.service", "def f(group):\n    group.create_task(g())", "create_task is banned here"),
        ("router.service", "import zmq\ndef f(context): return context.socket(zmq.SUB)", "make_socket"),
        ("router.service", "import zmq\ndef f(socket): socket.connect('tcp://[::1]:1')", "zmq_socket.connect"),
    ],
)
def test_a_breach_is_found_and_named(module: str, source: str, words: str) -> None:
    assert any(words in fault for fault in faults(module, source)), faults(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("wire.codec", "from poolgrid.kernel.wire.errors import DecodeError"),
        ("router.service", "import time, zmq, asyncio, logging"),
        ("transport.dealer", "import zmq\nzmq.Context().socket(zmq.DEALER).connect('tcp://[::1]:1')"),
        ("router.service", "import sqlite3\nsqlite3.connect('kept')"),
        ("workers.engines.trtllm.engine", "import torch"),
        ("workers.engines.trtllm.engine", "from poolgrid.plugins.trtllm.calls import TrtllmCalls"),
        ("tools.simulation.pool", "from poolgrid.plugins.simulated.core.engine import SimulatedEngine"),
        ("workers.engines.simulated.core.engine", "from poolgrid.kernel.worker_protocol.refusal import RefusedError"),
        ("cli.main", "from poolgrid.plugins.simulation.pool import SimulatedPool"),
        (
            "router.service",
            "async def f():\n    async with asyncio.TaskGroup() as group:\n        group.create_task(g())",
        ),
        ("router.service", "async def f(task: asyncio.Task[None]):\n    await asyncio.gather(task)"),
        ("process.tasks", "import asyncio\nasyncio.get_running_loop().create_task(f())"),
    ],
)
def test_what_is_allowed_is_not_complained_about(module: str, source: str) -> None:
    assert faults(module, source) == []


@pytest.mark.parametrize(
    "back",
    [
        "import poolgrid.server.router.service",
        "from poolgrid.server.router import service",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from poolgrid.server.router.service import RouterService",
        "def f():\n    from poolgrid.server.router.service import RouterService",
    ],
)
def test_a_circle_of_imports_is_found_and_named(back: str) -> None:
    sources = {
        "router": "",
        "router.service": "from poolgrid.server.router.choosing import Chooser",
        "router.choosing": "import asyncio",
    }
    assert circle(sources) == []

    found = circle({**sources, "router.choosing": back})

    assert found[0] == found[-1]
    assert set(found) == {"router.service", "router.choosing"}


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("workers.service", "class TrtllmThing: ...", 1),
        ("workers.service", "# as TensorRT-LLM does", 1),
        ("workers.engines.lifecycle.loading", "x = trtllm_feed", 1),
        ("workers.engines.simulated.card", "# a simulated engine, not TensorRT-LLM", 0),
        ("workers.engines.trtllm.opening", "# TensorRT-LLM", 0),
        ("workers.engines.registry", "trtllm = simulated", 0),
    ],
)
def test_a_word_of_an_engine_is_found_where_no_engine_is(module: str, source: str, found: int) -> None:
    assert len(words_of_engines(module, source)) == found


def test_no_child_process_imports_from_the_directory_that_it_is_started_in() -> None:
    """``python -m`` puts that directory first, where a file may be called like one of ours."""
    started = []
    for _, path in _modules():
        for node in ast.walk(ast.parse(path.read_text())):
            words = [each for each in ast.iter_child_nodes(node) if isinstance(node, ast.Tuple | ast.List | ast.Call)]
            shown = [ast.unparse(each) for each in words]
            if "sys.executable" in shown and "'-m'" in shown:
                started.append(path.name)
                assert "'-P'" in shown[: shown.index("'-m'")], f"{path}: python -m without -P"

    assert {"part.py", "guide_check.py", "model_fetch.py"} <= set(started)
