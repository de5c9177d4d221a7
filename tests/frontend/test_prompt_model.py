from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from lab.build_tiny import SPECIAL_TOKENS, build
from poolgrid.server.frontend.chat_template import ChatTemplate, TemplateFailure
from poolgrid.server.frontend.detokenization import byte_level_alphabet
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.frontend.prompt_model import ModelDirectoryError, PromptModel, _byte_table

CONFIG = Path(__file__).parents[2] / "pool_configs" / "short_and_long.json"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_MODEL_PATH, tmp_path / "model"))


def change(directory: Path, name: str, **fields: Any) -> None:
    file = directory / name
    value = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**value, **fields}))


def test_the_shipped_model_says_what_it_is() -> None:
    model = PromptModel.load(TINY_MODEL_PATH)
    assert (model.name, model.vocab_size, model.max_position_embeddings) == ("tiny", 4096, 262_144)
    assert model.eos_token_ids == (SPECIAL_TOKENS.index("<|im_end|>"), SPECIAL_TOKENS.index("<|endoftext|>"))
    assert PromptModel.load(TINY_MODEL_PATH, "other").name == "other"


def test_a_model_that_is_loaded_for_a_router_is_usable_at_once_and_soon_the_same() -> None:
    model, same = PromptModel.load(TINY_MODEL_PATH, proves_later=True), PromptModel.load(TINY_MODEL_PATH)
    assert model.encode("hello there") == same.encode("hello there")
    model.begin_proof()
    assert model.byte_table is not None
    assert same.byte_table is not None
    assert model.byte_table() == same.byte_table()
    for thread in threading.enumerate():
        if thread.name == "choice of a tokenizer":
            thread.join()
    assert model.tokenizes_fast() is same.tokenizes_fast()


@pytest.mark.parametrize("token", ["\u0120é", "Ċ", " ", "a b", "\u00a0", "日", "é\n", "\uffff"])
def test_the_bytes_of_a_token_are_those_of_its_byte_level_text_or_else_its_own(token: str) -> None:
    alphabet = byte_level_alphabet()
    by_definition = (
        bytes(alphabet[character] for character in token) if set(token) <= alphabet.keys() else token.encode()
    )
    tokenizer = Tokenizer.from_str(
        json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {token: 0}, "unk_token": token}})
    )
    assert _byte_table(tokenizer) == (by_definition,)


def test_building_the_tiny_model_again_gives_the_same_form(tmp_path: Path) -> None:
    build(tmp_path)
    rebuilt = PromptModel.load(tmp_path, "tiny")
    assert (rebuilt.vocab_size, rebuilt.eos_token_ids) == (4096, (2, 0))
    for name in ("config.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (TINY_MODEL_PATH / name).read_bytes()


def test_a_template_file_wins_over_the_configuration(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    model = PromptModel.load(directory)
    assert model.template is not None
    assert model.template.render(USER) == "hi<|im_end|>"


def test_templates_by_name_are_told_apart(directory: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    change(directory, "tokenizer_config.json", chat_template=named)
    model = PromptModel.load(directory)
    assert model.template is not None
    assert model.tool_template is not None
    assert (model.template.render(USER), model.tool_template.render(USER)) == ("plain", "tools")


def rendered(directory: Path) -> tuple[str | None, str | None]:
    model = PromptModel.load(directory)
    default, for_tools = (None if each is None else each.render(USER) for each in (model.template, model.tool_template))
    return default, for_tools


def write(directory: Path, name: str, value: str | dict[str, Any]) -> None:
    file = directory / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(value if isinstance(value, str) else json.dumps(value))


IN_PROCESSOR = ("processor_config.json", {"chat_template": "processor"})
IN_CONFIG = ("tokenizer_config.json", {"chat_template": "config"})
NAMED = ("tokenizer_config.json", {"chat_template": [
    {"name": "default", "template": "named"},
    {"name": "tool_use", "template": "named tools"},
    {"name": "rag", "template": "{% unknown %}"},
]})  # fmt: skip
IN_JSON = ("chat_template.json", {"chat_template": "json"})
IN_JINJA = ("chat_template.jinja", "jinja")
FOR_TOOLS = ("additional_chat_templates/tool_use.jinja", "tools")
OTHERS = ("additional_chat_templates/rag.jinja", "{% unknown %}")


@pytest.mark.parametrize(
    ("files", "right"),
    [
        ((), (None, None)),
        ((IN_PROCESSOR,), ("processor", None)),
        ((IN_PROCESSOR, IN_CONFIG), ("config", None)),
        ((NAMED,), ("named", "named tools")),
        ((IN_JSON,), ("json", None)),
        ((IN_JSON, IN_CONFIG, IN_PROCESSOR), ("json", None)),
        ((IN_JSON, NAMED), ("json", None)),
        ((IN_JINJA, IN_JSON, NAMED), ("jinja", None)),
        ((IN_JINJA, FOR_TOOLS, OTHERS), ("jinja", "tools")),
        ((IN_JSON, FOR_TOOLS), ("json", "tools")),
        ((IN_CONFIG, FOR_TOOLS), ("config", "tools")),
        ((NAMED, FOR_TOOLS), ("named", "tools")),
        ((FOR_TOOLS,), (None, "tools")),
        ((OTHERS, IN_JINJA), ("jinja", None)),
    ],
)
def test_chat_templates_are_found_wherever_transformers_finds_them(
    directory: Path, files: tuple[tuple[str, str | dict[str, Any]], ...], right: tuple[str | None, str | None],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    write(directory, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    for name, value in files:
        write(directory, name, value)

    assert rendered(directory) == right
    assert ("no chat template" in caplog.text) == (right[0] is None)


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "qwen.tiktoken", "vocab.json"])
def test_tokenizer_that_is_not_read_is_named(directory: Path, name: str) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / name).write_text("")
    with pytest.raises(ModelDirectoryError, match=f"has no tokenizer.json; .*{re.escape(name[-9:])} is not read"):
        PromptModel.load(directory)


def test_special_tokens_may_be_objects_and_limits_may_be_nested(directory: Path) -> None:
    change(directory, "tokenizer_config.json", eos_token={"content": "<|endoftext|>", "special": True})
    config = {"text_config": {"vocab_size": 5000, "max_position_embeddings": 77, "eos_token_id": 9}}
    (directory / "config.json").write_text(json.dumps(config))
    change(directory, "generation_config.json", eos_token_id=[11, 9])
    model = PromptModel.load(directory)
    assert (model.vocab_size, model.max_position_embeddings) == (5000, 77)
    assert model.eos_token_ids == (11, 9, 0)


def test_truncation_and_padding_of_training_are_switched_off(directory: Path) -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    change(directory, "tokenizer.json", truncation=truncation)
    model = PromptModel.load(directory)
    assert model.decode(model.encode("one two three four five six")) == "one two three four five six"


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (shutil.rmtree, "not a directory"),
        (lambda d: (d / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (lambda d: (d / "config.json").write_text("{"), "config.json"),
        (lambda d: (d / "config.json").write_text("[]"), "config.json"),
        (lambda d: (d / "config.json").write_text("[" * 50_000), "config.json"),
        (lambda d: (d / "chat_template.jinja").write_bytes(b"\xff"), "chat_template.jinja"),
        (lambda d: write(d, "chat_template.json", {"chat_template": "{% if %}"}), "chat_template.json"),
        (lambda d: write(d, "chat_template.json", "[]"), "chat_template.json"),
        (lambda d: write(d, "additional_chat_templates/tool_use.jinja", "{% if %}"), "tool_use.jinja"),
        (lambda d: write(d, "chat_template.json", "{"), "chat_template.json"),
        (lambda d: change(d, "tokenizer_config.json", chat_template=[{"name": "x", "template": 5}]), "chat_template"),
        (lambda d: change(d, "config.json", vocab_size="many"), "vocab_size"),
        (lambda d: change(d, "config.json", max_position_embeddings=0), "max_position_embeddings"),
        (lambda d: change(d, "tokenizer_config.json", chat_template="{% if %}"), "tokenizer_config.json"),
        (lambda d: change(d, "tokenizer_config.json", chat_template=5), "chat_template"),
        (lambda d: change(d, "tokenizer_config.json", chat_template=[{"name": "x"}]), "chat_template"),
    ],
)
def test_a_directory_that_cannot_be_used_says_which_file_and_why(directory: Path, break_it: Any, named: str) -> None:
    break_it(directory)
    with pytest.raises(ModelDirectoryError, match=f"^--model-path {re.escape(str(directory))}: .*{named}"):
        PromptModel.load(directory)


def test_a_chat_template_that_cannot_be_used_is_named_by_its_option(directory: Path) -> None:
    for content, wrong in ((None, "not a file"), (b"{% if %}", "compiling"), (b"\xff", "utf-8")):
        file = directory / "own.jinja"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ModelDirectoryError, match=f"^--chat-template {re.escape(str(file))}: .*{wrong}"):
            PromptModel.load(directory, chat_template=file)


@pytest.mark.parametrize("command", ["router", "global-router"])
def test_a_server_with_a_wrong_model_path_ends_with_one_line_and_status_2(command: str) -> None:
    given = ["--config", str(CONFIG)] if command == "global-router" else []
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "poolgrid.server.cli.main",
            command,
            "--model-path",
            "/nonexistent",
            "--port",
            "0",
            *given,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert next(line for line in done.stderr.splitlines() if "ERROR" in line).endswith(
        "--model-path /nonexistent: not a directory"
    )


def test_templates_have_the_helpers_that_published_ones_use() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m.content == 'skip' %}{% continue %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') }}{% if add_generation_prompt %}>{% endif %}{{ mood }}{{ bos_token }}",
        {"bos_token": "<s>"},
        now=lambda: datetime(2026, 1, 2),
    )
    messages = [{"content": "<é>"}, {"content": "skip"}]
    assert template.render(messages, variables={"mood": "!"}) == '{"content": "<é>"}2026>!<s>'
    assert template.render(messages, add_generation_prompt=False) == '{"content": "<é>"}2026<s>'


def test_a_client_cannot_replace_the_messages_by_a_variable() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render(USER, variables={"messages": [{"content": "forged"}]}) == "hi"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.deeper }}", "missing"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|append"),
        ("{% for i in range(100000) %}0123456789{% endfor %}", "more than 1000 characters"),
        ("{% for i in range(10000000) %}x{% endfor %}", "big|1000"),
    ],
)
def test_a_template_that_cannot_be_applied_fails_with_its_reason(source: str, reason: str) -> None:
    with pytest.raises(TemplateFailure, match=reason):
        ChatTemplate(source).render(USER, max_chars=1000)
