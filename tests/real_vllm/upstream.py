"""vLLM's own tests of its HTTP API: alone, and through ``poolgrid up --engine-url``. None of them is kept here."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.real_vllm.servers import ARGUMENTS, ENVIRONMENT, START_TIMEOUT_S
from tests.real_vllm.varying import Settled, settle

ENTRYPOINTS = "tests/entrypoints"

CHOSEN = (
    "anthropic/test_messages.py",
    "generate/generative_scoring/test_generative_scoring_e2e.py",
    "generate/structured_decisions/test_structured_decisions_e2e.py",
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_root_path.py",
    "openai/chat_completion/test_thinking_token_budget.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/models/test_models.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_errors.py",
    "openai/responses/test_function_call.py",
    "openai/responses/test_namespace_tool_separator.py",
    "openai/responses/test_parsable_context.py",
    "openai/responses/test_simple.py",
    "openai/responses/test_stateful.py",
    "openai/responses/test_structured_output.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "pooling/basic/test_truncation.py",
    "pooling/embed/test_cohere_online.py",
    "pooling/embed/test_cohere_openai_parity.py",
    "pooling/embed/test_online.py",
    "pooling/scoring/test_bi_encoder_online.py",
    "pooling/token_embed/test_online.py",
    "scale_out/derender/test_derender.py",
    "scale_out/render/test_render.py",
    "scale_out/token_in_token_out/test_serving_tokens.py",
    "serve/instrumentator/test_orca_metrics.py",
    "serve/sagemaker/test_sagemaker_stateful_sessions.py",
    "serve/tokenize/test_tokenization.py",
)
"""Those that start a server and speak HTTP with it. Left out: what needs another model (images, audio, classifiers,
cross-encoders, quantization, Harmony, correctness of answers), what operators alone may call (weights, sleep, RPC,
metrics), keys of the server itself, sockets of Unix, and tests that run inside the server."""

MAKE_ADAPTER = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
torch.manual_seed(11)
folder, names = Path(sys.argv[1]), ("q_proj",)
shapes = {"lora_A": (8, 256), "lora_B": (256, 8)}
save_file({f"base_model.model.model.layers.{layer}.self_attn.{name}.{part}.weight": torch.randn(shape) / 16
    for layer in range(2) for name in names for part, shape in shapes.items()}, folder / "adapter_model.safetensors")
(folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8,
    "lora_alpha": 16, "target_modules": list(names), "bias": "none", "base_model_name_or_path": "tiny"}))
"""
"""For the model of ``MAKE_MODEL``."""

FOR_OPERATORS = "test_stream_delivers_abort_finish_chunk"
"""A test that ends requests by their ids at ``/inference/v1/abort_requests``, which may end those of any client."""
ROUTER_OPTIONS = ("--log-level", "error", "--part-option", "router.max-body-bytes=134217728")
"""A test of the limits of ``derender`` sends 63 MB, twice what a router takes by default."""
TEST_TIMEOUT_S = 180
MODULE_TIMEOUT_S = 1800

Outcomes = dict[str, str]


class Lost(Exception):
    """Tests that pass against vLLM alone fail through the router."""


class Suite:
    """A copy of upstream's tests, and how they are run."""

    def __init__(self, vllm: Path, model: Path, source: Path, folder: Path) -> None:
        self._vllm, self._model, self._folder = vllm, model, folder / "upstream"
        # A copy, because the source beside its tests would be imported in place of what is installed.
        for name in ("tests", "examples"):
            shutil.copytree(source / name, self._folder / name)
        self._adapter = self._folder / "adapter"
        self._adapter.mkdir()
        python = str(vllm / "bin" / "python")
        subprocess.run([python, "-c", MAKE_ADAPTER, str(self._adapter)], check=True, capture_output=True, timeout=300)
        shutil.copy(Path(__file__).with_name("upstream_plugin.py"), self._folder)

    def run(self, tests: Sequence[str], through: bool) -> Outcomes:
        """Run tests by their paths or names; a server of theirs that runs already is used."""
        outcomes = self._folder / "outcomes.json"
        outcomes.unlink(missing_ok=True)
        settings = {
            "model": str(self._model),
            "adapter": str(self._adapter),
            "folder": str(self._folder),
            "start_s": START_TIMEOUT_S,
            "arguments": ["--enable-scale-out", *ARGUMENTS[2:]],
            "router": [sys.executable, "-m", "poolgrid", "up", *ROUTER_OPTIONS] if through else [],
            "router_environment": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            "outcomes": str(outcomes),
        }
        path = f"{self._vllm / 'bin'}:{os.environ['PATH']}"
        own = {"PATH": path, "PYTHONPATH": str(self._folder), "POOLGRID_UPSTREAM": json.dumps(settings)}
        with (self._folder / "tests.log").open("ab") as log:
            tests_running = subprocess.Popen(
                [
                    *("nice", "-n", "10", str(self._vllm / "bin" / "python"), "-m", "pytest", "-q", "-W", "ignore"),
                    *("-p", "upstream_plugin", "-p", "no:cacheprovider", "--timeout", str(TEST_TIMEOUT_S)),
                    *("-o", "timeout_func_only=true", "-k", f"not {FOR_OPERATORS}", *tests),
                ],
                cwd=self._folder,
                env={**os.environ, **ENVIRONMENT, **own},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            tests_running.wait(MODULE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(tests_running.pid, signal.SIGKILL)  # a router, if the tests did not end
            tests_running.wait()
        found: Outcomes = json.loads(outcomes.read_text()) if outcomes.exists() else {}
        return found

    def end_servers(self) -> None:
        listed = self._folder / "servers.json"
        for _, _, process in json.loads(listed.read_text()) if listed.exists() else ():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
        listed.unlink(missing_ok=True)

    def settle(self, alone: Outcomes, through: Outcomes) -> Settled:
        """Run what passes alone, and does not through the router, again."""
        once = [name for name in passed(alone) if through.get(name) != "passed"]
        return settle(once, partial(self._passing, True), partial(self._passing, False))

    def _passing(self, through: bool, names: Sequence[str]) -> set[str]:
        return set(passed(self.run(names, through)))


def passed(outcomes: Outcomes) -> list[str]:
    return [name for name, outcome in outcomes.items() if outcome == "passed"]


def versions(vllm: Path, source: Path) -> tuple[str, str]:
    """Return the version that is installed, and that of the source if it has one."""
    folder = next((vllm / "lib").glob("python3*/site-packages/vllm-*.dist-info"))
    installed = folder.name.removesuffix(".dist-info").partition("-")[2].partition("+")[0]
    facts = source / "PKG-INFO"
    named = [line for line in facts.read_text().splitlines() if line.startswith("Version: ")] if facts.exists() else []
    return installed, named[0].partition(": ")[2] if named else installed


def upstream(vllm: Path, model: Path, directory: Path, source: Path, only: str, console: Console) -> dict[str, Any]:
    """each of vLLM's own tests that passes against vLLM alone passes through ``poolgrid up --engine-url``"""
    installed, named = versions(vllm, source)
    if installed != named:
        raise Lost(f"{source} has the tests of vLLM {named}, {installed} is installed")
    suite = Suite(vllm, model, source, directory)
    counts: Counter[str] = Counter()
    lost: list[str] = []
    untested: list[str] = []
    for path in (f"{ENTRYPOINTS}/{name}" for name in CHOSEN if only in name):
        try:
            alone, through = suite.run([path], through=False), suite.run([path], through=True)
            settled = suite.settle(alone, through)
        finally:
            suite.end_servers()
        steady = len(passed(alone)) - len(settled.varying)
        kept = steady - len(settled.lost)
        found = {"tests": len(alone), "pass alone": steady, "pass through": kept, "vary": len(settled.varying)}
        console.print(f"    {path}: {found}", markup=False)
        for name in settled.lost:
            console.print(f"        LOST {name}", markup=False)
        for name in settled.varying:
            console.print(f"        fails alone too: {name}", markup=False)
        counts.update(modules=1, **found)
        lost += settled.lost
        untested += [] if steady else [path]
    total = {"version": installed, **counts, "modules without a test that passes alone": untested}
    if lost or not counts["pass alone"]:
        raise Lost(f"{total}; lost: {lost}")
    return total
