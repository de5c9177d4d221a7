"""The model directory that the HTTP benchmark serves everywhere: 32k byte-level BPE with the split of current models.

Trained from the source of the standard library, so nothing is downloaded; kept in a cache directory between runs.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 32_000
CORPUS_BYTES = 12_000_000
WORDS = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def ensure_model(directory: Path) -> Path:
    """Return ``directory`` with the model in it, made when it is not there."""
    if (directory / "words.json").is_file():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(CORPUS_BYTES), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "model_max_length": 131_072,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        },
    )
    _write(
        directory / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 512,
            "intermediate_size": 1376,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_hidden_layers": 8,
            "head_dim": 64,
            "vocab_size": size,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
            "bos_token_id": 0,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
        },
    )
    _write(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 2})
    single = sorted(
        (token_id, token[1:])
        for token, token_id in tokenizer.get_vocab().items()
        if token.startswith("\u0120") and token[1:].isascii() and token[1:].isalpha() and 3 <= len(token) <= 11
    )
    words = [word for _, word in single[:WORDS]]
    assert len(tokenizer.encode("".join(f" {word}" for word in words)).ids) == len(words), "each word is one token"
    _write(directory / "words.json", words)
    return directory


def corpus(size: int) -> Iterator[str]:
    """Yield source files of the standard library, together about ``size`` characters, always the same ones."""
    root = Path(sysconfig.get_path("stdlib"))
    taken = 0
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        yield text
        taken += len(text)
        if taken > size:
            return


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
