"""Command line options made from settings models: a field is declared once, with its range, default and description.

``lease_ttl_ms`` becomes ``--lease-ttl-ms`` and ``POOLGRID_LEASE_TTL_MS``. Precedence: defaults < settings file <
environment < command line. A value out of range ends the command with exit status 2 and a line that names the option.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import tomllib
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from poolgrid.kernel.wire.addresses import without_credentials
from poolgrid.server.cli.command_line import ENVIRONMENT_PREFIX, Option
from poolgrid.server.process.settings import INPUT_FILE, OUTPUT_DIRECTORY, Settings

S = TypeVar("S", bound=Settings)
Decorated = Callable[..., Any]

SETTINGS_FILE = "settings_file"
"""Names the option that reads settings from a file."""

NAMES_MAX = 3
"""Choices that a help text names in one place; more are "others", so that a further one changes no text."""


COMPOUND = re.compile(r"(?<![\w=/.-])[a-z0-9]+_\w+\b(?![=(])")
"""A word that may be the name of a setting; one without an underscore means something else in most sentences."""


def option_name(field: str, renamed: Mapping[str, str] | None = None) -> str:
    """Return the option of a settings field."""
    return (renamed or {}).get(field, "--" + field.replace("_", "-"))


def environment_name(field: str) -> str:
    """Return the environment variable of a settings field."""
    return ENVIRONMENT_PREFIX + field.upper()


def arguments_of(*instances: Settings) -> list[str]:
    """Return options that give another process of ours these very settings, regardless of its environment."""
    arguments: dict[str, list[str]] = {}
    for instance in instances:
        for name, field in type(instance).model_fields.items():
            value = getattr(instance, name)
            if value is None or name in arguments:
                continue
            option = option_name(name)
            if isinstance(value, bool):
                arguments[name] = [option if value else f"--no-{option[2:]}"]
            elif isinstance(value, tuple | list):
                arguments[name] = [word for item in value for word in (option, str(item))]
            elif value != "" or field.get_default(call_default_factory=True) != "":
                arguments[name] = [f"{option}={value}"]
    return [word for words in arguments.values() for word in words]


def with_settings(
    *models: type[Settings],
    renamed: Mapping[str, str] | None = None,
    from_file: bool = False,
    basics: Collection[str] = (),
) -> Callable[[Decorated], Decorated]:
    """Give a command one option per field of ``models``; it is called with one instance of each, in order.

    A field that several models share is one option for all of them. With ``from_file`` there is ``--settings-file``
    too: TOML with settings by name, which the environment and the command line override. ``basics`` are the settings
    on the first page of the help, in its order; without them the help has one page.
    """
    names = renamed or {}
    fields: dict[str, FieldInfo] = {}
    panels: dict[str, str] = {}
    for model in models:
        for name, field in model.model_fields.items():
            fields.setdefault(name, field)
        panels = {**model.panels(), **panels}
    options = [
        _option(
            name,
            fields[name],
            text=with_options(fields[name].description or "", fields, names),
            renamed=names,
            panel=panels[name],
            is_basic=name in basics,
        )
        for name in _basics_first(fields, basics)
    ]
    if from_file:
        options.append(_file_option())

    def decorate(function: Decorated) -> Decorated:
        @functools.wraps(function)
        def run(**values: Any) -> Any:
            file = values.pop(SETTINGS_FILE, None) if from_file else None
            of_file = {} if file is None else read_settings(file, fields)
            given = {**of_file, **_given(values, fields)}
            rest = {name: value for name, value in values.items() if name not in fields}
            return function(*(_build(model, given, names) for model in models), **rest)

        return _with(options, run)

    return decorate


def parsed_options(model: type[Settings], words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a model that a command line gives, by name; raises ``click.ClickException``."""

    def command(**values: Any) -> None:
        """Take the options."""

    made = click.command()(_with([_option(name, field) for name, field in model.model_fields.items()], command))
    context = made.make_context("options", list(words))
    given = _given(context.params, model.model_fields)
    return {name: value for name, value in given.items() if _is_typed(context, name)}


def _is_typed(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _basics_first(fields: Collection[str], basics: Collection[str]) -> list[str]:
    """Return the fields in the order of the help; a basic one may be of an engine that is not installed."""
    return [*(name for name in basics if name in fields), *(name for name in fields if name not in basics)]


def with_chosen_settings(
    choice: type[Settings], models: Mapping[str, type[Settings]], basics: Collection[str] = ()
) -> Callable[[Decorated], Decorated]:
    """Give a command the options of several models of which one applies: the one that ``choice``'s only field names.

    The command is called with one instance of that model. An option that only another model has is an error on the
    command line, and is ignored in the environment, which is shared by processes of both kinds. Options that models
    share by name may differ in default, range and description, not in type.
    """
    (selector,) = choice.model_fields
    fields: dict[str, dict[str, FieldInfo]] = {}
    for chosen, model in models.items():
        for name, field in model.model_fields.items():
            fields.setdefault(name, {})[chosen] = field
    panels: dict[str, set[str]] = {}
    for model in models.values():
        for name, panel in model.panels().items():
            panels.setdefault(name, set()).add(panel)
    options = [_option(selector, choice.model_fields[selector], is_basic=bool(basics))]
    for name in _basics_first(fields, basics):
        panel = next(iter(panels[name])) if len(panels[name]) == 1 else f"Several kinds of {selector}"
        options.append(_shared_option(name, fields[name], panel, is_basic=name in basics, known=fields))

    def decorate(function: Decorated) -> Decorated:
        @functools.wraps(function)
        def run(**values: Any) -> Any:
            given = _given(values, fields)
            picked = values.pop(selector)
            chosen = getattr(_build(choice, {} if picked is None else {selector: picked}), selector)
            model = models.get(chosen)
            if model is None:
                there = ", ".join(models)
                raise click.UsageError(
                    f"{option_name(selector)} is {chosen}, which is not installed; there are {there}"
                )
            for name in set(given) - set(model.model_fields):
                if _is_typed(click.get_current_context(), name):
                    _refuse_option(name, f"{option_name(selector)} {chosen}", model)
            rest = {name: value for name, value in values.items() if name not in fields}
            return function(_build(model, given), **rest)

        return _with(options, run)

    return decorate


def _with(options: Iterable[Callable[[Decorated], Decorated]], command: Decorated) -> Decorated:
    """Apply decorators so that the options stand in the help in the order given."""
    for option in reversed(list(options)):
        command = option(command)
    return command


def _given(values: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of settings that the command line or the environment gives."""
    return {name: value for name, value in values.items() if name in fields and value is not None and value != ()}


def read_settings(path: Path, fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    """Return the settings of a file; ends the command with status 2 when it cannot be used."""
    found: dict[str, Any] = {}
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        fault = f"cannot be read: {error.strerror or error}"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        fault = f"is not TOML: {error}"
    except RecursionError:
        fault = "is not TOML that can be read: it is nested too deeply"
    else:
        unknown = sorted(set(found) - set(fields))
        fault = next((f"{name!r} is no setting of this command" for name in unknown), "")
    if fault:
        _refuse(f"--settings-file {path}: {fault}; nothing was started")
    for name, value in found.items():
        if name.endswith("_bytes") and isinstance(value, str):
            try:
                found[name] = BYTES.convert(value, None, None)
            except click.BadParameter as error:
                _refuse(f"--settings-file {path}: {name}: {error.message}; nothing was started")
    return found


def _refuse(*lines: str) -> NoReturn:
    """End the command with status 2."""
    for line in lines:
        click.echo(line, err=True)
    raise SystemExit(2)


def _refuse_option(name: str, chosen: str, model: type[Settings]) -> None:
    near = difflib.get_close_matches(name, model.model_fields, 1, 0.5)
    hint = f"; did you mean {option_name(near[0])}?" if near else ""
    _refuse(f"{option_name(name)}: {chosen} has no such option{hint}")


def _shared_option(
    name: str, by_choice: Mapping[str, FieldInfo], panel: str, *, is_basic: bool, known: Collection[str]
) -> Any:
    """Return the option of a field that one or more models have, each in its own way."""
    shown = {
        chosen: _shown(field.get_default(call_default_factory=True), name.endswith("_bytes"))
        for chosen, field in by_choice.items()
    }
    texts: dict[str, list[str]] = {}
    for chosen, field in by_choice.items():
        texts.setdefault((field.description or "").removesuffix("."), []).append(chosen)
    first = next(iter(by_choice.values()))
    kinds = {_plain_type(field.annotation)[0] for field in by_choice.values()}
    if len(kinds) > 1:
        raise TypeError(f"making options: {name} has several types ({kinds}), allowed is one")
    text = "; ".join(f"{names}: {each}" for each, names in _with_others(texts)) + "."
    if len(texts) == 1:
        text = first.description or ""
    engines = {each: [chosen for chosen, of in shown.items() if of == each] for each in shown.values()}
    default = ", ".join(f"{each or 'none'} ({names})" for each, names in _with_others(engines))
    return _option(
        name,
        first,
        text=with_options(text, known),
        default=None if len(set(shown.values())) == 1 else default,
        panel=panel,
        is_basic=is_basic,
    )


def _with_others(groups: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Return groups with their names in one text; the largest, where it has more than ``NAMES_MAX``, last as others."""
    largest = max(groups.values(), key=len)
    others = largest if len(largest) > NAMES_MAX else None
    return [
        (each, "others" if names is others else ", ".join(names))
        for each, names in sorted(groups.items(), key=lambda group: group[1] is others)
    ]


def _option(
    name: str,
    field: FieldInfo,
    text: str | None = None,
    default: str | None = None,
    panel: str = "Options",
    is_basic: bool = False,
    renamed: Mapping[str, str] | None = None,
) -> Any:
    """Return the decorator that adds the option of a field; it is ``None`` where neither it nor its variable is given.

    Ranges and words are checked by the model: its errors are those of the settings file too.
    """
    kind, choices = _plain_type(field.annotation)
    option = option_name(name, renamed)
    text = field.description or "" if text is None else text
    if choices:
        text += f" One of: {', '.join(choices)}."
    is_size = name.endswith("_bytes")
    shown = _shown(field.get_default(call_default_factory=True), is_size) if default is None else default
    words = (*choices, *map(str, field.examples or ()))
    return click.option(
        f"{option}/--no-{option[2:]}" if kind is bool else option,
        name,
        cls=Option,
        panel=panel,
        is_basic=is_basic,
        type=BYTES if is_size else click.Path(path_type=Path) if kind is Path else str if kind is tuple else kind,
        multiple=kind is tuple,
        default=None,
        envvar=environment_name(name),
        help=f"{text} [default: {shown}]" if shown else text,
        shell_complete=_completer(words) if words else None,
    )


def _file_option() -> Any:
    return click.option(
        option_name(SETTINGS_FILE),
        SETTINGS_FILE,
        cls=Option,
        is_basic=True,
        type=click.Path(path_type=Path),
        envvar=environment_name(SETTINGS_FILE),
        help="TOML file with settings by name (worker_queue_factor = 1.5); the environment and options override it.",
    )


def _completer(words: tuple[str, ...]) -> Callable[..., list[str]]:
    """Return what completes a value that has names, also the last of several that commas part."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + word for word in words if word.startswith(last)]

    return complete


def _shown(default: Any, is_size: bool = False) -> str:
    if is_size and isinstance(default, int):
        return _size(default)
    if default is None or default is PydanticUndefined or default in ("", ()):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    if isinstance(default, float) and default.is_integer():
        return str(int(default))
    return str(default)


_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def _size(count: int) -> str:
    """Return a number of bytes in the largest unit that divides it."""
    for unit, factor in reversed(_UNITS.items()):
        if count and count % factor == 0:
            return f"{count // factor}{unit}"
    return str(count)


class ByteCount(click.ParamType[int]):
    """A number of bytes, or one of KiB, MiB, GiB or TiB as the help prints it (256MiB)."""

    name = "BYTES"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number, unit = re.fullmatch(r"\s*([-+]?\d*)\s*(.*?)\s*", str(value), re.DOTALL).groups()  # type: ignore[union-attr]
        factor = _UNITS.get(unit, None if unit else 1)
        if not number.lstrip("+-") or factor is None:
            allowed = "bytes, or whole KiB, MiB, GiB or TiB (256MiB)"
            self.fail(f"{value!r} is not a size; allowed: {allowed}", param, ctx)
        return int(number) * factor


BYTES = ByteCount()


def _plain_type(annotation: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the type an option is parsed as, and the allowed words of a literal."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _plain_type(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        inner = [each for each in get_args(annotation) if each is not type(None)]
        return _plain_type(inner[0])
    if origin is Literal:
        return str, tuple(str(each) for each in get_args(annotation))
    if origin in (tuple, list):
        return tuple, ()
    if annotation in (bool, int, float, str, Path):
        return annotation, ()
    raise TypeError(f"making options: a field of type {annotation!r} has no option form; give it a plain type")


def _build(model: type[S], values: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> S:
    known = {name: value for name, value in values.items() if name in model.model_fields}
    inputs = {name: value for name, value in known.items() if _has_mark(model.model_fields[name], INPUT_FILE)}
    faults = [
        f"{option_name(name, renamed)} {path}: no such file"
        for name, path in inputs.items()
        if not Path(path).is_file()
    ]
    faults += [
        f"{option_name(name, renamed)} {path}: {problem}"
        for name, path in known.items()
        if _has_mark(model.model_fields[name], OUTPUT_DIRECTORY) and (problem := directory_problem(Path(path)))
    ]
    if faults:
        _refuse(*faults)
    try:
        return model(**known)
    except ValidationError as error:
        _refuse(*(_fault_line(fault, model, renamed) for fault in error.errors()))


def directory_problem(path: Path) -> str:
    """Return why nothing can be kept in a directory, which is made where it is absent; empty when all is well."""
    place = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not place.is_dir():
        return f"{'it' if place == path else place} is a file, needed is a directory"
    return (
        "" if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written to; needed is a directory that can"
    )


def _has_mark(field: FieldInfo, mark: str) -> bool:
    """Whether a field is the path of such a file or directory; a union keeps the mark in its first member."""
    marks = list(field.metadata)
    for member in get_args(field.annotation):
        marks += getattr(member, "__metadata__", ())
    return mark in marks


def _fault_line(fault: Any, model: type[Settings], renamed: Mapping[str, str] | None) -> str:
    """Return what is wrong with a setting: the option or variable and the value as typed, and what is allowed."""
    message = fault["msg"].removeprefix("Value error, ")
    problem = with_options(message.replace("Input should be", "must be"), model.model_fields, renamed)
    plain = "|".join(name for name in model.model_fields if "_" not in name)
    if plain:  # such a word may mean something else in a sentence
        problem = re.sub(rf"(?<![\w=/.-])(?:{plain})(?= (?:is|are) | and (?:{plain}) are )", r"--\g<0>", problem)
    if not fault["loc"]:
        return problem
    name = str(fault["loc"][0])
    context = click.get_current_context(silent=True)
    is_variable = context is not None and context.get_parameter_source(name) is ParameterSource.ENVIRONMENT
    option = environment_name(name) if is_variable else option_name(name, renamed)
    if fault["type"] == "missing":
        return f"{option}: must be given"
    given = fault["input"]
    shown = " ".join(
        without_credentials(str(each)) for each in (given if isinstance(given, tuple | list) else (given,))
    )
    return f"{option} {shown}: {problem}"


def with_options(text: str, fields: Collection[str], renamed: Mapping[str, str] | None = None) -> str:
    """Return a text in which names of settings are options, as a person types them."""
    return COMPOUND.sub(lambda found: option_name(found[0], renamed) if found[0] in fields else found[0], text)
