"""What one body asks for, checked: the value that prompts, sequences and the form of the answer are made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from poolgrid.kernel.requests.inference import CacheDomain, ServedModel
from poolgrid.kernel.wire.hashing import TOKEN_BYTES
from poolgrid.kernel.wire.multimodal import MediaItem, MultimodalInput
from poolgrid.kernel.wire.requests import KvRetention
from poolgrid.server.frontend.answer_pieces import OutputParser
from poolgrid.server.frontend.guides import Guide
from poolgrid.server.frontend.media.references import MediaReference
from poolgrid.server.frontend.model_parsers import ModelParsers
from poolgrid.server.frontend.prompt_encoder import Lookup
from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.frontend.responses import AnswerEncoder
from poolgrid.server.frontend.schema import ChatBody, CompletionBody, InferenceBody
from poolgrid.server.frontend.tool_use import ToolUse
from poolgrid.server.frontend.tools import NO_TOOLS, CallIds, Tools


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """What is known of an answer before its first token."""

    request_ids: Sequence[str]
    created_s: int
    isl: int
    """The prompt's length in tokens."""
    model: PromptModel
    parser: OutputParser | None
    """Takes the output's text apart; ``None`` = all of it is content."""
    call_ids: CallIds
    tools: Tools = NO_TOOLS
    """What the calls of the answer are calls of."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of an answer that is not chat's own: what another API makes of a request that went chat's way."""

    encoder: Callable[[AnswerStart], AnswerEncoder]
    keep: Callable[[Any], Awaitable[bytes | None]] | None = None
    """Store a complete answer that is to be found again; called before its last byte is sent, and never fails. Returns
    another end for an answer that could not be stored."""
    counts_reasoning: bool = False
    """Whether the end of an answer counts the tokens of its reasoning, which takes time for a long one."""


class Prompt(msgspec.Struct, eq=False):
    """One tokenized prompt."""

    token_ids: bytes
    text: str = ""
    """What ``echo`` repeats; empty without it."""
    end: str = ""
    """The last characters of a chat prompt, which say whether it leaves reasoning open."""
    multimodal: MultimodalInput | None = None

    @property
    def isl(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES

    @property
    def media_items(self) -> tuple[MediaItem, ...]:
        return () if self.multimodal is None else self.multimodal.items


class PromptText(msgspec.Struct, eq=False):
    """A prompt whose text is there, and what is known of its tokens."""

    text: str
    lookup: Lookup | None = None

    @property
    def text_bytes(self) -> int:
        """Return about how much text is still to be tokenized."""
        if self.lookup is not None:
            return self.lookup.text_bytes
        return len(self.text) if self.text.isascii() else 3 * len(self.text)


class PreparedRequest(msgspec.Struct, eq=False):
    """What one body asks for, with its prompts still text.

    A body of another API comes as the chat body that means the same, with the form of its answer.
    """

    chat: bool
    body: InferenceBody
    model: PromptModel
    served: ServedModel
    output_model: PromptModel
    """``model``, with those special tokens shown that the parsers of the output look for."""
    max_sequence_length: int
    """How many tokens a prompt and its answer may have together."""
    lora_name: str = ""
    is_plain: bool = False
    """Nothing is asked for beyond what ``poolgrid.server.frontend.schema.USUAL`` names."""
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    """Alternatives per token that the client wants; ``None`` = no log probabilities."""
    guide: Guide = msgspec.field(default_factory=dict)
    """What the output must keep to, as fields of ``Sampling``."""
    guide_param: str = ""
    """The field of the body that it is from."""
    choices_per_prompt: int = 1
    """``n``."""
    client_salt: str = ""
    """The cache salt that the client wrote, or an empty one."""
    output_format: ModelParsers | None = None
    """How the output is taken apart; ``None`` = it is content as it is."""
    tool_use: ToolUse | None = None
    tools: Tools = NO_TOOLS
    """The tools that the client declared."""
    not_applied: str = ""
    """The field that asks for no reasoning, where the model has no switch for it."""
    retention: KvRetention | None = None
    """How long its blocks stay cached, where the client says so."""
    keep_ms: int = 0
    """How long the client asks to keep its prompt's KV, within its tenant's budget; 0 = it does not ask."""
    form: AnswerForm | None = None
    """The form of the answer where it is not chat's or that of a completion."""
    prompt_only: bool = False
    """Whether the answer is the prompt (``echo``) and no token more (``max_tokens`` 0)."""
    has_text: bool = True
    """Whether the tokenizer has work to do: packing a token array is not worth a thread."""
    earlier_calls: int = 0
    """Tool calls in the messages."""
    after_tool: bool = False
    """Whether the messages end in results of tools."""
    answer: int = 0
    """``session_fields.answer_key`` of the answer that is continued by an id in it; 0 = none is."""
    continued: str | None = None
    """The words of the assistant that the output continues, when the client asked for that."""
    media: tuple[MediaReference, ...] = ()
    """Media that the messages name, in order."""
    # What follows is set later by the caller.
    items: tuple[MediaItem, ...] = ()
    """The same media, loaded; set before the prompts are looked up or tokenized."""
    domain: CacheDomain | None = None
    """Whose it is, for caches. Without one nothing is looked up or kept."""
    own_salt: str = ""
    """Takes the place of the salt that the client wrote."""
    texts: Sequence[PromptText] = ()
    """Prompts as ``prompts.look_up`` left them for ``prompts.tokenize``, in order."""

    @property
    def counts_in_chunks(self) -> bool:
        """Return whether each chunk of a stream carries the usage so far; only with ``include_usage``."""
        options = self.body.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    @property
    def prompt_param(self) -> str:
        return "messages" if self.chat else "prompt"

    def forget_prompt(self) -> None:
        """Drop the parsed prompt, which can be far larger than the packed one, for the time of the generation."""
        if self.media or self.texts:
            self.media, self.items, self.texts = (), (), ()
        if type(self.body) is ChatBody:
            self.body.messages = []
        elif type(self.body) is CompletionBody:
            self.body.prompt = ""
