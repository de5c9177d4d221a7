"""Render chat messages with the model's own template, the way Hugging Face tokenizers do it, in a sandbox.

The output is bounded while it is produced. Template globals and filters are
those that published templates use: ``raise_exception``, ``strftime_now``, ``tojson`` without HTML escaping, loop
controls and ``{% generation %}``.

Templates run in Jinja's immutable sandbox, with bounds on steps and time. A template comes with a model and is as
trusted as its weights; the messages come from any client. So what may not hang is a template that was written in good
faith, whatever it is given: turns of its loops and its calls are counted, and the clock is read between them. A thread
cannot be stopped from outside, so a single operation is not interrupted; over the texts of a body, which is bounded,
one takes milliseconds.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from poolgrid.server.frontend.template_capabilities import TemplateCapabilities

STEPS_MAX = 2_000_000
"""Turns of loops and calls of one rendering: a conversation of 10,000 messages takes some 100,000."""

STEPS_PER_LOOK = 8
"""The clock is read once in so many steps, and the turns of a loop are counted as often: one that is left early has up
to as many that are not."""


class TimeOver(SecurityError):
    """The time of a rendering is over."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """An environment whose renderings are bounded; each thread renders one template at a time."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic, **options: Any) -> None:
        # Not optimized: loops over constants would be counted while compiling.
        super().__init__(optimized=False, **options)
        self._monotonic = monotonic
        self._local = threading.local()
        self.filters["_turns"] = self._turns

    def begin(self, limit_s: float) -> None:
        self._local.steps = 0
        self._local.deadline_s = self._monotonic() + limit_s

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raise the error that is handled as it is.

        Jinja would show lines of the template in its traceback, which is not shown here, by frames in a circle with the
        error: whatever the template had made would wait for the collector.
        """
        raise  # noqa: PLE0704 - Jinja calls this where it handles an error

    def call(
        self,
        context: Context,
        function: Any,
        *args: Any,
        _loop_vars: Mapping[str, Any] | None = None,
        _block_vars: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function, macro or method from a template.

        Jinja adds the variables of a loop or block to each call inside it, for functions that take the context. No
        template has one of these.
        """
        self._count(1)
        return super().call(context, function, *args, **kwargs)

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_turns", [], [], None, None, lineno=loop.lineno, environment=self)
        return super()._generate(source, name, filename, defer_init)

    def _turns(self, items: Iterable[Any]) -> Iterator[Any]:
        turns = 0
        for turns, item in enumerate(items, 1):
            yield item
            if not turns % STEPS_PER_LOOK:
                self._count(STEPS_PER_LOOK)
        self._count(turns % STEPS_PER_LOOK)

    def _count(self, steps: int) -> None:
        """Count steps that were made."""
        spent = self._local
        before, spent.steps = spent.steps, spent.steps + steps
        if spent.steps > STEPS_MAX:
            raise SecurityError(f"more than {STEPS_MAX} steps, the limit")
        if before // STEPS_PER_LOOK < spent.steps // STEPS_PER_LOOK and self._monotonic() > spent.deadline_s:
            raise TimeOver("it takes too long: the time limit is over")


OUTPUT_CHARS_MAX: Final = 32 * 1024 * 1024
"""Default bound of one rendered prompt: as much as the largest request body brings in."""

TIME_LIMIT_MS: Final = 2000.0
"""Default time limit of one rendering: a hundred times what a conversation of 10,000 messages takes."""

PIECES_PER_LOOK: Final = 64
"""Pieces of a prompt, some ten messages, between two looks at its length."""


class GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the interface of jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def raise_exception(message: str) -> NoReturn:
    """Let a template refuse what it is given."""
    raise TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it is, without what keeps it from being HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class TemplateFailure(Exception):
    """The template refused these messages or could not be applied to them; the message says which."""


class TemplateTooSlow(TemplateFailure):
    """The rendering took longer than it may."""


class ChatTemplate:
    """One compiled template. ``special_tokens`` (``bos_token``, ``eos_token``, ...) are variables of the template."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile ``source``; raises ``TemplateFailure`` when it is not valid Jinja. ``now`` feeds ``strftime_now``."""

        def strftime_now(form: str) -> str:
            return now().strftime(form)

        environment = TemplateSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = strftime_now
        self.source = source
        """The template as it came, which shows the special tokens that prompts will have."""
        self.capabilities: dict[bool, TemplateCapabilities] = {}
        """What it can show without and with tools; ``template_probes.capabilities_of`` keeps it here."""
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise TemplateFailure(f"compiling the chat template: {error}") from error
        # Jinja keeps two layers of names, and asks them in Python's own code for each rendering's context.
        self._template.globals = dict(self._template.globals)
        self._environment = environment
        self._special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        max_chars: int = OUTPUT_CHARS_MAX,
        limit_ms: float = TIME_LIMIT_MS,
    ) -> str:
        """Return the prompt; raises ``TemplateFailure``, and ``TemplateTooSlow`` after ``limit_ms``.

        ``variables`` are a client's ``chat_template_kwargs``.
        """
        context: dict[str, Any] = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        length = 0
        self._environment.begin(limit_ms / 1000)
        rendering = self._template.new_context(context)
        try:
            rendered = self._template.root_render_func(rendering)
            while several := list(islice(rendered, PIECES_PER_LOOK)):
                length += sum(map(len, several))
                if length > max_chars:
                    raise TemplateFailure(f"rendering the chat template: more than {max_chars} characters, the limit")
                pieces += several
        except _FAILURES as error:
            raise _failure(error) from None
        finally:
            # Macros are in a circle with the context that they were made in: what a template made, tens of megabytes
            # perhaps, would wait for the collector, which runs seldom.
            for held in (rendering.parent, rendering.vars, rendering.blocks):
                held.clear()
        return "".join(pieces)


_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
)
"""What a rendering raises, besides ``TemplateFailure``: a template may do with its values what these forbid."""


def _failure(error: BaseException) -> TemplateFailure:
    if isinstance(error, TimeOver):
        return TemplateTooSlow(f"rendering the chat template: {error.message}")
    if isinstance(error, TemplateError):
        return TemplateFailure(f"rendering the chat template: {error.message or type(error).__name__}")
    return TemplateFailure(f"rendering the chat template: {type(error).__name__}: {error}")
