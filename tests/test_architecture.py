"""The layout shows the architecture, and these rules keep it so: who may import whom, and what is banned where.

``docs/architecture.md`` has a row for each package. Both name packages as their directories
are, without the ``poolgrid`` before it: ``test_import_names.py`` sees to that name.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from poolgrid.server.workers.engines.registry import engines

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "poolgrid"
PAGE = ROOT / "docs" / "architecture.md"

ANYTHING = ("",)

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "kernel.wire": (),
    "kernel.kv_events": ("kernel.wire",),
    "kernel.index": ("kernel.wire",),
    "kernel.decision": ("kernel.wire", "kernel.index.following_tokens"),
    "kernel.requests": ("kernel.wire",),
    "kernel.pool_grids": ("kernel.wire",),
    "kernel.consolidation": ("kernel.wire", "kernel.kv_events", "kernel.index.sharded_map"),
    "kernel.journal": ("kernel.wire", "kernel.consolidation"),
    "kernel.projection": ("kernel.wire", "kernel.index", "kernel.decision", "kernel.consolidation.session_table"),
    "kernel.routing": ("kernel.wire", "kernel.index", "kernel.decision", "kernel.projection"),
    "kernel.worker_protocol": ("kernel.wire", "kernel.kv_events"),
    "server.diagnosis": (),
    "server.structured_output": ("kernel.wire",),
    "server.forwarding": ("kernel.wire", "server.diagnosis"),
    "server.process": ("kernel.wire", "kernel.requests.log_fields", "kernel.requests.trace_record"),
    "server.transport": ("kernel.wire", "server.process"),
    "server.transport.publisher_sockets": ("kernel.wire", "kernel.kv_events", "server.process", "server.transport"),
    "server.http": ("kernel.wire", "server.process", "server.transport"),
    "server.discovery.registry": ("kernel.wire",),
    "server.discovery": ("kernel.wire", "server.process", "server.transport"),
    "server.frontend": (
        "kernel.wire",
        "kernel.requests",
        "server.process",
        "server.http",
        "server.structured_output",
    ),
    "server.serving.fair_queue": (),
    "server.serving": ("kernel.wire", "kernel.requests", "server.process", "server.transport"),
    "server.serving.router_settings": ("kernel.wire", "server.process", "server.http", "server.discovery"),
    "server.serving.router_process": (
        "kernel.wire",
        "kernel.requests",
        "server.process",
        "server.transport",
        "server.http",
        "server.discovery",
        "server.frontend",
        "server.serving",
    ),
    "server.consolidator": (
        "kernel.wire",
        "kernel.kv_events",
        "kernel.consolidation",
        "kernel.journal",
        "server.process",
        "server.transport",
        "server.http",
        "server.discovery",
    ),
    "server.proxy": (
        "kernel.wire",
        "kernel.requests",
        "server.forwarding",
        "server.process",
        "server.http",
        "server.frontend",
    ),
    "server.router": (
        "kernel.wire",
        "kernel.index",
        "kernel.decision",
        "kernel.projection",
        "kernel.routing",
        "kernel.requests",
        "kernel.consolidation",
        "kernel.journal",
        "server.diagnosis",
        "server.process",
        "server.transport",
        "server.http",
        "server.discovery",
        "server.frontend",
        "server.proxy",
        "server.serving",
        "server.consolidator",
    ),
    "server.global_router": (
        "kernel.wire",
        "kernel.requests",
        "kernel.pool_grids",
        "server.process",
        "server.transport",
        "server.http",
        "server.discovery",
        "server.forwarding",
        "server.frontend",
        "server.proxy",
        "server.serving",
    ),
    "server.workers.engines.server.core": ("kernel.wire", "kernel.kv_events", "kernel.worker_protocol"),
    "server.workers.engines.server.dialects": (
        "kernel.wire",
        "kernel.kv_events",
        "kernel.worker_protocol",
        "server.workers.engines.server",
    ),
    "server.workers": (
        "kernel.wire",
        "kernel.requests.log_fields",
        "kernel.requests.trace_record",
        "kernel.kv_events",
        "kernel.worker_protocol",
        "server.structured_output",
        "server.process",
        "server.transport",
        "server.http",
        "server.discovery",
    ),
    "server.cli": ("kernel", "server"),
    "plugins.simulated.core": ("kernel", "server.workers.timing"),
    "plugins.trtllm.core": ("kernel", "server.structured_output"),
    "plugins.engine_check.core": ("kernel", "server.diagnosis", "server.process.figures"),
    # Two plug-ins whose parts another one plays with: what it simulates, and the format of a trace.
    "plugins.simulation": ("kernel", "server", "plugins.simulated.core", "plugins.bench.trace"),
    "plugins": ("kernel", "server"),
}
"""What a package may import besides itself. The longest name that matches a module counts."""

RINGS = ("kernel", "server", "plugins")
"""From the inside out: a ring imports itself and those before it."""

KERNEL_LINES_MAX = 25_000
"""What one person can read in a week."""

NOT_YET_PLUGINS = {
    "sessions": ("kernel/consolidation/session_table.py", "kernel/routing/working_set.py", "router/session_naming.py"),
    "tenants": ("server/frontend/access",),
    "media": ("server/frontend/media",),
    "tensor transfer over NIXL": ("workers/tensor_transfer",),
    "Dynamo's documents": ("server/cli/dynamo_options.py", "server/cli/graph_deployment.py"),
}
"""Features that others import, so that they cannot be deleted. This list only shrinks."""

NOT_SHIPPED = ("tests", "lab")
"""Packages that may import anything of ours, because nothing of ours may import them."""

SERVICES = ("server.router", "server.global_router", "server.workers")
"""Processes that meet in ``kernel.wire`` and never import each other."""

PURE = (
    "kernel",
    "server.diagnosis",
    "server.forwarding",
    "server.structured_output",
    "server.discovery.registry",
    "plugins.kubernetes.slices",
    "server.serving.fair_queue",
    "server.router.examiner",
    "server.router.lane_placer",
    "server.router.turn_replay",
    "server.router.admission_review",
    "server.router.engine_backlog",
    "server.consolidator.loop_share",
    "server.workers.booked_prefill",
    "plugins.parsers",
    "plugins.policies",
    "server.global_router.document",
    "plugins.grid_builder",
    "server.workers.timing",
    "plugins.simulated.core",
    "plugins.trtllm.core",
    "server.workers.engines.server.core",
    "server.workers.engines.server.dialects",
    "plugins.engine_check.core",
)

WAITS = ("kernel.requests.token_delivery",)
"""Of the kernel alone, this module awaits: what reads an answer waits for its next tokens."""

BANNED_IN_PURE = {
    "asyncio": "a synchronous method; the shell calls it",
    "zmq": "bytes in and bytes out; sockets live in the shell",
    "socket": "bytes in and bytes out; sockets live in the shell",
    "threading": "a synchronous method; the shell decides where it runs",
    "time": "a time argument (now_ms)",
    "datetime": "a time argument (time_ms)",
    "random": "kernel.wire.hashing.stable_u64 of an id",
    "secrets": "an id argument",
    "uuid": "an id argument",
    "logging": "a counter or a returned value; the shell logs",
}

ENGINE_LIBRARIES = ("tensorrt_llm", "torch")
ENGINES = "server.workers.engines"
PROTOCOL = "kernel.worker_protocol.engine"
ENGINE_PLUGINS = ("plugins.simulated", "plugins.trtllm")
REGISTRY = "server.workers.engines.registry"
DIALECTS = f"{ENGINES}.server.dialects"
KINDS = [path.stem for path in (PACKAGE / "server/workers/engines/server/dialects").glob("[!_]*.py")]

WORDS_OF_ENGINES = {
    "plugins.simulated": ("simulated", "simulation"),
    "plugins.trtllm": ("trtllm", "tensorrt"),
    DIALECTS: (*KINDS, *(kind.replace("_", "-") for kind in KINDS)),
}
"""By the package of each engine: words that no module of ``workers`` has that is in no engine's package, the
registry excepted."""

BANNED_CALLS = {
    "print": "a logger, or sys.stdout.write for an answer of a command",
    "hash": "kernel.wire.hashing.stable_u64: hash() differs from process to process",
    "time.sleep": "the event itself: wait for it",
    "random.random": "random.Random(seed), or kernel.wire.hashing.stable_u64 of an id",
    "random.randint": "random.Random(seed), or kernel.wire.hashing.stable_u64 of an id",
    "random.choice": "random.Random(seed), or kernel.wire.hashing.stable_u64 of an id",
    "random.shuffle": "random.Random(seed), or kernel.wire.hashing.stable_u64 of an id",
    "random.seed": "random.Random(seed), or kernel.wire.hashing.stable_u64 of an id",
    "datetime.utcnow": "server.process.clock",
    "datetime.now": "server.process.clock",
}

SOCKETS = "server.transport.zmq_socket"
SOCKET_CALLS = {"socket": "make_socket", "connect": "connect", "bind": "bind or listen"}
"""What makes and opens ZMQ's sockets, which know addresses of one family until told otherwise, and what to use."""

TASKS = "server.process.tasks"
SPAWNS = {
    "create_task": "supervised, owned or detached",
    "ensure_future": "supervised, owned or detached",
    "run_coroutine_threadsafe": "wait_from_thread",
}
"""What starts a task, which would die unobserved. ``create_task`` of an ``asyncio.TaskGroup`` is fine: it owns them."""

OURS = {*RINGS, *NOT_SHIPPED}

PLUGIN_NAME = re.compile(r"poolgrid\.plugins(\.\w+)+(:\w+)?")
"""A text that can only be given to an importer."""


def _is_in(module: str, package: str) -> bool:
    return package == "" or module == package or module.startswith(package + ".")


def _package_of(module: str) -> str | None:
    """The entry of ``MAY_IMPORT`` that a module belongs to."""
    found = [package for package in MAY_IMPORT if _is_in(module, package)]
    return max(found, key=len) if found else None


@cache
def _imports(source: str) -> tuple[tuple[int, str], ...]:
    """Every imported module with its line; ``from a import b`` counts as ``a.b``, so that submodules are seen.

    Ours are given as their directories are named.
    """
    return tuple(_imports_of(ast.walk(ast.parse(source))))


def _imports_of(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.removeprefix("poolgrid.")
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level
            else:
                for alias in node.names:
                    yield node.lineno, f"{node.module}.{alias.name}".removeprefix("poolgrid.")


def _may_import(module: str, package: str, imported: str) -> bool:
    if imported.partition(".")[0] not in OURS:
        return True
    # A package may use itself; what lies inside it with rules of its own may not reach back up.
    itself = plugin_of(module) if package == "plugins" else package
    return any(_is_in(imported, allowed) for allowed in (itself, *MAY_IMPORT[package]))


def _names_plugin(value: object) -> bool:
    return isinstance(value, str) and PLUGIN_NAME.fullmatch(value) is not None


def plugin_of(module: str) -> str:
    """The plug-in that a module is of; empty = of none."""
    ring, _, rest = module.partition(".")
    return f"plugins.{rest.partition('.')[0]}" if ring == "plugins" and rest else ""


def _service_of(module: str) -> str:
    return next((service for service in SERVICES if _is_in(module, service)), "")


def _engine_of(module: str) -> str:
    """The engine in whose directory a module is; empty = in none."""
    return next((engine for engine in WORDS_OF_ENGINES if _is_in(module, engine)), "")


def words_of_engines(module: str, source: str) -> list[str]:
    """What a module that is in no engine's directory says of an engine, one line each."""
    if module == REGISTRY or _engine_of(module):
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


def _task_groups(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that ``async with asyncio.TaskGroup() as name`` binds."""
    return {
        item.optional_vars.id
        for node in nodes
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if isinstance(item.context_expr, ast.Call)
        and _call_name(item.context_expr) in ("asyncio.TaskGroup", "TaskGroup")
        and isinstance(item.optional_vars, ast.Name)
    }


def _spawns(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str, str]]:
    """Everything that starts a task outside ``process.tasks``: line, what it is, what to use."""
    groups = _task_groups(nodes)
    for node in nodes:
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


def _socket_calls(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Every call of a method that makes or opens a socket, in a module that knows ZMQ."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SOCKET_CALLS:
            yield node.lineno, node.func.attr


def faults(module: str, source: str) -> list[str]:
    """What a module's source does that the architecture does not allow, one line each."""
    nodes = tuple(ast.walk(ast.parse(source)))
    package = _package_of(module)
    assert package is not None, f"{module} belongs to no package of MAY_IMPORT"
    found = []
    for line, imported in _imports(source):
        where = f"{module}:{line}"
        top = imported.partition(".")[0]
        if imported.startswith("."):
            found.append(f"{where}: a relative import is banned here, use the full name")
            continue
        if not _may_import(module, package, imported):
            allowed = ", ".join(MAY_IMPORT[package]) or "nothing of ours"
            if plugin_of(imported):
                found.append(f"{where}: {imported} is banned here, use an entry point: nothing imports a plug-in")
            elif _service_of(imported) and _service_of(module):
                found.append(f"{where}: {imported} is banned here, use wire: services never import each other")
            else:
                found.append(f"{where}: {imported} is banned here, use only what {package} may import: {allowed}")
        if any(_is_in(module, pure) for pure in PURE) and top in BANNED_IN_PURE and module not in WAITS:
            found.append(f"{where}: {imported} is banned here (a pure core), use {BANNED_IN_PURE[top]}")
        if top in ENGINE_LIBRARIES and not any(_is_in(module, each) for each in (ENGINES, *ENGINE_PLUGINS)):
            found.append(f"{where}: {imported} is banned here, use an engine in {ENGINES}: only they import {top}")
        other = _engine_of(imported)
        if other and _is_in(module, "server.workers") and other != _engine_of(module) and module != REGISTRY:
            found.append(f"{where}: {imported} is banned here, use {PROTOCOL}: only {other} knows itself")
        if imported == "time.sleep":
            found.append(f"{where}: time.sleep is banned here, use {BANNED_CALLS['time.sleep']}")
    for node in nodes:
        if isinstance(node, ast.Call):
            name = _call_name(node)
            if name in BANNED_CALLS:
                found.append(f"{module}:{node.lineno}: {name}() is banned here, use {BANNED_CALLS[name]}")
        elif isinstance(node, ast.Constant) and not plugin_of(module) and _names_plugin(node.value):
            found.append(f"{module}:{node.lineno}: {node.value!r} is banned here, use the name of its entry point")
    if not _is_in(module, "server.transport") and any(name.partition(".")[0] == "zmq" for _, name in _imports(source)):
        found += [
            f"{module}:{line}: {name} of a ZMQ socket is banned here, use {SOCKETS}.{SOCKET_CALLS[name]}"
            for line, name in _socket_calls(nodes)
        ]
    if module != TASKS:
        found += [
            f"{module}:{line}: {name} is banned here, use {TASKS}: {instead}" for line, name, instead in _spawns(nodes)
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
        for _, imported in _imports(source):
            parts = imported.split(".")
            names = [".".join(parts[: end + 1]) for end in range(len(parts))]
            needed += [name for name in names if name in sources and name != module]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the three rings by its name without ``poolgrid.``; links are followed."""
    for folder, _, names in sorted(os.walk(PACKAGE, followlinks=True)):
        for path in sorted(Path(folder, name) for name in names if name.endswith(".py")):
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            if len(parts) > 1:
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def test_every_module_keeps_the_rules() -> None:
    found = [fault for module, path in modules() if module not in RINGS for fault in faults(module, path.read_text())]

    assert not found, "\n".join(["", *found])


def test_rings_import_inwards_only() -> None:
    """Whatever ``MAY_IMPORT`` says."""
    outward = [
        f"{module} imports {imported}"
        for module, path in modules()
        for _, imported in _imports(path.read_text())
        if imported.partition(".")[0] in RINGS[RINGS.index(module.partition(".")[0]) + 1 :]
    ]

    assert not outward


def test_the_kernel_can_be_read_in_a_week() -> None:
    lines = sum(path.read_text().count("\n") for module, path in modules() if _is_in(module, "kernel"))

    assert lines <= KERNEL_LINES_MAX, f"{lines} lines: what is no matter of routing belongs to the server"


def test_what_is_not_yet_a_plugin_is_there() -> None:
    places = [place for found in NOT_YET_PLUGINS.values() for place in found]

    assert not [place for place in places if not ((ROOT / place).exists() or (PACKAGE / place).exists())]


def test_engines_are_known_in_their_directories_only() -> None:
    found = [
        line
        for module, path in modules()
        if _is_in(module, "server.workers")
        for line in words_of_engines(module, path.read_text())
    ]

    assert not found, "\n".join(["", *found])


def test_every_engine_has_its_words() -> None:
    modules = {point.module.removeprefix("poolgrid.").removesuffix(".definition") for point in engines().values()}
    kinds = {f"{DIALECTS}.{kind}" for kind in KINDS}
    assert modules == {*ENGINE_PLUGINS, f"{ENGINES}.server", *kinds}
    assert set(WORDS_OF_ENGINES) == {*ENGINE_PLUGINS, DIALECTS}


def test_no_modules_import_each_other() -> None:
    found = circle({module: path.read_text() for module, path in modules()})

    assert not found, f"imports go round in a circle: {' -> '.join(found)}"


def test_every_package_has_a_rule_and_a_row() -> None:
    packages = {
        ".".join(path.relative_to(PACKAGE).parts[:2])
        for ring in RINGS
        for path in (PACKAGE / ring).iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    rows = re.findall(r"^\| (`\w+/`.*?) \|", PAGE.read_text(), re.MULTILINE)
    printed = {name for row in rows for name in re.findall(r"`(\w+)/`", row)}

    assert not {each for each in packages if _package_of(each) is None}, "say in MAY_IMPORT what they may import"
    assert not {each for each in packages if each.partition(".")[2] not in printed}, "docs/architecture.md lacks a row"


@pytest.mark.parametrize("package", [name for name in MAY_IMPORT if name.count(".") == 1 and "plugins" not in name])
def test_a_package_says_what_it_may_import(package: str) -> None:
    said = ast.get_docstring(ast.parse((PACKAGE / package.replace(".", "/") / "__init__.py").read_text())) or ""
    *_, rule = " ".join(said.split()).partition("May import ")

    for allowed in MAY_IMPORT[package]:
        assert f"``{allowed.partition('.')[2]}``" in rule or f" {allowed}" in f" {rule}", (package, allowed)
    assert rule, package


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("kernel.wire.codec", "import poolgrid.server.process.clock", "use only what kernel.wire may import"),
        ("kernel.wire.codec", "from poolgrid.server.process import clock", "process.clock is banned here"),
        (
            "server.frontend.app",
            "from poolgrid.kernel.routing.kv_policy import prompt_cost",
            "use only what server.frontend may import",
        ),
        (
            "server.router.service",
            "def f():\n    from poolgrid.server.workers.settings import WorkerSettings",
            "services never import each",
        ),
        (
            "server.workers.service",
            "import poolgrid.server.router.service",
            "use wire: services never import each other",
        ),
        (
            "kernel.decision.policy",
            "from poolgrid.server.router.settings import RouterSettings",
            "use only what kernel.decision may import",
        ),
        ("kernel.consolidation.cursor", "from poolgrid.kernel.projection.fleet import Fleet", "projection.fleet"),
        ("server.consolidator.service", "from poolgrid.server.router.service import RouterService", "router.service"),
        ("server.cli.main", "from poolgrid.plugins.simulation.pool import SimulatedPool", "use an entry point"),
        ("server.cli.main", "import_module('poolgrid.plugins.bench')", "use the name of its entry point"),
        ("plugins.nats.plane", "from poolgrid.plugins.kubernetes.pods import open_pods", "nothing imports a plug-in"),
        ("plugins.simulation.pool", "from poolgrid.plugins.bench.client import Client", "nothing imports a plug-in"),
        (
            "plugins.simulated.core.engine",
            "from poolgrid.plugins.simulated.opening import make_card",
            "nothing imports a plug-in",
        ),
        ("plugins.bench.client", "import tests.e2e", "tests.e2e is banned here"),
        ("kernel.decision.policy", "import time", "use a time argument"),
        ("plugins.simulated.core.engine", "from random import Random", "use kernel.wire.hashing.stable_u64"),
        ("kernel.worker_protocol.outbox", "import logging", "the shell logs"),
        ("server.router.service", "import torch", "only they import torch"),
        ("server.workers.service", "from tensorrt_llm.llmapi import LLM", "use an engine in server.workers.engines"),
        (
            "server.workers.service",
            "from poolgrid.plugins.simulated.opening import make_card",
            "only plugins.simulated knows itself",
        ),
        ("plugins.trtllm.engine", "def f():\n    import poolgrid.plugins.simulated.opening", "use an entry point"),
        ("server.router.service", "print('x')", "print() is banned here, use a logger"),
        ("server.router.service", "import time\ntime.sleep(1)", "time.sleep() is banned here"),
        ("server.router.service", "from time import sleep", "time.sleep is banned here"),
        ("kernel.decision.policy", "x = hash('a')", "use kernel.wire.hashing.stable_u64"),
        ("server.router.service", "from . import metrics", "a relative import is banned here, use the full name"),
        (
            "server.router.service",
            "import asyncio\nasyncio.create_task(f())",
            "use server.process.tasks: supervised, owned or detached",
        ),
        ("server.router.service", "loop.create_task(f())", "create_task is banned here"),
        ("server.router.service", "start = asyncio.ensure_future", "ensure_future is banned here"),
        ("server.router.service", "from asyncio import create_task", "create_task is banned here"),
        ("server.router.service", "asyncio.Task(f())", "Task() is banned here"),
        (
            "server.router.service",
            "asyncio.run_coroutine_threadsafe(f(), loop)",
            "use server.process.tasks: wait_from_thread",
        ),
        (
            "server.router.service",
            "asyncio.gather(*tasks, return_exceptions=True)",
            "use server.process.tasks: cancel_all",
        ),
        ("server.router.service", "def f(group):\n    group.create_task(g())", "create_task is banned here"),
        ("server.router.service", "import zmq\ndef f(context): return context.socket(zmq.SUB)", "make_socket"),
        ("server.router.service", "import zmq\ndef f(socket): socket.connect('tcp://[::1]:1')", "zmq_socket.connect"),
    ],
)
def test_a_breach_is_found_and_named(module: str, source: str, words: str) -> None:
    assert any(words in fault for fault in faults(module, source)), faults(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kernel.wire.codec", "from poolgrid.kernel.wire.errors import DecodeError"),
        ("server.router.service", "import time, zmq, asyncio, logging"),
        ("server.transport.dealer", "import zmq\nzmq.Context().socket(zmq.DEALER).connect('tcp://[::1]:1')"),
        ("server.router.service", "import sqlite3\nsqlite3.connect('kept')"),
        ("plugins.trtllm.engine", "import torch"),
        ("plugins.trtllm.engine", "from poolgrid.plugins.trtllm.calls import TrtllmCalls"),
        ("plugins.simulation.pool", "from poolgrid.plugins.simulated.core.engine import SimulatedEngine"),
        ("plugins.simulated.core.engine", "from poolgrid.kernel.worker_protocol.refusal import RefusedError"),
        ("plugins.bench.client", "from poolgrid.server.router.service import RouterService"),
        (
            "server.router.service",
            "async def f():\n    async with asyncio.TaskGroup() as group:\n        group.create_task(g())",
        ),
        ("server.router.service", "async def f(task: asyncio.Task[None]):\n    await asyncio.gather(task)"),
        ("server.process.tasks", "import asyncio\nasyncio.get_running_loop().create_task(f())"),
    ],
)
def test_what_is_allowed_is_not_complained_about(module: str, source: str) -> None:
    assert faults(module, source) == []


@pytest.mark.parametrize(
    "back",
    [
        "import poolgrid.server.router.service",
        "from poolgrid.server.router import service",
        "if TYPE_CHECKING:\n    from poolgrid.server.router.service import RouterService",
        "def f():\n    from poolgrid.server.router.service import RouterService",
    ],
)
def test_a_circle_of_imports_is_found_and_named(back: str) -> None:
    sources = {
        "server.router": "",
        "server.router.service": "from poolgrid.server.router.choosing import Chooser",
        "server.router.choosing": "import asyncio",
    }
    assert circle(sources) == []

    found = circle({**sources, "server.router.choosing": back})

    assert found[0] == found[-1]
    assert set(found) == {"server.router.service", "server.router.choosing"}


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("server.workers.service", "class TrtllmThing: ...", 1),
        ("server.workers.service", "# as TensorRT-LLM does", 1),
        ("server.workers.engines.lifecycle.loading", "x = trtllm_feed", 1),
        ("plugins.simulated.card", "# a simulated engine, not TensorRT-LLM", 0),
        ("plugins.trtllm.opening", "# TensorRT-LLM", 0),
        ("server.workers.engines.registry", "trtllm = simulated", 0),
    ],
)
def test_a_word_of_an_engine_is_found_where_no_engine_is(module: str, source: str, found: int) -> None:
    assert len(words_of_engines(module, source)) == found


def test_no_child_process_imports_from_the_directory_that_it_is_started_in() -> None:
    """``python -m`` puts that directory first, where a file may be called like one of ours."""
    started = []
    for _, path in modules():
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if "sys.executable" in source else ():
            words = [each for each in ast.iter_child_nodes(node) if isinstance(node, ast.Tuple | ast.List | ast.Call)]
            shown = [ast.unparse(each) for each in words]
            if "sys.executable" in shown and "'-m'" in shown:
                started.append(path.name)
                assert "'-P'" in shown[: shown.index("'-m'")], f"{path}: python -m without -P"

    assert {"part.py", "guide_check.py", "model_fetch.py"} <= set(started)
