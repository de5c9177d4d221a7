"""Writes the settings tables of pages: ``docs/configuration.md``, and the marked tables of other pages. The README gets
its table of commands.

``python -m lab.website.configuration_page`` writes them; a test fails while a committed page differs. A table stands
between ``<!-- settings: Model OtherModel -->`` and ``<!-- /settings -->``, and holds the settings that these models
declare.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from poolgrid.plugins.bench.settings import BenchSettings
from poolgrid.plugins.engine_check.settings import EngineCheckSettings
from poolgrid.plugins.simulation.settings import EngineSettings, SimulationSettings, WhatIfSettings
from poolgrid.server.cli.local_pool import UpSettings
from poolgrid.server.cli.main import SECTIONS as COMMANDS
from poolgrid.server.cli.main import app
from poolgrid.server.consolidator.settings import ConsolidatorProcessSettings, ConsolidatorSettings
from poolgrid.server.discovery.settings import DiscoverySettings
from poolgrid.server.frontend.media.settings import MediaSettings
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.global_router.settings import GlobalRouterSettings
from poolgrid.server.http.http_settings import HttpSettings, ServerSettings
from poolgrid.server.process.nats_settings import EventPlaneSettings, NatsSettings
from poolgrid.server.process.settings import Settings
from poolgrid.server.process.tracing.settings import TraceSettings
from poolgrid.server.router.settings import EndpointPickerSettings, RouterSettings
from poolgrid.server.serving.router_settings import ServingSettings
from poolgrid.server.transport.security import SecuritySettings
from poolgrid.server.workers.engines.definition import EngineDefinition
from poolgrid.server.workers.engines.registry import EngineChoice, engine_definition, engines
from poolgrid.server.workers.engines.server.settings import EngineServerSettings, EngineServersSettings
from poolgrid.server.workers.settings import StepTimesSettings, WorkerProcessSettings

SOURCE_ROOT = Path(__file__).resolve().parents[2]
DOCS = SOURCE_ROOT / "docs"

WORDS_MAX = 12
"""Longest list of allowed words: the formats of models have a page."""

UNSET = ("none", "empty", "off")
"""Defaults that the page leaves out."""

BOUNDS = ("ge", "gt", "le", "lt")
"""Rules of a field that the page writes."""


class Section(NamedTuple):
    """One table of the page: a settings model as one command takes it."""

    title: str
    command: str
    models: tuple[type[Settings], ...]
    text: str


def _engine_sections() -> Iterator[Section]:
    """Yield a section for each engine, and one for all kinds of engine servers, whose options are the same."""
    found = {name: engine_definition(name) for name in engines()}
    of_kinds = {name: each for name, each in found.items() if each.server_kind is not None and each.follow is None}
    for name, engine in found.items():
        if name not in of_kinds:
            yield Section(f"Worker with {engine.title}", "worker", engine.tables or (engine.settings,), engine.about)
    tables = (EngineServersSettings, EngineServerSettings, StepTimesSettings)
    settings = (each.settings for each in of_kinds.values())
    yield Section("Worker with an engine server", "worker", (*tables, *settings), _text_of_kinds(of_kinds))


def _text_of_kinds(engines: Mapping[str, EngineDefinition[Any]]) -> str:
    lines = [
        "A worker [in front of an engine's own server](engine_servers.md), by its kind:",
        "",
        "| `--engine` | start the server with, for its cache events |",
        "|---|---|",
    ]
    for name, engine in engines.items():
        assert engine.server_kind is not None
        lines.append(f"| `{name}` | `{engine.server_kind.events_option}` |")
    return "\n".join(lines)


SECTIONS = (
    Section(
        "A whole pool on one machine",
        "up",
        (UpSettings,),
        "All other settings of the parts keep their defaults. With `--dry-run`, `--json` prints the plan as JSON.",
    ),
    Section(
        "Router",
        "router",
        (ServerSettings, ServingSettings, RouterSettings),
        "Selection of workers, admission queue, and listening addresses.",
    ),
    Section(
        "Endpoint picker",
        "router",
        (EndpointPickerSettings,),
        "For an Envoy gateway in front of engine servers: [endpoint picker](gateway.md).",
    ),
    Section(
        "HTTP API",
        "router",
        (FrontendSettings,),
        "Options of `poolgrid router` and `poolgrid global-router`: [HTTP API](http_api.md).",
    ),
    Section(
        "Media of chat messages",
        "router",
        (MediaSettings,),
        "Options of `poolgrid router` and `poolgrid global-router`: [media](multimodal.md).",
    ),
    Section(
        "Global router",
        "global-router",
        (ServerSettings, ServingSettings, GlobalRouterSettings),
        "`--config` names a [pool grid](global_router.md#pool-grids). The options of the HTTP API apply too.",
    ),
    Section(
        "Consolidator",
        "consolidator",
        (ConsolidatorSettings, ConsolidatorProcessSettings),
        "All but the last four are also options of `poolgrid router`, for its embedded consolidator (without "
        "`--feed-endpoint`); `--host` is then the router's own.",
    ),
    Section(
        "Worker",
        "worker",
        (EngineChoice, WorkerProcessSettings),
        "Options of every worker. One of the tables below applies in addition, by engine. An option of another engine "
        "is an error; its variable is ignored. Defaults and ranges may differ between engines.",
    ),
    *_engine_sections(),
    Section(
        "Security",
        "router",
        (SecuritySettings,),
        "`router`, `global-router`, `worker` and `consolidator` have the same options: [security](security.md).",
    ),
    Section(
        "Event plane on NATS",
        "router",
        (EventPlaneSettings, NatsSettings),
        "`router`, `worker`, `consolidator` and `up` have the same options, which must agree within a pool. "
        "`global-router` has the connection options only: [a pool on NATS](several_hosts.md#a-journal-on-nats).",
    ),
    Section(
        "Service discovery",
        "router",
        (DiscoverySettings,),
        "`router`, `worker`, `consolidator` and `global-router` have the same options: "
        "[service discovery](several_hosts.md#service-discovery).",
    ),
    Section(
        "Traces",
        "router",
        (TraceSettings,),
        "`router`, `global-router` and `worker` have the same options: [traces](observability.md#traces).",
    ),
    Section(
        "HTTP connection limits",
        "router",
        (HttpSettings,),
        "`router`, `global-router`, `worker` and `consolidator` have the same options, which apply per process: "
        "[security](security.md#http-connection-limits).",
    ),
    Section("Load generator", "bench", (BenchSettings,), "Modes and report: [bench](measuring.md#bench)."),
    Section(
        "Check of an engine server",
        "engine-check",
        (EngineCheckSettings,),
        "Checks and findings: [engine check](engine_servers.md#check-a-server).",
    ),
    Section("Simulator", "simulate", (SimulationSettings,), "Procedure and output: [simulate](measuring.md#simulate)."),
    Section(
        "Recorded traffic with other settings",
        "what-if",
        (EngineSettings, WhatIfSettings),
        "Procedure: [what-if](measuring.md#recorded-traffic).",
    ),
)

MODELS: Mapping[str, type[Settings]] = {model.__name__: model for section in SECTIONS for model in section.models}

HEAD = """\
# Commands and options

<!-- Generated: python -m lab.website.configuration_page -->

The options of every command, generated from the code, each with its default; an option without one is unset or off.
`poolgrid COMMAND --help` lists the basic ones, `--help PANEL` one group, `--help-all` every option.

**Environment variables.** Every option has one: `--max-queue-requests` is `POOLGRID_MAX_QUEUE_REQUESTS`, the same for
every command. Set `POOLGRID_HOST` and similar variables per process, not per machine. A misspelt one is refused.

**Precedence.** Command line, environment variable, `--settings-file` (TOML; `poolgrid router`, and `poolgrid up` for
its routers), default.

**Exit status.** 0 for success; 1 for a check that failed or a result that is not sound; 2 for wrong arguments, with a
line that names the option.

**Output of commands.** Results go to standard output, remarks and progress to standard error. `--json` prints JSON in
place of tables, `--out FILE` writes it. A table in a pipe has all columns and one line per row; set `COLUMNS` to get
the layout of a terminal.

**Completion.** `poolgrid completion SHELL` prints the script for bash, zsh or fish:
`eval "$(poolgrid completion bash)"`.

**Output of services.** `up`, `router`, `global-router`, `worker` and `consolidator` write one line that begins with
`ready` to standard output when they answer, and their log to standard error. Each has `--log-level`
(`POOLGRID_LOG_LEVEL`: debug, info, warning, error, and others for some loggers, as in `info,router=debug`) and
`--log-format` (`POOLGRID_LOG_FORMAT`: text, json). The default level is info, and warning for `up`.
See [logs](observability.md#logs).
"""


_COMMANDS = re.compile(r"(<!-- commands -->\n).*?(?=<!-- /commands -->)", re.DOTALL)
_MARKED = re.compile(r"(<!-- settings: ([\w ]+) -->\n).*?(?=<!-- /settings -->)", re.DOTALL)


def pages() -> dict[Path, str]:
    """Return the text of every page that says something of settings, as it should be."""
    readme = (SOURCE_ROOT / "README.md").read_text(encoding="utf-8")
    made = {
        DOCS / "configuration.md": page(),
        SOURCE_ROOT / "README.md": _COMMANDS.sub(lambda found: found[1] + _commands(), readme),
    }
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if _MARKED.search(text):
            made[path] = _MARKED.sub(lambda found: found[1] + table(found[2].split()), text)
    return made


def _commands() -> str:
    lines = ["| Commands ([options](docs/configuration.md)) | |", "|---|---|"]
    for section, commands in COMMANDS.items():
        lines.append(f"| {section.lower()} | {', '.join(f'`poolgrid {name}`' for name in commands)} |")
    return "\n".join([*lines, ""])


def table(names: list[str]) -> str:
    """Return the table of the settings that models declare, by the models' names; raises ``KeyError``.

    Of a setting that several declare, the first that is named says what it is.
    """
    fields: dict[str, FieldInfo] = {}
    for name in names:
        for field_name, field in declared(MODELS[name]).items():
            fields.setdefault(field_name, field)
    lines = ["| setting | default | description |", "|---|---|---|"]
    for name, field in fields.items():
        lines.append(f"| `{name}` | {shown_default(field)} | {description_cell(field.description)} |")
    return "\n".join([*lines, ""])


def page() -> str:
    """Return ``docs/configuration.md``."""
    rows: dict[str, str] = {}
    texts: set[tuple[str, str]] = set()
    return "\n".join([HEAD, *(_section(section, rows, texts) for section in SECTIONS), _top()])


def _section(section: Section, above: dict[str, str], texts: set[tuple[str, str]]) -> str:
    """Return a section without rows of tables above, and without their descriptions; both collections get its own."""
    options = command_options(section.command)
    fields: dict[str, FieldInfo] = {}
    for model in section.models:
        fields.update(declared(model))
    rows, same = [], []
    for name, field in fields.items():
        option = f"`{options[name]}`"
        text = description_cell(field.description)
        allowed = shown_range(field, text)
        named = " ".join([option, *([] if (default := shown_default(field)) in UNSET else [default])])
        row = f"| {named} | {text}{f' ({allowed})' if allowed else ''} |"
        if above.get(option) == row:
            same.append(option)
        else:
            rows.append(row.replace(text, "As above.") if (option, text) in texts else row)
            above.setdefault(option, row)
        texts.add((option, text))
    lines = [f"## {section.title}: `poolgrid {section.command}`", "", section.text, ""]
    if rows:
        lines += ["| option, default | description (allowed) |", "|---|---|", *rows, ""]
    if same:
        lines += [f"As in a table above: {', '.join(same)}.", ""]
    return "\n".join(lines)


def declared(model: type[Settings]) -> dict[str, FieldInfo]:
    """Return the settings that a model declares itself, without those of its bases that it leaves as they are."""
    inherited = {name for base in model.__bases__ for name in getattr(base, "model_fields", ())}
    own = model.__annotations__
    return {name: field for name, field in model.model_fields.items() if name not in inherited or name in own}


def description_cell(text: str | None) -> str:
    """Return the description of a setting as a cell of a table, with its URLs quoted."""
    return re.sub(r"(?<!`)https?://[^\s,;)]*[^\s,;).]", lambda url: f"`{url[0]}`", (text or "").replace("|", "\\|"))


def _top() -> str:
    lines = [
        "## Live view: `poolgrid top`",
        "",
        "| option, default | description |",
        "|---|---|",
    ]
    for parameter in _parameters("top"):
        if parameter.name == "help":
            continue
        default = f" `{parameter.default}`" if parameter.to_info_dict()["default"] else ""
        text = parameter.help.partition(" [default:")[0]
        lines.append(f"| `{parameter.opts[0]}`{default} | {text} |")
    return "\n".join([*lines, ""])


def command_options(command: str) -> dict[str, str]:
    """Return the options of a command by the name of the setting, as the command line really has them."""
    options: dict[str, str] = {}
    for parameter in _parameters(command):
        if parameter.param_type_name == "option":
            options[parameter.name] = "` `".join([*parameter.opts, *parameter.secondary_opts])
    return options


def _parameters(command: str) -> list[Any]:
    return list(app.commands[command].params)


def shown_default(field: FieldInfo) -> str:
    """Return a field's default as a cell."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if value in ("", ()):
        return "empty"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return f"`{','.join(map(str, value))}`"
    if isinstance(value, Path):
        # The installed place differs from machine to machine; what ships with poolgrid has the same name everywhere.
        return f"the shipped `{value.relative_to(SOURCE_ROOT)}`" if value.is_relative_to(SOURCE_ROOT) else f"`{value}`"
    return f"`{_number(value)}`"


def shown_range(field: FieldInfo, said: str = "") -> str:
    """Return the allowed values of a field, words or a range of numbers, that its description does not have."""
    words = _literal(field.annotation)
    if len(words) > WORDS_MAX:
        return "[names](internals/parsers.md#selection)"
    if all(re.search(rf"\b{re.escape(word)}\b", said) for word in words) and words:
        return ""
    if words:
        return ", ".join(f"`{word}`" for word in words)
    bounds: dict[str, Any] = {}
    for rule in field.metadata:
        bounds |= {name: bound for name in BOUNDS if (bound := getattr(rule, name, None)) is not None}
    if not bounds:
        return ""
    low = f"above {_number(bounds['gt'], grouped=True)}" if "gt" in bounds else ""
    if "ge" in bounds:
        low = _number(bounds["ge"], grouped=True)
    high = next((_number(bounds[name], grouped=True) for name in ("le", "lt") if name in bounds), "")
    if low and high:
        return f">{low.removeprefix('above ')}–{high}" if "gt" in bounds else f"{low}–{high}"
    return f"from {low}" if low and "ge" in bounds else low or f"to {high}"


def _literal(annotation: Any) -> tuple[str, ...]:
    origin = get_origin(annotation)
    if origin is Literal:
        return tuple(str(word) for word in get_args(annotation))
    if origin is Union or origin is Annotated:
        return _literal(get_args(annotation)[0])
    return ()


def _number(value: Any, grouped: bool = False) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return f"{value:,}" if grouped else str(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
