"""Where chat templates run: Jinja's immutable sandbox, with bounds on steps, time, text and size.

A template comes with a model and meets whatever clients send, so neither may hang or swell the process. A thread cannot
be stopped from outside, and one operation can take minutes; so time is limited by small operations and a clock that is
read between them:

- Counted is whatever can repeat or grow: turns of loops, calls and filters (steps), the text and the entries of lists
  that are made (characters). Sizes are checked before an operation makes them: ``*``, ``**``, ``+``, ``~``, ``%``,
  ``format``, ``replace``, ``join``, ``split`` and whatever takes a width.
- No value has more than ``ENTRIES_MAX`` entries, those of the values inside it counted as often as they are there:
  ``[l, l]`` is two words of memory, and 26 of them in each other take minutes to compare or to print. What a template
  builds carries its size with it.
- The clock is read every few steps, and beside every operation on anything large.

What Jinja would work out while compiling is worked out while rendering, where it counts.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NoReturn, TypeVar

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

STEPS_MAX = 2_000_000
"""Turns of loops and calls of one rendering: a conversation of 10,000 messages takes some 100,000."""

NUMBER_MAX = 1_000_000
"""Largest number that a function or filter may be given: widths, indents and counts are far below it."""

NUMBER_BITS_MAX = 4096
"""Largest result of ``*`` and ``**`` on numbers."""

PRODUCED_FACTOR = 8
"""How much text may be made on the way to a prompt, as a multiple of the longest prompt."""

STEPS_PER_LOOK = 8
"""The clock is read once in so many steps: between two looks there are so many turns of a loop at most."""

LARGE = 4096
"""Characters or entries from which on the clock is read beside every operation; below, one takes some microseconds."""

ENTRIES_MAX = 1_000_000
"""Entries of one list, object or text's parts, with those inside them: comparing or printing them takes 0.1 s."""

ENTRY_CHARS = 8
"""Characters that an entry counts for: a word of memory."""

SLOW_CHARS_MAX = 1_000_000
"""Longest text for filters that look at its every word; they take up to a microsecond for each."""

_SLOW = frozenset(
    (
        "batch", "capitalize", "dictsort", "filesizeformat", "forceescape", "groupby", "list", "map", "max", "min",
        "pprint", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort", "striptags",
        "title", "truncate", "unique", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr",
    )
)  # fmt: skip
"""Filters that no template needs for whole conversations as one text, or that make a list of a text's characters."""

_WIDE = re.compile(r"[0-9]{7}")
T = TypeVar("T")


class TimeOver(SecurityError):
    """The time of a rendering is over."""


class _Spent:
    """What one rendering has used, and what it may."""

    __slots__ = ("chars", "chars_max", "deadline_s", "monotonic", "steps")

    def __init__(self, chars_max: int, deadline_s: float, monotonic: Callable[[], float]) -> None:
        self.steps = 0
        self.chars = 0
        self.chars_max = chars_max
        self.deadline_s = deadline_s
        self.monotonic = monotonic

    def step(self) -> None:
        self.steps += 1
        if self.steps > STEPS_MAX:
            raise SecurityError(f"more than {STEPS_MAX} steps, the limit")
        if self.steps % STEPS_PER_LOOK == 0:
            self.look()

    def make(self, chars: int) -> None:
        self.chars += chars
        if self.chars > self.chars_max:
            raise SecurityError(f"more than {self.chars_max} characters of text are made on the way, the limit")
        if chars > LARGE:
            self.look()

    def look(self) -> None:
        if self.monotonic() > self.deadline_s:
            raise TimeOver("it takes too long: the time limit is over")


class _List(list[Any]):
    """A list that a template built, and how many entries it has with those inside it."""

    __slots__ = ("entries",)
    entries: int


class _Tuple(tuple[Any, ...]):
    """As ``_List``."""

    entries: int


class _Dict(dict[Any, Any]):
    """As ``_List``."""

    __slots__ = ("entries",)
    entries: int


class _Namespace(Namespace):
    """A namespace that does not print what it holds, which nobody has counted."""

    def __repr__(self) -> str:
        return "<Namespace>"


_SIZED = (_List, _Tuple, _Dict)
_CONTAINERS = (list, tuple, dict, set, frozenset)


def entries_of(value: Any, look: Callable[[], None] = lambda: None) -> int:
    """Return how many entries a value has with those inside it; raises ``SecurityError`` above ``ENTRIES_MAX``.

    ``look`` is called every so often.
    """
    if isinstance(value, _SIZED):
        return value.entries
    if not isinstance(value, _CONTAINERS):
        return 0
    count = looked = 0
    todo: list[Any] = [value]
    while todo:
        here = todo.pop()
        count += len(here)
        looked += 1
        if count > ENTRIES_MAX:
            break
        if looked % LARGE == 0:
            look()
        for inner in here.values() if isinstance(here, dict) else here:
            if isinstance(inner, _SIZED):
                count += inner.entries
            elif isinstance(inner, _CONTAINERS):
                todo.append(inner)
    _within_limit(count)
    return count


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """An environment whose renderings are bounded; each thread renders one template at a time."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic, **options: Any) -> None:
        # Not optimized: constants would be folded while compiling, out of reach of the bounds.
        super().__init__(optimized=False, **options)
        self._monotonic = monotonic
        self._local = threading.local()
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        for name, function in list(self.filters.items()):
            self.filters[name] = self.bounded(function, slow=name in _SLOW)
        self.filters["sum"] = self._sum
        self.filters["join"] = self._join
        self.filters["replace"] = self.bounded(self._replace)
        self.filters["format"] = self._format
        self.filters["_turns"] = self._turns
        self.filters["_joined"] = self._joined
        self.filters["_built"] = self._built

    def begin(self, max_chars: int, limit_s: float) -> None:
        self._local.spent = _Spent(max_chars * PRODUCED_FACTOR, self._monotonic() + limit_s, self._monotonic)

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raise the error that is handled as it is.

        Jinja would show lines of the template in its traceback, which nobody sees here, by frames in a circle with the
        error: whatever the template had made would wait for the collector.
        """
        raise  # noqa: PLE0704 - Jinja calls this where it handles an error

    def bounded(self, function: Callable[..., T], slow: bool = False) -> Callable[..., T]:
        """Return a filter that counts, and takes no number that is too large, nor a long text if it is ``slow``."""

        # Some take the environment or the context before the value.
        first = int(hasattr(function, "jinja_pass_arg"))

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> T:
            self._check_arguments(args[1:], kwargs)
            spent = self._spent
            spent.step()
            value = args[first]
            if isinstance(value, str) and len(value) > LARGE:
                spent.look()
                if slow and len(value) > SLOW_CHARS_MAX:
                    raise SecurityError(f"a filter is given {len(value)} characters, allowed are {SLOW_CHARS_MAX}")
            result = function(*args, **kwargs)
            if slow and any(isinstance(other, _CONTAINERS) for other in (*args[first + 1 :], *kwargs.values())):
                # ``batch``, ``slice`` and ``map`` put it into their result, perhaps once for each item.
                filled: T = self._filled(result)
                return filled
            return self._made(result)

        return counted

    def call_test(self, name: str, value: Any, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        """Apply a test for a filter such as ``select``, which does so for each of its items."""
        spent = self._spent
        spent.step()
        for compared in (value, *(args or ())):
            if isinstance(compared, _CONTAINERS):
                spent.make(1 + entries_of(compared, spent.look))
            elif isinstance(compared, str) and len(compared) > LARGE:
                spent.look()
        return super().call_test(name, value, args, *rest, **kwargs)

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
        if isinstance(function, Macro):  # whatever a macro does with a number is looked at itself
            if function.catch_varargs or function.catch_kwargs:  # it gets a tuple or an object of them
                _within_limit(sum(1 + entries_of(each, self._spent.look) for each in (*args, *kwargs.values())))
        else:
            self._check_arguments(args, kwargs)
        self._spent.step()
        if function is dict:
            return self._built(super().call(context, function, *args, **kwargs))
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "")
        if isinstance(owner, str):
            if name == "replace" and len(args) >= 2:
                self._check_replacement(owner, str(args[0]), str(args[1]))
            elif name == "join" and args:
                return self._joined(_separated(owner, args[0]))
            elif name in ("split", "rsplit"):
                return self._made(self._parts(owner, name, *args, **kwargs))
            elif name == "splitlines":
                entries = owner.count("\n") + owner.count("\r") + 1
                if entries > ENTRIES_MAX:
                    raise SecurityError(f"a text is split into {entries} lines, allowed are {ENTRIES_MAX}")
            elif name == "translate":
                raise SecurityError("translate is not available")
        form = getattr(getattr(function, "__wrapped__", None), "__self__", None)
        if isinstance(form, str) and _WIDE.search(form):
            raise SecurityError("format is given a width that is too large")
        return self._made(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator that can make something large."""
        spent: _Spent = self._local.spent
        if operator == "+" and type(left) is str and type(right) is str:  # what nearly all of them are
            chars = len(left) + len(right)
            steps, made = spent.steps + 1, spent.chars + chars
            if steps % STEPS_PER_LOOK and steps <= STEPS_MAX and chars <= LARGE and made <= spent.chars_max:
                # As ``step`` and ``make``, where these would only count.
                spent.steps, spent.chars = steps, made
            else:
                spent.step()
                spent.make(chars)
            return left + right
        spent.step()
        if operator == "%" and isinstance(left, str):
            self._check_form(left, right if isinstance(right, tuple) else (right,))
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            spent.make(len(left) + len(right))
            result = super().call_binop(context, operator, left, right)
            return (
                result
                if isinstance(left, str)
                else self._enlarged(result, entries_of(left, spent.look) + entries_of(right, spent.look))
            )
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, Sized) and isinstance(times, int):
                    spent.make(len(sequence) * max(times, 0))
                    entries = 0 if isinstance(sequence, str) else entries_of(sequence, spent.look) * max(times, 0)
                    _within_limit(entries)
                    return self._enlarged(super().call_binop(context, operator, left, right), entries)
            if _bits(left) + _bits(right) > NUMBER_BITS_MAX:
                raise SecurityError("* makes a number that is too large")
        elif operator == "**" and _bits(left) * (right if isinstance(right, int) else 1) > NUMBER_BITS_MAX:
            raise SecurityError("** makes a number that is too large")
        return self._made(super().call_binop(context, operator, left, right))

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a macro or a block wrote."""
        return self._joined(parts)

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_turns", [], [], None, None, lineno=loop.lineno, environment=self)
        _count_under(source, self)
        return super()._generate(source, name, filename, defer_init)

    @property
    def _spent(self) -> _Spent:
        spent = getattr(self._local, "spent", None)
        assert isinstance(spent, _Spent), "begin() comes before every rendering"
        return spent

    def _made(self, result: T) -> T:
        if isinstance(result, str):
            self._spent.make(len(result))
        elif isinstance(result, _CONTAINERS):
            _within_limit(len(result))
            self._spent.make(len(result) * ENTRY_CHARS)
        return result

    def _filled(self, result: Any) -> Any:
        """Return the result of a filter that was given a list, with the entries of its items counted."""
        if isinstance(result, Iterator):
            return self._counted_items(result)
        entries_of(result, self._spent.look)
        return self._made(result)

    def _counted_items(self, items: Iterator[Any]) -> Iterator[Any]:
        entries = 0
        for item in items:
            entries += 1 + entries_of(item, self._spent.look)
            _within_limit(entries)
            self._spent.step()
            yield item

    def _enlarged(self, result: Any, entries: int) -> Any:
        """Return what ``+`` or ``*`` made of sequences, with its size when it is a list or a tuple."""
        _within_limit(entries)
        self._spent.make(entries * ENTRY_CHARS)
        return _with_size(result, entries)

    def _built(self, value: Any) -> Any:
        """Return a list, tuple or object that the template wrote down, with its size."""
        return _with_size(value, entries_of(value, self._spent.look))

    def _parts(self, text: str, name: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        most = ENTRIES_MAX if maxsplit < 0 else maxsplit
        parts: list[str] = getattr(text, name)(sep, most)
        if len(parts) > ENTRIES_MAX:
            raise SecurityError(f"a text is split into more than {ENTRIES_MAX} parts, the limit")
        return parts

    def _turns(self, items: Iterable[Any]) -> Iterator[Any]:
        spent: _Spent = self._local.spent
        for item in items:
            # As ``step``, without a call for each turn.
            spent.steps = steps = spent.steps + 1
            if steps > STEPS_MAX:
                raise SecurityError(f"more than {STEPS_MAX} steps, the limit")
            if steps % STEPS_PER_LOOK == 0:
                spent.look()
            yield item

    def _joined(self, parts: Iterable[Any]) -> str:
        spent = self._spent
        texts: list[str] = []
        for part in parts:
            text = part if isinstance(part, str) else str(part)
            spent.make(len(text))
            texts.append(text)
        return "".join(texts)

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        """Concatenate as Jinja's filter does, counting on the way."""
        items = value
        if attribute is not None:
            items = (self.getitem(item, attribute) for item in value)
        return self._joined(_separated(str(d), items))

    @pass_context
    def _sum(self, context: Context, value: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        """Add as Jinja's filter does, each time as ``+`` in a template: lists grow with each addition."""
        if isinstance(start, str):
            raise TypeError("sum() can't sum strings")
        total = start
        items = value if attribute is None else map(make_attrgetter(self, attribute), value)
        for item in items:
            total = self.call_binop(context, "+", total, item)
        return total

    def _replace(self, value: Any, old: str, new: str, count: int | None = None) -> str:
        text = str(value)
        self._check_replacement(text, str(old), str(new))
        return text.replace(str(old), str(new), -1 if count is None else count)

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        form = str(value)
        self._spent.step()
        self._check_form(form, (*args, *kwargs.values()))
        return self._made(form % (kwargs or args))

    def _check_form(self, form: str, values: Sequence[Any]) -> None:
        self._check_arguments(values if "*" in form else (), {})
        if _WIDE.search(form):
            raise SecurityError("% is given a width that is too large")

    def _check_replacement(self, text: str, old: str, new: str) -> None:
        self._spent.make((len(text) // max(len(old), 1) + 1) * len(new))

    @staticmethod
    def _check_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int | float) and abs(value) > NUMBER_MAX:
                raise SecurityError(f"a number is {value:.6g}, allowed are up to {NUMBER_MAX}")


def _within_limit(entries: int) -> None:
    if entries > ENTRIES_MAX:
        raise SecurityError(f"a value has more than {ENTRIES_MAX} entries, the limit")


def _separated(separator: str, items: Iterable[Any]) -> Iterator[Any]:
    first = True
    for item in items:
        if not first:
            yield separator
        first = False
        yield item


def _with_size(value: Any, entries: int) -> Any:
    made: Any = value
    if isinstance(value, list):
        made = _List(value)
    elif isinstance(value, tuple):
        made = _Tuple(value)
    elif isinstance(value, dict):
        made = _Dict(value)
    else:
        return value
    made.entries = entries
    return made


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _count_under(node: nodes.Node, environment: Environment) -> None:
    """Make every ``~`` under ``node``, and every list, tuple and object that is written down, a filter that counts."""
    for name, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_counted(item, environment) for item in value]
        elif isinstance(value, nodes.Node):
            setattr(node, name, _counted(value, environment))


def _counted(value: Any, environment: Environment) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _count_under(value, environment)
    if isinstance(value, nodes.Concat):
        parts = nodes.List(value.nodes, lineno=value.lineno, environment=environment)
        return _filter(parts, "_joined", environment)
    if isinstance(value, nodes.Dict):
        items = [pair.value for pair in value.items]
    elif isinstance(value, nodes.List) or (isinstance(value, nodes.Tuple) and value.ctx == "load"):
        items = value.items
    else:
        return value
    return value if all(isinstance(item, nodes.Const) for item in items) else _filter(value, "_built", environment)


def _filter(node: nodes.Expr, name: str, environment: Environment) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=environment)
