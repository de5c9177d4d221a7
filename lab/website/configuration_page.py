"""Writes the settings tables of pages: ``docs/configuration.md``, and the marked tables of other pages.

``python -m lab.website.configuration_page`` writes them; a test fails while a committed page differs. A table stands
between ``<!-- settings: Model OtherModel -->`` and ``<!-- /settings -->``, and holds the settings that these models
declare.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from poolgrid.cli.local_pool import UpSettings
from poolgrid.cli.main import app
from poolgrid.cli.options import environment_name
from poolgrid.consolidator.settings import ConsolidatorProcessSettings, ConsolidatorSettings
from poolgrid.discovery.settings import DiscoverySettings
from poolgrid.frontend.media.settings import MediaSettings
from poolgrid.frontend.settings import FrontendSettings
from poolgrid.global_router.settings import GlobalRouterSettings
from poolgrid.http.http_settings import HttpSettings, ServerSettings
from poolgrid.process.nats_settings import EventPlaneSettings, NatsSettings
from poolgrid.process.settings import Settings
from poolgrid.process.tracing.settings import TraceSettings
from poolgrid.router.settings import EndpointPickerSettings, RouterSettings
from poolgrid.serving.router_settings import ServingSettings
from poolgrid.tools.bench.settings import BenchSettings
from poolgrid.tools.engine_check.settings import EngineCheckSettings
from poolgrid.tools.simulation.settings import EngineSettings, SimulationSettings, WhatIfSettings
from poolgrid.transport.security import SecuritySettings
from poolgrid.workers.engines.registry import EngineChoice, engine_definition, engines
from poolgrid.workers.settings import WorkerProcessSettings

SOURCE_ROOT = Path(__file__).resolve().parents[2]
DOCS = SOURCE_ROOT / "docs"

BOUNDS = (
    ("ge", "≥"),
    ("gt", ">"),
    ("le", "≤"),
    ("lt", "<"),
    ("min_length", "length ≥"),
    ("max_length", "length ≤"),
)
"""How the rules of a field are spelled, and how the page writes them."""


class Section(NamedTuple):
    """One table of the page: a settings model as one command takes it."""

    title: str
    command: str
    models: tuple[type[Settings], ...]
    text: str


def _engine_section(name: str) -> Section:
    engine = engine_definition(name)
    return Section(f"Worker with {engine.title}", "worker", engine.tables or (engine.settings,), engine.about)


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
        "`--config` names a document: [pool grids](pool_grids.md). The options of the HTTP API apply too.",
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
    *map(_engine_section, engines()),
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
        "`global-router` has the connection options only: [a pool on NATS](nats.md).",
    ),
    Section(
        "Service discovery",
        "router",
        (DiscoverySettings,),
        "`router`, `worker`, `consolidator` and `global-router` have the same options: "
        "[service discovery](operations.md#service-discovery).",
    ),
    Section(
        "Traces",
        "router",
        (TraceSettings,),
        "`router`, `global-router` and `worker` have the same options: [traces](traces_and_logs.md#traces).",
    ),
    Section(
        "HTTP connection limits",
        "router",
        (HttpSettings,),
        "`router`, `global-router`, `worker` and `consolidator` have the same options, which apply per process: "
        "[security](security.md#http-connection-limits).",
    ),
    Section("Load generator", "bench", (BenchSettings,), "Modes and report: [bench](bench.md)."),
    Section(
        "Check of an engine server",
        "engine-check",
        (EngineCheckSettings,),
        "Checks and findings: [engine check](engine_check.md).",
    ),
    Section("Simulator", "simulate", (SimulationSettings,), "Procedure and output: [simulate](simulate.md)."),
    Section(
        "Recorded traffic with other settings",
        "what-if",
        (EngineSettings, WhatIfSettings),
        "Procedure: [what-if](what_if.md).",
    ),
)

MODELS: Mapping[str, type[Settings]] = {model.__name__: model for section in SECTIONS for model in section.models}

HEAD = """\
# Configuration

<!-- Generated: python -m lab.website.configuration_page -->

The settings of every command, generated from the code. `poolgrid COMMAND --help` lists the same options.

**Precedence.** Command line, environment variable, `--settings-file` (TOML; `poolgrid router`, and `poolgrid up` for
its routers), default.

**Environment variables.** `POOLGRID_` and the option's name in capitals, the same for every command with that option.
Set `POOLGRID_HOST` and similar variables per process, not per machine.

**Invalid values** end the command with exit status 2 and a line that names the option.

**Output of services.** `up`, `router`, `global-router`, `worker` and `consolidator` write one line that begins with
`ready` to standard output when they answer, and their log to standard error. Each has `--log-level`
(`POOLGRID_LOG_LEVEL`: debug, info, warning, error, and others for some loggers, as in `info,router=debug`) and
`--log-format` (`POOLGRID_LOG_FORMAT`: text, json). The default level is info, and warning for `up`.
See [logs](traces_and_logs.md#logs).
"""


_MARKED = re.compile(r"(<!-- settings: ([\w ]+) -->\n).*?(?=<!-- /settings -->)", re.DOTALL)


def pages() -> dict[Path, str]:
    """Return the text of every page that says something of settings, as it should be."""
    made = {DOCS / "configuration.md": page()}
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if _MARKED.search(text):
            made[path] = _MARKED.sub(lambda found: found[1] + table(found[2].split()), text)
    return made


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
    return "\n".join([HEAD, *(_section(section) for section in SECTIONS), _top()])


def _section(section: Section) -> str:
    options = command_options(section.command)
    lines = [
        f"## {section.title}: `poolgrid {section.command}`",
        "",
        section.text,
        "",
        "| option | environment | default | range | description |",
        "|---|---|---|---|---|",
    ]
    fields: dict[str, FieldInfo] = {}
    for model in section.models:
        fields.update(declared(model))
    for name, field in fields.items():
        cells = (
            f"`{options[name]}`",
            f"`{environment_name(name)}`",
            shown_default(field),
            shown_range(field),
            description_cell(field.description),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


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
        "| option | environment | default | description |",
        "|---|---|---|---|",
    ]
    for parameter in _parameters("top"):
        if parameter.name == "help":
            continue
        variable = f"`{parameter.envvar}`" if parameter.envvar else "none"
        default = f"`{parameter.default}`" if parameter.to_info_dict()["default"] else "off"
        text = parameter.help.partition(" [default:")[0]
        lines.append(f"| `{parameter.opts[0]}` | {variable} | {default} | {text} |")
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


def shown_range(field: FieldInfo) -> str:
    """Return the allowed values of a field as a cell: words, numbers, or lengths of a text."""
    words = _literal(field.annotation)
    if words:
        return ", ".join(f"`{word}`" for word in words)
    parts = [
        f"{sign} {_number(bound, grouped=True)}"
        for rule in field.metadata
        for attribute, sign in BOUNDS
        if (bound := getattr(rule, attribute, None)) is not None and (sign, bound) != ("length ≥", 0)
    ]
    return ", ".join(parts) or "any"


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
