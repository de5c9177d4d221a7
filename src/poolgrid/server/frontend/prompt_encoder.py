"""Text to token ids, without doing the same work twice: the fastest exact tokenizer, and a cache of prompt segments.

Rules
    1. The answer is always the tokenizer's own answer for the whole text.
    2. A prompt is cut only in front of a *delimiter*: an added token at which the tokenizer itself cuts, whatever
       stands next to it. ``_delimiters`` returns the tokens proven to be one; with none, nothing is ever cut.
    3. A segment keeps its delimiter at its front, so that what follows is tokenized as the continuation that it is
       (SentencePiece style tokenizers treat the start of a text differently).
    4. Cuts depend on the text before them only, so the prompts of one conversation are cut alike, turn after turn.
    5. Caches (``segment_cache.py``) hold the token ids of whole segments, at most ``cache_bytes`` of them: one for each
       tenant, and in it each salt finds its own (``poolgrid.server.process.caches``).
    6. Tokenizers remember words, of any client. Without ``word_cache`` none does: then the time that a text takes
       depends on nothing that was encoded before. ``tokenizers`` can be told so, ``fastokens`` cannot and is not used.
    7. ``fastokens``, where it is installed and agrees with ``tokenizers`` on every probe, does the work; otherwise
       ``tokenizers`` does, and ``slow_because`` says why.

Why a cut is exact: the tokenizer first takes the added tokens that are not normalized out of the raw text, leftmost and
longest first, and from then on works on each piece between them alone: normalizer, the other added tokens,
pre-tokenizer and model. So the ids of a text are those of its pieces, in order.
"""

from __future__ import annotations

import logging
import random
import re
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any, Final, Protocol
from weakref import WeakSet

import msgspec
from tokenizers import Tokenizer

from poolgrid.kernel.requests.inference import CacheDomain
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.server.frontend.tokenization import SEGMENT_CHARS_MIN, Cutter, SegmentCache, cut
from poolgrid.server.process.caches import TenantCaches

log: Final = logging.getLogger(__name__)

CACHE_BYTES_DEFAULT: Final = 64 * 1024 * 1024
"""About 10 M tokens: a thousand conversations of 10k tokens, in less memory than two workers' token streams."""

DELIMITERS_MAX: Final = 8
"""Delimiters that are searched for; templates use two or three, and each costs one pass over the text."""

_MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel")
_WORD: Final = re.compile(r"\w")


class BatchEncoder(Protocol):
    """A tokenizer that returns packed ids."""

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[bytes]:
        """Return the ids of each text, u32 little-endian."""
        ...


class _Tokenizers:
    """The reference."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[bytes]:
        # The batch call leaves out character offsets, a quarter of the time; for one text it starts no threads.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [pack_tokens(encoding.ids) for encoding in encodings]


class _Fastokens:
    """``fastokens``: ids come as bytes, no object per token."""

    def __init__(self, native: Any) -> None:
        self._flat = native.encode_batch_flat

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[bytes]:
        flat, offsets = self._flat(list(texts), add_special_tokens)
        if len(texts) == 1:
            return [flat]
        ends = struct.unpack(f"<{len(texts) + 1}Q", offsets)
        return [flat[4 * begin : 4 * end] for begin, end in pairwise(ends)]


class Lookup(msgspec.Struct):
    """A text in segments: the ids of those that are known, the text of those that are not."""

    is_cut: bool
    add_special_tokens: bool
    parts: list[bytes]
    """The ids of each segment, empty where they are not known."""
    missing: list[int]
    """Which segments are not known."""
    texts: list[str]
    """Their text."""
    cache: SegmentCache | None = None
    """Where they are kept."""
    salt: str = ""

    @property
    def text_bytes(self) -> int:
        return sum(len(text) if text.isascii() else 3 * len(text) for text in self.texts)


class _ModelDocument(msgspec.Struct):
    """What is read of a tokenizer's model; its vocabulary and merges are not."""

    type: str = ""
    dropout: Any = None
    nbest_size: Any = None
    alpha: Any = None


class TokenizerDocument(msgspec.Struct):
    """What is read of a ``tokenizer.json``."""

    model: _ModelDocument = msgspec.field(default_factory=_ModelDocument)
    added_tokens: list[dict[str, Any]] | None = None
    truncation: dict[str, Any] | None = None
    padding: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


read_document: Final = msgspec.json.Decoder(TokenizerDocument).decode
"""Reads a tokenizer as it writes itself; what is not wanted of its megabytes is passed over."""

UNPROVEN: Final = "it is not proven yet"


class TokenizerBackend:
    """How one tokenizer's work is done, whatever the template."""

    def __init__(
        self, tokenizer: Tokenizer, fast: bool, word_cache: bool, proves_later: bool = False, text: str = ""
    ) -> None:
        """``text`` is the tokenizer as its file has it, where that is known."""
        if not word_cache:
            _forget_words(tokenizer)
        text = text or tokenizer.to_str()
        document = read_document(text)
        self._text = text if fast and word_cache else ""
        """The tokenizer as a file has it, megabytes, until ``prove`` has read it."""
        self.reference: BatchEncoder = _Tokenizers(tokenizer)
        self.encoder: BatchEncoder = self.reference
        self.slow_because = UNPROVEN
        self.lock = threading.Lock()
        """Held while ``encoder`` is replaced, and while a prompt encoder checks its cuts with it."""
        self.prompt_encoders: WeakSet[PromptEncoder] = WeakSet()
        """Those that work with this tokenizer, one for each template."""
        contents = [str(added["content"]) for added in document.added_tokens or []]
        self._probes = list(probes(contents))
        if fast and not word_cache:
            self.slow_because = "it remembers words, by which tenants could tell what others have sent"
        elif not fast:
            self.slow_because = "it is switched off"
        elif not proves_later:
            self.prove()
        self.cuttable = _delimiters(document, tokenizer)
        self.cut_probes = self._probes[::8]
        self.wrapping = _wrapping(document.post_processor)

    def prove(self) -> None:
        """Use ``fastokens`` from now on where it agrees, unless that was found out; takes seconds, in any thread.

        The prompt encoders check their cuts with it first.
        """
        if self.slow_because is UNPROVEN:
            encoder, slow_because = _choose(self._text, self.reference, self._probes)
            with self.lock:
                for each in self.prompt_encoders if encoder is not self.reference else ():
                    each.check_cuts(encoder)
                self.encoder, self.slow_because = encoder, slow_because
        self._text = ""


class PromptEncoder:
    """Encodes the prompts of one model; safe to use from several threads at once."""

    def __init__(
        self,
        tokenizer: Tokenizer | TokenizerBackend,
        *,
        template_text: str = "",
        cache_bytes: int = CACHE_BYTES_DEFAULT,
        fast: bool = True,
        word_cache: bool = True,
        proves_later: bool = False,
        text: str = "",
    ) -> None:
        """Choose the fastest exact way, unless that was done (``for_template``), or is done later (``prove``).

        ``template_text`` shows which delimiters prompts will have; ``text`` is the tokenizer as its file has it, where
        that is known: to write one of 10 MB takes 0.2 s.
        """
        self._backend = (
            tokenizer
            if isinstance(tokenizer, TokenizerBackend)
            else TokenizerBackend(tokenizer, fast, word_cache, proves_later, text)
        )
        self._reference = self._backend.reference
        self._wrapping = self._backend.wrapping
        self._caches = TenantCaches(cache_bytes, SegmentCache)
        self.reused_tokens = 0
        """Prompt tokens that came from the cache, since the start."""
        self.encoded_tokens = 0
        """Prompt tokens that were computed."""
        self.fast_failures = 0
        """Prompts on which ``fastokens`` failed, and which the reference encoded."""
        self._cache_bytes = cache_bytes
        self.delimiters: tuple[str, ...] = ()
        """Added tokens in front of which prompts are cut."""
        with self._backend.lock:
            self._cut_at(template_text)
            self._backend.prompt_encoders.add(self)

    def for_template(self, template_text: str) -> PromptEncoder:
        """Return an encoder for another template, with caches and counts of its own and this one's tokenizer."""
        return PromptEncoder(self._backend, template_text=template_text, cache_bytes=self._cache_bytes)

    def _cut_at(self, template_text: str) -> None:
        """Cut prompts at the delimiters that a template uses, as far as the tokenizer agrees."""
        cuttable = self._backend.cuttable
        used = [content for content in cuttable if content in template_text]
        rest = [content for content in cuttable if content not in template_text]
        self.delimiters = tuple((used or rest)[:DELIMITERS_MAX]) if self._cache_bytes > 0 else ()
        self.check_cuts(self._backend.encoder)

    def check_cuts(self, encoder: BatchEncoder) -> None:
        """Cut no prompts from now on where an encoder contradicts the proof."""
        if self.delimiters and not self._cuts_agree(encoder, self._backend.cut_probes):
            self.delimiters = ()

    @property
    def slow_because(self) -> str:
        """Return why ``fastokens`` is not used; empty when it is."""
        return self._backend.slow_because

    def prove(self) -> None:
        """Choose the fastest exact way, where that was left for later."""
        self._backend.prove()

    @property
    def is_proven(self) -> bool:
        """Return whether the fastest exact way is chosen."""
        return self._backend.slow_because is not UNPROVEN

    @property
    def is_fast(self) -> bool:
        """Return whether ``fastokens`` does the work."""
        return not self.slow_because

    def encode(self, text: str, add_special_tokens: bool = False, domain: CacheDomain | None = None) -> bytes:
        """Return the token ids of a text, u32 little-endian; without a ``domain`` nothing is looked up or kept."""
        if len(text) < 2 * SEGMENT_CHARS_MIN or not self.delimiters:
            # Nothing is cut or kept of it, with or without a domain.
            [packed] = self._encode((text,), add_special_tokens)
            self.encoded_tokens += len(packed) // 4
            return packed
        return self.complete(self.look_up(text, add_special_tokens, domain))

    def look_up(self, text: str, add_special_tokens: bool = False, domain: CacheDomain | None = None) -> Lookup:
        """Cut a text and look its segments up, which is quick; ``complete`` does the rest, here or in a thread."""
        delimiters, length = self.delimiters, len(text)
        if length < 2 * SEGMENT_CHARS_MIN or not delimiters or (add_special_tokens and self._wrapping is None):
            return Lookup(False, add_special_tokens, [b""], [0], [text])
        cache = None if domain is None else self._caches.of(domain.tenant, domain.shares)
        if cache is None or domain is None:
            return Lookup(False, add_special_tokens, [b""], [0], [text])
        salt = domain.salt
        parts: list[bytes] = []
        missing: list[int] = []
        texts: list[str] = []
        cutter = Cutter(text, delimiters)
        begin = 0
        while (begin := cache.follow(text, begin, delimiters, salt, parts)) < length:
            end = cutter.end_from(begin)
            segment = text[begin:end]
            # What is shorter is never kept.
            known = cache.get(segment, salt) if end - begin >= SEGMENT_CHARS_MIN else None
            if known is None:
                missing.append(len(parts))
                texts.append(segment)
            parts.append(known or b"")
            begin = end
        return Lookup(True, add_special_tokens, parts, missing, texts, cache, salt)

    def complete(self, lookup: Lookup) -> bytes:
        """Return the token ids of a text that was looked up, u32 little-endian; once for each lookup."""
        parts = lookup.parts
        reused = sum(map(len, parts))
        if lookup.texts:
            of_tokenizer = lookup.add_special_tokens and not lookup.is_cut
            found = self._encode(lookup.texts, of_tokenizer, lookup.is_cut)
            for index, segment, packed in zip(lookup.missing, lookup.texts, found, strict=True):
                parts[index] = packed
                if lookup.cache is not None and len(segment) >= SEGMENT_CHARS_MIN:
                    lookup.cache.keep(segment, packed, lookup.salt)
        if lookup.is_cut and lookup.add_special_tokens and self._wrapping is not None:
            before, after = self._wrapping
            packed = b"".join((before, *parts, after))
            special = len(before) + len(after)
        else:
            packed = b"".join(parts)
            special = 0
        self.reused_tokens += reused // 4
        self.encoded_tokens += (len(packed) - special - reused) // 4
        return packed

    def clear(self) -> None:
        self._caches.clear()

    @property
    def cache_used_bytes(self) -> int:
        """Return the bytes that the segments take."""
        return sum(cache.used_bytes for cache in self._caches)

    def _encode(self, texts: Sequence[str], add_special_tokens: bool, is_cut: bool = False) -> list[bytes]:
        encoder = self._backend.encoder
        if is_cut and not self.delimiters:  # cut before an encoder was chosen that contradicts the proof
            encoder = self._reference
        try:
            return encoder.encode(texts, add_special_tokens)
        except BaseException as error:  # a panic of the native code arrives as a BaseException of its own
            if encoder is self._reference or isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            self.fast_failures += 1
            log.warning("fastokens failed on a prompt, tokenizers does it: %s: %s", type(error).__name__, error)
            return self._reference.encode(texts, add_special_tokens)

    def _cuts_agree(self, encoder: BatchEncoder, texts: Iterable[str]) -> bool:
        """Try the proof on real input; a tokenizer that contradicts it is never cut."""
        filler = "x y\n" * (SEGMENT_CHARS_MIN // 2)
        for text in texts:
            for delimiter in self.delimiters:
                whole = f"{text}{filler}{delimiter}{text}{filler}{delimiter}{delimiter} {text}"
                expected = encoder.encode((whole,), False)[0]
                if b"".join(encoder.encode(cut(whole, self.delimiters), False)) != expected:
                    log.warning("prompts are not cut: the tokenizer does not cut at %r", delimiter)
                    return False
        return True


def _forget_words(tokenizer: Tokenizer) -> None:
    """Have a tokenizer keep no words; raises ``RuntimeError`` where the library cannot."""
    model = tokenizer.model
    resize = getattr(model, "_resize_cache", None)
    if resize is not None:
        # Whatever was kept before stays findable, so there must be nothing: the document is only just loaded.
        model._clear_cache()
        resize(0)
    elif type(model).__name__ in ("BPE", "Unigram"):
        raise RuntimeError("this version of tokenizers cannot switch its cache of words off; use 0.21 or newer")


def _delimiters(document: TokenizerDocument, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return added tokens at which every text that holds them is cut.

    Proven for tokens that are matched in raw text with nothing swallowed around them, that no other added token can
    overlap, and next to which no other token's word check can tell the token from the end of the text.
    """
    model = document.model
    if model.type not in _MODELS or model.dropout or model.nbest_size or model.alpha:
        return ()
    if tokenizer.encode_special_tokens:
        return ()
    added = [entry for entry in document.added_tokens or [] if entry["content"]]
    raw = [entry["content"] for entry in added if not entry["normalized"]]
    single_words = any(entry["single_word"] for entry in added)
    prefixes = {content[:end] for content in raw for end in range(1, len(content))}
    insides = {character for content in raw for character in content[1:]}
    firsts = {content[0] for content in raw}
    safe: list[str] = []
    for entry in added:
        content: str = entry["content"]
        if entry["normalized"] or entry["lstrip"] or entry["rstrip"] or entry["single_word"]:
            continue
        if content != content.strip() or content[0] in insides or firsts.intersection(content[1:]):
            continue
        if content in prefixes or any(content[:end] in raw for end in range(1, len(content))):
            continue
        if single_words and (_WORD.match(content[0]) or _WORD.match(content[-1])):
            continue
        safe.append(content)
    return tuple(safe)


def _wrapping(post_processor: Mapping[str, Any] | None) -> tuple[bytes, bytes] | None:
    """Return what the post-processor puts before and after any text, or ``None`` when that is not certain."""
    if post_processor is None or post_processor["type"] == "ByteLevel":
        return b"", b""
    if post_processor["type"] in ("BertProcessing", "RobertaProcessing"):
        return pack_tokens([post_processor["cls"][1]]), pack_tokens([post_processor["sep"][1]])
    if post_processor["type"] == "Sequence":
        before = after = b""
        for part in post_processor["processors"]:
            inner = _wrapping(part)
            if inner is None:
                return None
            before, after = inner[0] + before, after + inner[1]
        return before, after
    if post_processor["type"] == "TemplateProcessing":
        around: list[list[int]] = [[]]
        for piece in post_processor["single"]:
            if "SpecialToken" in piece:
                around[-1].extend(post_processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
            else:
                around.append([])
        if len(around) == 2:
            return pack_tokens(around[0]), pack_tokens(around[1])
    return None


def _choose(tokenizer_json: str, reference: BatchEncoder, texts: Sequence[str]) -> tuple[BatchEncoder, str]:
    """Return ``fastokens`` for this tokenizer, or the reference and why."""
    try:
        fastokens = import_module("fastokens")
    except ImportError:
        return reference, "it is not installed, and has no wheel for every platform"
    try:
        candidate = _Fastokens(fastokens.Tokenizer.from_json_str(tokenizer_json))
        # What is put around a text depends on no text: a few by themselves, and all in a batch.
        for add_special_tokens, single in ((False, texts), (True, texts[::8])):
            for text in single:
                if candidate.encode((text,), add_special_tokens) != reference.encode((text,), add_special_tokens):
                    shown = text if len(text) <= 60 else f"{text[:60]}..."
                    return reference, f"it encodes {shown!r} in another way than tokenizers"
            if candidate.encode(texts, add_special_tokens) != reference.encode(texts, add_special_tokens):
                return reference, "it encodes a batch in another way than tokenizers"
    except BaseException as error:  # a panic of the native code arrives as a BaseException of its own
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return reference, f"it does not take this tokenizer: {error}"
    return candidate, ""


_PIECES = (
    "", " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n ", "\u00a0", "\u3000", "\u200b", "\u200d",
    "\ufeff", "\x00", "\x1f", "\x7f", "\u0085", "\u2028", "a", "A", "ab", "Hello", "hello world", "don't",
    "DON'T", "I'Ll", "we'RE", "'s", "ſ", "K", "0", "12", "1234567", "3.14", "-1e9", "!", "?!", "...", "->",
    "=>", "//", "/*", "{}", "[]", "()", "``", "```py\n", "_", "__init__", "$x", "@", "#", "<", "<|", "|>",
    "</", "é", "e\u0301", "ñ", "ß", "İ", "ı", "ŉ", "ﬁ", "Å", "\u1e9b\u0323", "\u0344", "Ω", "русский",
    "ελληνικά", "עברית", "العربية", "हिन्दी", "ไทย", "日本語", "中文字符", "한국어", "\u1100\u1161",
    "ｆｕｌｌ", "①", "½", "²", "٣", "🙂", "👩‍👩‍👧", "🏳️‍🌈", "🇩🇪", "\U0001f9d1\U0001f3fd",
    "\U00010348", "\ue000", "\ufffd", "\U0010ffff", "▁", "Ġ", "##", "##ing", "Ċ", "<0x0A>", "<unk>",
    "[UNK]", "[CLS]", "</s>", "<s>",
)  # fmt: skip
"""What tokenizers are known to treat in different ways: blanks, contractions, digits, marks, scripts, own signs."""

PROBE_SEED: Final = 20_260_101
RANDOM_PROBES: Final = 96


def probes(added_tokens: Sequence[str]) -> Iterable[str]:
    """Yield adversarial texts for a tokenizer with these added tokens; always the same ones."""
    source = random.Random(PROBE_SEED)
    tokens = list(added_tokens[:32])
    yield from _PIECES
    yield "".join(_PIECES)
    yield " ".join(_PIECES)
    yield from ("a" * 300, "ab" * 300, " " * 300, "\n" * 100, "1" * 100, "é" * 200, "🙂" * 60, "!" * 200, "word " * 100)
    for token in tokens:
        yield f"{token}{token} {token}  a{token}b \n{token}\t{token[:-1]}{token[1:]}{token[0]}{token}"
    for number in range(RANDOM_PROBES):
        pieces = source.choices([*_PIECES, *tokens], k=source.randrange(2, 40))
        if number % 4 == 0:
            pieces += [chr(source.choice((source.randrange(0x20, 0x2FF), source.randrange(0x2000, 0xD7FF))))] * 3
        yield ("" if number % 2 else " ").join(pieces)
