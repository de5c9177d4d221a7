"""What the front end knows of a model: tokenizer, chat template, limits. Read from a Hugging Face style directory.

``tokenizer.json``             required
``tokenizer_config.json``      chat templates and special tokens
``chat_template.jinja``        the chat template
``additional_chat_templates/`` further chat templates, ``NAME.jinja``
``chat_template.json``         the chat template, where processors of older versions have it
``processor_config.json``      likewise, older still
``config.json``                ``vocab_size``, ``max_position_embeddings``, ``eos_token_id``
``generation_config.json``     further ``eos_token_id``

Files of templates win over ``tokenizer_config.json``, and among them ``chat_template.jinja`` wins, as in transformers.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from tokenizers import Tokenizer

from poolgrid.kernel.requests.inference import CacheDomain
from poolgrid.kernel.wire.hashing import pack_tokens, unpack_tokens
from poolgrid.server.frontend.chat_template import ChatTemplate, TemplateFailure
from poolgrid.server.frontend.detokenization import (
    CONTEXT_TOKENS,
    ByteLevelDetokenizer,
    Detokenizer,
    MarkedDetokenizer,
    WindowDetokenizer,
    byte_level_alphabet,
)
from poolgrid.server.frontend.prompt_encoder import CACHE_BYTES_DEFAULT, Lookup, PromptEncoder, read_document
from poolgrid.server.process.settings import OptionError

log: Final = logging.getLogger(__name__)

DEFAULT_MAX_POSITION_EMBEDDINGS: Final = 131_072
"""Used when a configuration names no limit: the longest context most open models are served with."""


DEFAULT_TEMPLATE: Final = "default"
TOOL_TEMPLATE: Final = "tool_use"
"""Names of chat templates: of the usual one, and of that for requests with tools. Others are not used."""

TEMPLATE_FILES: Final = (
    "chat_template.jinja",
    "additional_chat_templates/default.jinja",
    "chat_template.json",
    "tokenizer_config.json",
    "processor_config.json",
)

OTHER_TOKENIZERS: Final = ("tokenizer.model", "tekken.json", "*.tiktoken", "tiktoken.model", "vocab.json", "vocab.txt")
"""Files of tokenizers that transformers makes a ``tokenizer.json`` of."""


class ModelDirectoryError(OptionError):
    """A model directory cannot be used; the message names the file and what is wrong in it."""


ByteTable = Callable[[], tuple[bytes, ...]]
"""Returns the bytes of every token, special tokens empty. For a vocabulary of 150,000 that is a quarter of a second of
work, which a start does not wait for: only an answer of an own worker needs them."""


@dataclass(frozen=True, slots=True)
class PromptModel:
    """Tokenizer, template and limits of one model; immutable, and safe to use from tokenizer threads."""

    name: str
    tokenizer: Tokenizer = field(repr=False)
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
    template: ChatTemplate | None = field(default=None, repr=False)
    tool_template: ChatTemplate | None = field(default=None, repr=False)
    """Template for requests with tools, when the model has one of its own."""
    byte_table: ByteTable | None = field(default=None, repr=False)
    """That of a byte-level tokenizer; ``None`` for other kinds."""
    shown_tokens: Mapping[int, str] = field(default_factory=dict, repr=False)
    """Special tokens that output shows by their text: none, but for models made by ``showing``."""
    encoder: PromptEncoder | None = field(default=None, repr=False)
    """The quick way from text to token ids; without one, the tokenizer does all of it."""
    special_tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of templates: ``bos_token`` and the like."""

    @classmethod
    def load(
        cls,
        path: Path | str,
        name: str = "",
        *,
        chat_template: Path | None = None,
        tokenization_cache_bytes: int = CACHE_BYTES_DEFAULT,
        word_cache: bool = True,
        prompts: bool = True,
        proves_later: bool = False,
    ) -> PromptModel:
        """Read a model directory; raises ``ModelDirectoryError``. ``name`` defaults to the directory's.

        ``chat_template`` is a Jinja file that is used in place of the model's own templates.
        ``tokenization_cache_bytes`` bounds the cache of prompt segments (0 = none). Without ``word_cache`` the time
        that a text takes does not depend on the words of others. Without ``prompts`` the model is checked and
        described: choosing the encoder, which compares two tokenizers, is left out. With ``proves_later`` that is left
        to ``begin_proof``, and the slower of them works until it is done.
        """
        try:
            return cls._read(
                Path(path), name, chat_template, tokenization_cache_bytes, word_cache, prompts, proves_later
            )
        except ModelDirectoryError as error:
            if str(error).startswith("--"):
                raise
            raise ModelDirectoryError(f"--model-path {path}: {error}") from error

    @classmethod
    def _read(
        cls,
        directory: Path,
        name: str,
        chat_template: Path | None,
        tokenization_cache_bytes: int,
        word_cache: bool,
        prompts: bool,
        proves_later: bool,
    ) -> PromptModel:
        if not directory.is_dir():
            raise ModelDirectoryError("not a directory")
        tokenizer_file = directory / "tokenizer.json"
        if not tokenizer_file.is_file():
            others = [name for name in OTHER_TOKENIZERS for _ in directory.glob(name)]
            told = f"; {', '.join(dict.fromkeys(others))} is not read, save it as tokenizer.json" if others else ""
            raise ModelDirectoryError(f"has no tokenizer.json{told}")
        try:
            text = tokenizer_file.read_bytes()
            tokenizer = Tokenizer.from_buffer(text)
            document = read_document(text)
        except Exception as error:  # the library raises bare Exception
            raise ModelDirectoryError(f"loading {tokenizer_file}: {error}") from error
        # A tokenizer.json can carry the lengths of its training: prompts are never cut or padded here.
        tokenizer.no_truncation()
        tokenizer.no_padding()

        tokenizer_config = _read_json(directory / "tokenizer_config.json")
        config = _read_json(directory / "config.json")
        generation_config = _read_json(directory / "generation_config.json")
        special_tokens = _special_tokens(tokenizer_config)
        template, tool_template = _templates(directory, tokenizer_config, special_tokens, chat_template)
        where = directory / "config.json"
        byte_table, encoder = None, None
        if prompts:
            byte_table = cache(partial(_byte_table, tokenizer)) if _is_byte_level(document.decoder or {}) else None
            encoder = PromptEncoder(
                tokenizer,
                template_text="".join(each.source for each in (template, tool_template) if each is not None),
                cache_bytes=tokenization_cache_bytes,
                word_cache=word_cache,
                proves_later=proves_later,
                text="" if document.truncation or document.padding else text.decode(),
            )
            if not proves_later:
                _say(encoder)
        vocab_size = max(tokenizer.get_vocab_size(), _limit(config, ("vocab_size",), where) or 0)
        max_length = _limit(config, ("max_position_embeddings", "n_positions", "max_sequence_length"), where)
        return cls(
            name=name or directory.resolve().name,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_position_embeddings=max_length or DEFAULT_MAX_POSITION_EMBEDDINGS,
            eos_token_ids=_eos_token_ids(tokenizer, config, generation_config, special_tokens),
            template=template,
            tool_template=tool_template,
            byte_table=byte_table,
            encoder=encoder,
            special_tokens=special_tokens,
        )

    def begin_proof(self) -> None:
        """Begin in a thread what was left for later: seconds of work for a large vocabulary."""
        if self.encoder is not None and not self.encoder.is_proven:
            # No daemon: native code that finds the interpreter gone aborts the process. Its end waits for a second or
            # two.
            threading.Thread(target=_finish, args=(self.encoder, self.byte_table), name="choice of a tokenizer").start()

    def with_template(self, source: str) -> PromptModel:
        """Return this model with another template in place of its own ones; raises ``TemplateFailure``."""
        template = ChatTemplate(source, self.special_tokens)
        encoder = None if self.encoder is None else self.encoder.for_template(source)
        return replace(self, template=template, tool_template=None, encoder=encoder)

    def encode(self, text: str, add_special_tokens: bool = False, domain: CacheDomain | None = None) -> bytes:
        """Tokenize a prompt into u32 little-endian token ids; without a ``domain`` nothing is looked up or kept."""
        if self.encoder is not None:
            return self.encoder.encode(text, add_special_tokens, domain)
        # The batch call leaves out character offsets, a quarter of the time; for one text it starts no threads.
        encoding = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return pack_tokens(encoding.ids)

    def look_up(self, text: str, add_special_tokens: bool = False, domain: CacheDomain | None = None) -> Lookup | None:
        """Look up what is known of a prompt, which is quick; ``None`` where nothing is kept."""
        return None if self.encoder is None else self.encoder.look_up(text, add_special_tokens, domain)

    def complete(self, lookup: Lookup) -> bytes:
        """Tokenize the rest of a prompt that was looked up."""
        assert self.encoder is not None, "it made the lookup"
        return self.encoder.complete(lookup)

    def tokenizes_fast(self) -> bool:
        return self.encoder is not None and not self.encoder.slow_because

    def decode(self, packed: bytes) -> str:
        """Return the text of u32 little-endian token ids, special tokens left out."""
        detokenizer = self.detokenizer()
        return detokenizer.feed(unpack_tokens(packed)) + detokenizer.flush()

    def detokenizer(self, prompt: bytes = b"") -> Detokenizer:
        """Return a fresh incremental decoder for what follows ``prompt`` (u32 little-endian)."""
        if self.byte_table is not None:
            return ByteLevelDetokenizer(self.byte_table())
        window = WindowDetokenizer(self.tokenizer, unpack_tokens(prompt[-4 * CONTEXT_TOKENS :]))
        return MarkedDetokenizer(window, self.shown_tokens) if self.shown_tokens else window

    def showing(self, markers: Collection[str]) -> PromptModel:
        """Return this model with output that shows those ``markers`` which are special tokens; itself, if none is."""
        special = {
            token_id: added.content
            for token_id, added in self.tokenizer.get_added_tokens_decoder().items()
            if added.special and added.content in markers
        }
        if not special:
            return self
        known = self.byte_table
        table = None if known is None else cache(partial(_with_shown, known, special))
        return replace(self, byte_table=table, shown_tokens=special)

    def added_tokens(self) -> frozenset[str]:
        """Return the tokens that were added to the vocabulary: markers of formats are among them."""
        return frozenset(added.content for added in self.tokenizer.get_added_tokens_decoder().values())

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token stands for, special tokens by their name, for log probabilities."""
        table = () if self.byte_table is None else self.byte_table()
        if token_id < len(table) and table[token_id]:
            return table[token_id]
        return (self.tokenizer.decode([token_id], skip_special_tokens=False) or "").encode()


class PromptModels(Protocol):
    """Where the front end finds the prompt model of a served model: a mapping, or anything that looks one up."""

    def get(self, name: str, /) -> PromptModel | None:
        """Return the prompt model of the served model ``name``, or nothing."""
        ...


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelDirectoryError(f"loading {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelDirectoryError(f"loading {path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelDirectoryError(f"loading {path}: expected a JSON object, found {type(value).__name__}")
    return value


def _limit(config: Mapping[str, Any], names: Sequence[str], where: Path) -> int | None:
    """Return the first of ``names`` that is set, also inside ``text_config`` (multimodal models keep it there)."""
    for part in (config, config.get("text_config") or {}):
        for name in names:
            value = part.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelDirectoryError(f"loading {where}: {name} is {value!r}, allowed are integers from 1")
            return value
    return None


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = tokenizer_config.get(key)
        if isinstance(value, Mapping):  # a serialized AddedToken
            value = value.get("content")
        if isinstance(value, str):
            tokens[key] = value
    return tokens


def _eos_token_ids(
    tokenizer: Tokenizer,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
) -> tuple[int, ...]:
    """Return every end-of-sequence id that the directory names, in the order of first mention."""
    found: dict[int, None] = {}
    for part in (generation_config, config, config.get("text_config") or {}):
        value = part.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int):
                found[token_id] = None
    if "eos_token" in special_tokens:
        eos = tokenizer.token_to_id(special_tokens["eos_token"])
        if eos is not None:
            found[eos] = None
    return tuple(found)


def _templates(
    directory: Path,
    tokenizer_config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    override: Path | None,
) -> tuple[ChatTemplate | None, ChatTemplate | None]:
    """Return the model's chat template and, when it has several by name, the one for tools."""
    if override is not None:
        what = f"--chat-template {override}"
        if not override.is_file():
            raise ModelDirectoryError(f"{what}: not a file")
        return _compiled(_Source(what, _read_text(override, what)), special_tokens), None
    own = _in_files(directory)
    if DEFAULT_TEMPLATE not in own:
        configured = _in_config(directory / "tokenizer_config.json", tokenizer_config)
        configured = configured or _in_config(directory / "processor_config.json")
        own = {**configured, **own}
    default, for_tools = (
        _compiled(own[name], special_tokens) if name in own else None for name in (DEFAULT_TEMPLATE, TOOL_TEMPLATE)
    )
    if default is None:
        log.warning(
            "the model at %s has no chat template in %s: chats are refused (--chat-template)",
            directory,
            ", ".join(TEMPLATE_FILES),
        )
    return default, for_tools


class _Source(NamedTuple):
    """A chat template, and where it is from as errors say that."""

    what: str
    text: str


def _in_files(directory: Path) -> dict[str, _Source]:
    """Return the chat templates by name that have files of their own; they win over those in configurations."""
    found = _in_config(directory / "chat_template.json")
    file = directory / "chat_template.jinja"
    if file.is_file():
        found[DEFAULT_TEMPLATE] = _Source(f"loading {file}", _read_text(file, f"loading {file}"))
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = _Source(f"loading {file}", _read_text(file, f"loading {file}"))
    return found


def _in_config(file: Path, config: Mapping[str, Any] | None = None) -> dict[str, _Source]:
    """Return the chat templates by name of a configuration, which has one or a list of them."""
    value = (_read_json(file) if config is None else config).get("chat_template")
    what = f"loading {file}"
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: _Source(what, value)}
    try:
        named = {str(entry["name"]): entry["template"] for entry in value}
    except (TypeError, KeyError):
        named = {"": None}
    if not all(isinstance(text, str) for text in named.values()):
        raise ModelDirectoryError(
            f"{what}: chat_template is neither a string nor a list of objects with name and template"
        )
    return {name: _Source(f"{what}: template {name!r}", text) for name, text in named.items()}


def _read_text(file: Path, what: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelDirectoryError(f"{what}: {error}") from error


def _compiled(source: _Source, special_tokens: Mapping[str, str]) -> ChatTemplate:
    try:
        return ChatTemplate(source.text, special_tokens)
    except TemplateFailure as failure:
        raise ModelDirectoryError(f"{source.what}: {failure}") from failure


def _finish(encoder: PromptEncoder, byte_table: ByteTable | None) -> None:
    """Do what takes long and is first needed by an answer."""
    encoder.prove()
    if byte_table is not None:
        byte_table()
    if threading.main_thread().is_alive():  # the last line of a process that ends is its reason
        _say(encoder)


def _say(encoder: PromptEncoder) -> None:
    log.info(
        "tokenizing with %s; prompts are cut at %s",
        "fastokens" if encoder.is_fast else f"tokenizers (fastokens is not used: {encoder.slow_because})",
        " ".join(encoder.delimiters) or "nothing",
    )


def _bytes_in_latin_1() -> dict[int, str]:
    """Return a translation of byte-level text into Latin-1 of the same bytes; of other text no Latin-1 comes."""
    alphabet = byte_level_alphabet()
    others = {byte: "\uffff" for byte in range(256) if chr(byte) not in alphabet}
    return others | {ord(character): chr(byte) for character, byte in alphabet.items()}


def _is_byte_level(decoder: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer decodes byte by byte."""
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders") or []
        decoder = parts[0] if len(parts) == 1 else {}
    return decoder.get("type") == "ByteLevel"


def _with_shown(table: ByteTable, shown: Mapping[int, str]) -> tuple[bytes, ...]:
    return tuple(shown[token_id].encode() if token_id in shown else raw for token_id, raw in enumerate(table()))


def _byte_table(tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """Return the bytes of every token of a byte-level tokenizer."""
    in_latin_1 = _bytes_in_latin_1()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        try:
            table[token_id] = token.translate(in_latin_1).encode("latin-1")
        except UnicodeEncodeError:
            table[token_id] = token.encode()  # an added token is written as it is
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        if added.special:
            table[token_id] = b""
    return tuple(table)
