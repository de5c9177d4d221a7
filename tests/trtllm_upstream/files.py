"""Upstream's files in a folder: loaded by path between stubs, or read as source where they need the compiled library.

The folder is a checkout, an installation, or single files at their places (``tensorrt_llm/runtime/…``). Nothing of it
becomes a part of this repository.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from poolgrid.plugins.trtllm.arguments.installed import version_in

PACKAGE = "tensorrt_llm"
HASH = "runtime/kv_cache_hash.py"
COMMON = "runtime/kv_cache_manager_v2/_common.py"
EVENTS = "runtime/kv_cache_manager_v2/_event_manager.py"
TREE = "runtime/kv_cache_manager_v2/_block_radix_tree.py"
PUBLISHER = "_torch/pyexecutor/kv_cache_events.py"
FANOUT = "serve/kv_event_fanout.py"
CONVERSATION = "serve/conversation_id.py"
REQUESTS = "serve/openai_protocol.py"
ARGUMENTS = "llmapi/llm_args.py"
DISAGGREGATED = "disaggregated_params.py"
SAMPLING = "sampling_params.py"


@dataclass
class StoredInStream:
    """What the compiled library's sink hands the publisher of a stored chain."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int | str]
    lora_id: int | None = None
    mm_keys: list[list[tuple[Any, ...]]] = field(default_factory=list)


@dataclass
class RemovedInStream:
    """What it hands over of removed blocks."""

    block_hashes: list[int]


class Sink:
    """The compiled library's sink, filled by a test."""

    def __init__(self, **_: Any) -> None:
        self.events: deque[StoredInStream | RemovedInStream] = deque()

    def drain_iteration_events(self) -> list[StoredInStream | RemovedInStream]:
        taken = list(self.events)
        self.events.clear()
        return taken


class UpstreamFiles:
    """The files of one version."""

    def __init__(self, folder: Path) -> None:
        inner = folder / PACKAGE
        self.folder = inner if inner.is_dir() else folder

    @property
    def version(self) -> str:
        return version_in(self.folder) or "unknown"

    def text(self, name: str) -> str | None:
        file = self.folder / name
        return file.read_text(encoding="utf-8") if file.is_file() else None

    def load(self, name: str, *before: str) -> Any:
        """Return a module, or ``None`` where its file is absent; files that it imports come ``before``."""
        if self.text(name) is None:
            return None
        with _stubs():
            for each in before:
                if self.text(each) is not None:
                    self._run(each)
            return self._run(name)

    def fields(self, name: str, kind: str) -> dict[str, str] | None:
        """Return a class's annotated fields as written; ``None`` where file or class is absent."""
        text = self.text(name)
        for node in ast.parse(text).body if text else ():
            if isinstance(node, ast.ClassDef) and node.name == kind:
                return {
                    each.target.id: ast.unparse(each.annotation)
                    for each in node.body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                }
        return None

    def part(self, name: str, *defined: str, **given: object) -> dict[str, Any]:
        """Return what some classes and functions of a file are, with what ``given`` stands for besides; the rest of the
        file is not run."""
        text = self.text(name)
        wanted = [
            each
            for each in ast.parse(text or "").body
            if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name in defined
        ]
        code = ast.parse("from __future__ import annotations")
        code.body += wanted
        scope = dict(given)
        exec(compile(code, name, "exec"), scope)
        return scope

    def _run(self, name: str) -> ModuleType:
        dotted = f"{PACKAGE}.{name.removesuffix('.py').replace('/', '.')}"
        spec = importlib.util.spec_from_file_location(dotted, self.folder / name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[dotted] = module
        spec.loader.exec_module(module)
        return module


@contextmanager
def _stubs() -> Iterator[None]:
    """Put stubs in the place of the package, so that a file's imports are met; afterwards all is as before."""
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == PACKAGE}
    log = SimpleNamespace(**dict.fromkeys(("debug", "info", "warning", "error"), lambda *_, **__: None))
    manager = {
        "StreamingEventSink": Sink,
        "StreamingBlockStoredData": StoredInStream,
        "StreamingBlockRemovedData": RemovedInStream,
        "KVCacheEvent": object,
    }
    common = {"GPU_LEVEL": 0, "PRIORITY_DEFAULT": 35, "CacheLevel": int, "Priority": int, "TokenIdExt": object}
    contents: dict[str, dict[str, Any]] = {
        "": {},
        ".logger": {"logger": log},
        ".envs": {"get_env": lambda _: 0},
        ".llmapi": {},
        ".llmapi.llm_args": {"KVEventsConfig": SimpleNamespace},
        ".runtime": {},
        ".runtime.kv_cache_manager_v2": manager,
        ".runtime.kv_cache_manager_v2._common": common,
    }
    try:
        for name, content in contents.items():
            module = ModuleType(PACKAGE + name)
            module.__path__ = []
            vars(module).update(content)
            sys.modules[PACKAGE + name] = module
            above, _, last = (PACKAGE + name).rpartition(".")
            if above:
                setattr(sys.modules[above], last, module)
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        sys.modules.update(before)
