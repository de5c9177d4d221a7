"""Command line options made from settings models: a field is declared once, with its range, default and description.

``lease_ttl_ms`` becomes ``--lease-ttl-ms`` and ``POOLGRID_LEASE_TTL_MS``. Precedence: defaults < environment < command
line. A value out of range ends the command with exit status 2 and a line that names the option.
"""

from __future__ import annotations

import difflib
import inspect
import tomllib
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from poolgrid.cli.former_settings import former_name
from poolgrid.process.settings import Settings

S = TypeVar("S", bound=Settings)
ENVIRONMENT_PREFIX = "POOLGRID_"

SETTINGS_FILE = "settings_file"
"""Names the option that reads settings from a file."""


def option_name(field: str, renamed: Mapping[str, str]) -> str:
    """Return the option of a settings field."""
    return renamed.get(field, "--" + field.replace("_", "-"))


def environment_name(field: str) -> str:
    """Return the environment variable of a settings field."""
    return ENVIRONMENT_PREFIX + field.upper()


def arguments_of(*instances: Settings) -> list[str]:
    """Return options that give another process of ours these very settings, whatever its environment says."""
    arguments: dict[str, list[str]] = {}
    for instance in instances:
        for name, field in type(instance).model_fields.items():
            value = getattr(instance, name)
            if value is None or name in arguments:
                continue
            option = option_name(name, {})
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
    hidden: tuple[str, ...] = (),
    from_file: bool = False,
    defaults: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command one option per field of ``models``; it is called with one instance of each, in order.

    A field that several models share is one option for all of them. ``hidden`` fields have no option and keep their
    default; ``defaults`` replaces defaults for this command, ``aliases`` are second names of options. With
    ``from_file`` there is ``--settings-file`` too: TOML with settings by name, which the environment and the command
    line override.
    """
    names = renamed or {}
    own_defaults = defaults or {}
    fields: dict[str, FieldInfo] = {}
    for model in models:
        for name, field in model.model_fields.items():
            if name not in hidden:
                fields.setdefault(name, field)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        # The first parameters are the settings; what follows are the command's own arguments and options.
        own = list(inspect.signature(command, eval_str=True).parameters.values())[len(models) :]

        def run(**values: Any) -> Any:
            file = values.pop(SETTINGS_FILE, None) if from_file else None
            of_file = {} if file is None else _read_settings(file, fields, command.__name__.replace("_", "-"))
            given = {
                name: value for name, value in values.items() if name in fields and value is not None and value != []
            }
            instances = [_build(model, {**own_defaults, **of_file, **given}, names) for model in models]
            rest = {name: value for name, value in values.items() if name not in fields}
            return command(*instances, **rest)

        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        for name, field in fields.items():
            default = own_defaults.get(name, field.get_default(call_default_factory=True))
            parameters.append(_parameter(name, field, default, names, alias=(aliases or {}).get(name)))
        if from_file:
            parameters.append(_file_parameter())
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__doc__ = command.__doc__
        run.__name__ = command.__name__
        return run

    return decorate


def _file_parameter() -> inspect.Parameter:
    annotation: Any = Annotated[  # built at run time
        Path | None,
        typer.Option(
            option_name(SETTINGS_FILE, {}),
            help="TOML file with settings by name (queue_weight = 0.3); the environment and options override it.",
            envvar=environment_name(SETTINGS_FILE),
            show_envvar=False,
        ),
    ]
    return inspect.Parameter(SETTINGS_FILE, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _read_settings(path: Path, fields: Mapping[str, FieldInfo], command: str) -> dict[str, Any]:
    """Return the settings of a file; ends the command with status 2 when it cannot be used."""
    where = f"--settings-file {path}"
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
        if not unknown:
            return found
        removed = [line for name in unknown if (line := former_name(command, name))]
        fault = removed[0] if removed else f"{unknown[0]!r} is no setting of this command"
    typer.echo(f"{where}: {fault}; nothing was started", err=True)
    raise typer.Exit(2)


def with_chosen_settings(
    choice: type[Settings], models: Mapping[str, type[Settings]]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
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

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        def run(context: typer.Context, **values: Any) -> Any:
            given = {
                name: value for name, value in values.items() if name in fields and value is not None and value != []
            }
            picked = {} if values[selector] is None else {selector: values[selector]}
            chosen = getattr(_build(choice, picked, {}), selector)
            model = models[chosen]
            for name in given:
                source = context.get_parameter_source(name)
                if name not in model.model_fields and source is not None and source.name == "COMMANDLINE":
                    _refuse_option(name, f"{option_name(selector, {})} {chosen}", model)
            rest = {name: value for name, value in values.items() if name not in fields and name != selector}
            return command(_build(model, given, {}), **rest)

        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        field = choice.model_fields[selector]
        # The command line's own parameter: it knows what was given there, and what in the environment.
        of_typer = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        parameters.insert(0, of_typer)
        parameters.append(_parameter(selector, field, field.default, {}))
        for name, by_choice in fields.items():
            parameters.append(_shared_parameter(name, by_choice, len(models), option_name(selector, {})))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__doc__ = command.__doc__
        run.__name__ = command.__name__
        return run

    return decorate


def _refuse_option(name: str, chosen: str, model: type[Settings]) -> None:
    near = difflib.get_close_matches(name, model.model_fields, 1, 0.5)
    hint = f"; did you mean {option_name(near[0], {})}?" if near else ""
    typer.echo(f"{option_name(name, {})}: {chosen} has no such option{hint}", err=True)
    raise typer.Exit(2)


def _shared_parameter(name: str, by_choice: Mapping[str, FieldInfo], choices: int, selector: str) -> inspect.Parameter:
    """Return the option of a field that one or more models have, each in its own way."""
    shown = {chosen: _shown(field.get_default(call_default_factory=True)) for chosen, field in by_choice.items()}
    texts = {chosen: field.description or "" for chosen, field in by_choice.items()}
    first = next(iter(by_choice.values()))
    kinds = {_plain_type(field.annotation)[0] for field in by_choice.values()}
    if len(kinds) > 1:
        raise TypeError(f"making options: {name} has several types ({kinds}), allowed is one")
    text = "; ".join(f"{chosen}: {each.removesuffix('.')}" for chosen, each in texts.items()) + "."
    default = ", ".join(f"{each} ({chosen})" for chosen, each in shown.items())
    return _parameter(
        name,
        first,
        first.get_default(call_default_factory=True),
        {},
        text=None if len(set(texts.values())) == 1 else text,
        shown_default=None if len(set(shown.values())) == 1 else default,
        panel=None if len(by_choice) == choices else f"Options of {selector} {', '.join(by_choice)}",
    )


def _parameter(
    name: str,
    field: FieldInfo,
    default: Any,
    renamed: Mapping[str, str],
    text: str | None = None,
    shown_default: str | None = None,
    panel: str | None = None,
    alias: str | None = None,
) -> inspect.Parameter:
    kind, choices = _plain_type(field.annotation)
    option = option_name(name, renamed)
    declared = f"{option}/--no-{option[2:]}" if kind is bool else option
    text = field.description or "" if text is None else text
    if choices:
        text += f" One of: {', '.join(choices)}."
    annotation: Any = Annotated[  # built at run time
        kind | None,
        typer.Option(
            *((declared,) if alias is None else (declared, alias)),
            help=text,
            envvar=environment_name(name),
            show_envvar=False,
            show_default=_shown(default) if shown_default is None else shown_default,
            rich_help_panel=panel,
            autocompletion=_completer((*choices, *map(str, field.examples or ()))),
        ),
    ]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _completer(words: tuple[str, ...]) -> Callable[[str], list[str]] | None:
    """Return what completes a value that has names, also the last of several that commas part."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + word for word in words if word.startswith(last)]

    return complete if words else None


def _shown(default: Any) -> str | bool:
    if default is None or default is PydanticUndefined or default in ("", ()):
        return False
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    if isinstance(default, float) and default.is_integer():
        return str(int(default))
    return str(default)


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
        return list[str], ()
    if annotation in (bool, int, float, str, Path):
        return annotation, ()
    raise TypeError(f"making options: a field of type {annotation!r} has no option form; give it a plain type")


def _build(model: type[S], values: dict[str, Any], renamed: Mapping[str, str]) -> S:
    known = {name: value for name, value in values.items() if name in model.model_fields}
    try:
        return model(**known)
    except ValidationError as error:
        for fault in error.errors():
            place = str(fault["loc"][0]) if fault["loc"] else ""
            where = option_name(place, renamed) if place else "options"
            got = f" (got {fault['input']!r})" if place and fault["type"] != "missing" else ""
            typer.echo(f"{where}: {fault['msg'].removeprefix('Value error, ')}{got}", err=True)
        raise typer.Exit(2) from None
