"""Build ``src/poolgrid/server/frontend/models/tiny``: the model directory of the simulated engine, without weights.

``python -m lab.build_tiny [DIRECTORY]`` trains a byte-level BPE tokenizer of 4,096 tokens on the
source of standard library modules that every CPython has, and writes it in Hugging Face form. The same interpreter and
``tokenizers`` versions give the same bytes; another version of the standard library gives other merges. **The
committed files are the reference** (built with CPython 3.11.7, tokenizers 0.23.3): rebuild them only on purpose,
because every test vector over text depends on them.

Ids 0, 1 and 2 are the special tokens; every id from 3 on is an ordinary token that an engine may generate.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from poolgrid.server.frontend.models import TINY_MODEL_PATH

VOCAB_SIZE = 4096
MAX_POSITION_EMBEDDINGS = 262_144
"""Twice the longest prompt of the public traces (about 126k tokens), so that any of them fits with its answer."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CORPUS_MODULES = (
    "argparse", "ast", "asyncio.base_events", "asyncio.tasks", "codecs", "collections",
    "concurrent.futures.thread", "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib",
    "email.message", "enum", "fractions",
    "functools", "heapq", "http.client", "http.server", "inspect", "json.decoder", "json.encoder", "logging",
    "os", "pathlib", "pickle", "pydoc_data.topics", "queue", "random", "sched", "selectors", "shutil", "socket",
    "statistics",
    "string", "subprocess", "tempfile", "textwrap", "threading", "tokenize", "traceback", "typing", "unittest.case",
    "unittest.mock", "urllib.parse", "uuid", "zipfile",
)  # fmt: skip
"""``pydoc_data.topics`` is most of it: the language reference as prose, about 700 kB of English."""

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'You may call these functions:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + (call.function | tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def corpus() -> Iterator[str]:
    """Yield the training text, one module's source at a time, in the order of ``CORPUS_MODULES``."""
    library = Path(sysconfig.get_path("stdlib"))
    for name in CORPUS_MODULES:
        path = library / name.replace(".", "/")
        # What is a module in one version is a package in another (pathlib, zipfile).
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        yield source.read_text(encoding="utf-8")


def train() -> Tokenizer:
    """Train the tokenizer: byte-level, so that every text can be encoded and comes back unchanged."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"building the tiny model: got {tokenizer.get_vocab_size()} tokens, wanted {VOCAB_SIZE}")
    return tokenizer


def build(directory: Path) -> None:
    """Write the model directory: ``tokenizer.json``, ``tokenizer_config.json`` and ``config.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    train().save(str(directory / "tokenizer.json"), pretty=False)
    end_of_text, _, end_of_turn = SPECIAL_TOKENS
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": end_of_turn,
            "pad_token": end_of_text,
            "additional_special_tokens": list(SPECIAL_TOKENS),
            "model_max_length": MAX_POSITION_EMBEDDINGS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        directory / "config.json",
        {
            "model_type": "poolgrid-tiny",
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
            "bos_token_id": None,
            "eos_token_id": [SPECIAL_TOKENS.index(end_of_turn), SPECIAL_TOKENS.index(end_of_text)],
        },
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the tokenizer of the tiny model, and write its directory.")
    parser.add_argument("directory", nargs="?", type=Path, default=TINY_MODEL_PATH, help="default: %(default)s")
    build(parser.parse_args().directory)
