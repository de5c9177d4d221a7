"""Chat answers that are parsed on their way out: reasoning and tool calls in addition to content.

Used only when a model's format and the request need a parser; plain answers go through ``AnswerEncoder`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from poolgrid.server.frontend.answer_pieces import AnswerPiece, OutputParser, PieceKind, taken_apart
from poolgrid.server.frontend.custom_calls import CustomCalls
from poolgrid.server.frontend.guided_answers import guided_answer
from poolgrid.server.frontend.prepared_request import AnswerStart, PreparedRequest, Prompt
from poolgrid.server.frontend.request_body import base_name
from poolgrid.server.frontend.responses import AnswerEncoder, encode_text
from poolgrid.server.frontend.schema import CUSTOM_ARGUMENT
from poolgrid.server.frontend.sequence_output import PlacedLogprobs, SequenceOutput
from poolgrid.server.frontend.tools import CallIds, custom_text

_encode: Final = msgspec.json.Encoder().encode


_FUNCTION: Final = ("function", "arguments")
_CUSTOM: Final = ("custom", "input")
"""How a call is written: its type, which is also the field that holds it, and the field for what the model wrote."""


@dataclass(slots=True, eq=False)
class ChoiceReading:
    """One choice that is being read."""

    parser: OutputParser
    calls: int = 0
    """Tool calls that began."""
    form: tuple[str, str] = _FUNCTION
    """Of the call that began last."""
    logprobs: list[PlacedLogprobs] = field(default_factory=list)
    """Log probabilities of text that the parser still holds."""

    def read(self, text: str, ended: bool) -> list[AnswerPiece]:
        return taken_apart(self.parser, text, ended)


def final_reason(finish_reason: str, calls: int) -> str:
    """Return what a client is told: an answer that ended by itself with calls in it waits for their results."""
    return "tool_calls" if calls and finish_reason == "stop" else finish_reason


class ParsedChatEncoder(AnswerEncoder):
    """Encodes chat answers piece by piece; ``new_parser`` is called once per choice, with its index."""

    def __init__(
        self,
        *,
        new_parser: Callable[[int], OutputParser],
        call_ids: CallIds,
        custom: Collection[str] = (),
        **common: Any,
    ) -> None:
        """``common`` is what every encoder is told."""
        super().__init__(chat=True, **common)
        self._new_parser = new_parser
        self._call_ids = call_ids
        self._custom = custom
        """Functions that the client knows as custom tools."""
        self._readings: dict[int, ChoiceReading] = {}

    def chunk(
        self, index: int, text: str, logprobs: Sequence[PlacedLogprobs] = (), finish_reason: str | None = None
    ) -> bytes:
        """Return the chunks for new text: one per piece, the finish reason with the last; maybe none."""
        reading = self._reading(index)
        deltas = [self._delta(index, reading, piece) for piece in reading.read(text, finish_reason is not None)]
        reading.logprobs += logprobs
        if not deltas:
            if finish_reason is None:
                return b""
            deltas.append(b"{}")
        head = self._prefix + b'{"index":%d,"delta":' % index
        end = self._end_of_chunk(index)
        last = len(deltas) - 1
        chunks: list[bytes] = []
        for number, delta in enumerate(deltas):
            placed = b"null"
            if number == 0 and reading.logprobs:
                placed = _encode(self.logprobs(reading.logprobs))
                reading.logprobs.clear()
            reason = None
            if number == last and finish_reason is not None:
                reason = final_reason(finish_reason, reading.calls)
            chunks += (head, delta, b',"logprobs":', placed, b',"finish_reason":', _encode(reason), end)
        return b"".join(chunks)

    def _reading(self, index: int) -> ChoiceReading:
        reading = self._readings.get(index)
        if reading is None:
            reading = self._readings[index] = ChoiceReading(self._new_parser(index))
        return reading

    def _delta(self, index: int, reading: ChoiceReading, piece: AnswerPiece) -> bytes:
        kind, text = piece
        if kind is PieceKind.CONTENT:
            return b'{"content":' + encode_text(text) + b"}"
        if kind is PieceKind.REASONING:
            return b'{"reasoning_content":' + encode_text(text) + b"}"
        if kind is PieceKind.ARGUMENTS:
            kind_name, field = reading.form
            return b'{"tool_calls":[{"index":%d,"%s":{"%s":' % (
                reading.calls - 1,
                kind_name.encode(),
                field.encode(),
            ) + (encode_text(text) + b"}}]}")
        call = reading.calls
        reading.calls += 1
        kind_name, field = reading.form = self._form(text)
        return b"".join(
            (
                b'{"tool_calls":[{"index":%d,"id":' % call,
                _encode(self._call_ids.of(index, call, text)),
                b',"type":"%s","%s":{"name":' % (kind_name.encode(), kind_name.encode()),
                encode_text(text),
                b',"%s":""}}]}' % field.encode(),
            )
        )

    def _form(self, name: str) -> tuple[str, str]:
        return _CUSTOM if name in self._custom else _FUNCTION

    def _choice(self, output: SequenceOutput) -> dict[str, Any]:
        choice = super()._choice(output)
        message = choice["message"]
        reading = self._reading(output.index)
        texts: dict[PieceKind, list[str]] = {PieceKind.CONTENT: [], PieceKind.REASONING: []}
        calls: list[dict[str, Any]] = []
        form, field = _FUNCTION
        for kind, text in reading.read(message["content"], True):
            if kind is PieceKind.CALL:
                identity = self._call_ids.of(output.index, len(calls), text)
                form, field = self._form(text)
                calls.append({"id": identity, "type": form, form: {"name": text, field: ""}})
            elif kind is PieceKind.ARGUMENTS:
                calls[-1][form][field] += text
            else:
                texts[kind].append(text)
        content = "".join(texts[PieceKind.CONTENT])
        message["content"] = content if content or not calls else None
        reasoning = "".join(texts[PieceKind.REASONING])
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        choice["finish_reason"] = final_reason(choice["finish_reason"], len(calls))
        return choice


def encoder_of(
    job: PreparedRequest,
    prompts: Sequence[Prompt],
    outputs: Sequence[SequenceOutput],
    request_ids: Sequence[str],
    created_s: int,
) -> AnswerEncoder:
    """Return what turns the output of a request into the bytes of its answer."""
    request_id = base_name(request_ids)
    options = job.body.stream_options
    include_usage = options is not None and options.include_usage
    call_ids = CallIds(request_id, "" if job.output_format is None else job.output_format.tools, job.earlier_calls)

    def reader(index: int) -> OutputParser:
        return outputs[index].pieces or _parser(job, prompts[0])

    encoder: AnswerEncoder
    if job.form is not None:
        parser = None if job.output_format is None else reader(0)
        isl = prompts[0].isl
        start = AnswerStart(request_ids, created_s, isl, job.output_model, parser, call_ids, job.tools)
        encoder = job.form.encoder(start)
    elif job.output_format is not None:
        encoder = ParsedChatEncoder(
            new_parser=reader,
            call_ids=call_ids,
            custom=job.tools.custom,
            request_id=request_id,
            model_name=job.body.model,
            created_s=created_s,
            model=job.output_model,
            include_usage=include_usage,
        )
    else:
        encoder = AnswerEncoder(
            chat=job.chat,
            request_id=request_id,
            model_name=job.body.model,
            created_s=created_s,
            model=job.output_model,
            include_usage=include_usage,
        )
    encoder.outputs = outputs
    return encoder


def stops_parser(job: PreparedRequest, prompt: Prompt) -> OutputParser | None:
    """Return what finds the content of a choice for its stop strings; ``None`` where there are none, or no parser."""
    return _parser(job, prompt) if job.stops and job.output_format is not None else None


def _parser(job: PreparedRequest, prompt: Prompt) -> OutputParser:
    assert job.output_format is not None, "only asked for formats that need one"
    # The engine was told to write JSON, or the client's answer or calls: there is no room to reason.
    guided = "guided_json" in job.guide or ("structural_tag" in job.guide and job.tool_use is not None)
    parser = job.output_format.parser(job.tool_use, prompt.end, guided=guided, continued=job.continued)
    assert parser is not None, "active, so there is a parser"
    if job.output_format.reasoning and job.tool_use is None:
        parser = guided_answer(parser, job.guide)
    custom = job.tools.custom
    return CustomCalls(parser, custom, CUSTOM_ARGUMENT, custom_text) if custom else parser
