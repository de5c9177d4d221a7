"""Client frameworks in front of a real vLLM server: what passes against the server alone passes through poolgrid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.clients.__main__ import SUITES, Row, command_of, rows_of
from tests.e2e.processes import Process
from tests.real_vllm.servers import START_TIMEOUT_S, VllmServer, make_model
from tests.real_vllm.transparency import STORING
from tests.real_vllm.varying import settle

CONTEXT_TOKENS = 65_536
"""An agent's first request has 20,000 to 40,000 of the tiny model's tokens."""
MODEL_THAT_ENDS = """
import sys, torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(7)
config = LlamaConfig(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT_TOKENS, bos_token_id=None,
    eos_token_id=[2, 0])
model = LlamaForCausalLM(config)
with torch.no_grad():
    model.model.embed_tokens.weight[:, 0] = 1.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
    hidden = model.model(torch.arange(100, 164).unsqueeze(0)).last_hidden_state[0]
    scores = model.lm_head.weight
    scores[:, 0] = 0.0
    scores *= 1.5 / (hidden @ scores.T).std()
    tokenizer = Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
    for text, more in {**dict.fromkeys(('"', '",', '"}', ',', '}', ']', ']}'), 4.0), "<|im_end|>": 7.0}.items():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) == 1:
            scores[ids[0], 0] = more / hidden[:, 0].mean()
model.save_pretrained(sys.argv[1])
""".replace("CONTEXT_TOKENS", str(CONTEXT_TOKENS))
"""Random weights, but that the first number of each state is a constant, by which what ends an answer, a text or a list
is likelier: answers have about a hundred tokens, and those under a grammar end too."""
OPTIONS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--max-model-len", str(CONTEXT_TOKENS), "--num-gpu-blocks-override", "8000"),
    *("--override-generation-config", '{"max_new_tokens": 1000}'),
)
"""Without a parser of reasoning, which would find nothing else."""


class ClientsLost(Exception):
    """Checks that pass against vLLM alone fail through the router."""


def _rows(suites: Sequence[str], url: str, alone: bool) -> Iterator[tuple[str, Row]]:
    for suite in suites:
        for row in rows_of(suite, command_of(suite), url, {"CLIENTS_WITHOUT_POOL": "1"} if alone else {}):
            yield f"{suite}: {row['check']}", row


def clients(vllm: Path, directory: Path, console: Console, only: str) -> dict[str, Any]:
    """each check of the client frameworks that passes against vLLM alone passes through ``poolgrid up --engine-url``"""
    model = directory / "long-model"
    model.mkdir()
    make_model(vllm, model, MODEL_THAT_ENDS)
    suites = [name for name in SUITES if only in name]
    server = VllmServer(62, vllm, model, directory, OPTIONS, STORING)
    server.start()
    try:
        server.wait()
        with Process("up", "--engine-url", server.url, "--port", "0") as pool:
            router = pool.wait_ready(START_TIMEOUT_S).url
            alone = dict(_rows(suites, server.url, alone=True))
            through = dict(_rows(suites, router, alone=False))
            once = [name for name, row in alone.items() if row["passed"] and not _passed(through, name)]
            settled = settle(once, partial(_passing, router, False), partial(_passing, server.url, True))
    finally:
        server.kill()
    for name, row in alone.items():
        if not row["passed"]:
            console.print(f"    not alone: {name}: {row['error'][:120]}", markup=False)
    for name in settled.varying:
        console.print(f"    fails alone too: {name}", markup=False)
    for name in settled.lost:
        console.print(f"    LOST {name}: {through.get(name, {}).get('error', 'it did not run')}", markup=False)
    kept = sum(row["passed"] for row in alone.values()) - len(settled.varying)
    found = {
        "checks": len(alone),
        "pass alone": kept,
        "pass through": kept - len(settled.lost),
        "of these in a further try": len(settled.later),
    }
    if settled.lost or not kept:
        raise ClientsLost(f"{found}; lost: {settled.lost}")
    return found


def _passing(url: str, alone: bool, names: Sequence[str]) -> set[str]:
    """Run the suites of checks again; return the checks that pass."""
    suites = sorted({name.partition(":")[0] for name in names})
    return {name for name, row in _rows(suites, url, alone) if row["passed"]}


def _passed(rows: dict[str, Row], name: str) -> bool:
    return name in rows and bool(rows[name]["passed"])
