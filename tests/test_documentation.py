"""The pages say what the code does: every setting, metric, command and example, or a test here fails."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from lab.website.configuration_page import SECTIONS, command_options, pages, table
from lab.website.metrics_tables import EVERY_METRIC, FURTHER, with_tables, without_table
from lab.website.metrics_tables import PAGES as METRICS_PAGES
from poolgrid.kernel.decision.policy import Policy, RoutingRequest
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.wire.events import RequestStarted
from poolgrid.server.cli.main import app
from poolgrid.server.process.plugins import policy_names
from poolgrid.server.process.settings import Settings
from poolgrid.server.router.policy_loading import PolicyError, load_policy
from poolgrid.server.router.settings import RouterSettings
from tests.exported_metrics import Exported, exported
from tests.forms import needs_checkout
from tests.router.fleet_builder import BLOCK_SIZE, Pool, decided, stored, worker_key

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "poolgrid"
DOCS = ROOT / "docs"
BESIDE = ("pool_configs", "engine_configs", "launch", "tests/data")
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / name / "README.md" for name in BESIDE)])


_group = app
assert isinstance(_group, click.Group)
COMMANDS = _group.commands


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


# -- settings ----------------------------------------------------------------------------------------------------------


@needs_checkout
@pytest.mark.parametrize(("path", "text"), pages().items(), ids=lambda value: getattr(value, "name", ""))
def test_what_pages_say_of_settings_is_what_the_settings_say(path: Path, text: str) -> None:
    assert path.read_text() == text, "run: python -m lab.website.configuration_page"


@needs_checkout
def test_a_marked_table_that_is_out_of_date_is_written_anew() -> None:
    assert "| `max_queue_requests` | `4096` |" in table(["ServingSettings"])
    assert {path.name for path in pages()} >= {"configuration.md"}
    with pytest.raises(KeyError, match="NoSettings"):
        table(["NoSettings"])


def _settings_models(base: type[Settings] = Settings) -> Iterator[type[Settings]]:
    for model in base.__subclasses__():
        is_changed = getattr(sys.modules[model.__module__], model.__name__, None) is not model
        if model.__module__.startswith("tests.") or is_changed:
            continue
        yield model
        yield from _settings_models(model)


COMMANDS_OF_OTHER_PAGES = ("poolgrid.kernel.pool_grids.", "poolgrid.plugins.trtllm.")
"""Settings of parts that have no command of their own here yet."""


def test_every_settings_model_has_a_table() -> None:
    shown = {model for section in SECTIONS for model in section.models}
    found = {model for model in _settings_models() if not model.__module__.startswith(COMMANDS_OF_OTHER_PAGES)}

    assert found <= shown, (
        f"add to lab/website/configuration_page.py: {sorted(model.__name__ for model in found - shown)}"
    )


def test_every_setting_is_read_by_its_own_service() -> None:
    """Some are read by name, of a table or of what was chosen."""
    for model in _settings_models():
        ring, name = model.__module__.split(".")[1:3]
        package = PACKAGE / ring / name
        # Those of the API are read by both routers.
        holders = {
            package,
            *(PACKAGE / "server" / each for each in ("cli", "process", "transport", "http", "discovery")),
            *(PACKAGE / "plugins" / each for each in ("nats", "fleet_page")),
        }
        if ring == "plugins":
            holders.add(PACKAGE / "server" / "workers")
        if name in ("frontend", "serving"):
            holders |= {PACKAGE / "server" / each for each in ("router", "global_router", "serving")}
        code = "\n".join(path.read_text() for holder in holders for path in holder.resolve().rglob("*.py"))
        read = set(re.findall(r"\.([a-z_]\w*)\b", code)) | set(re.findall(r'"([a-z_]\w*)"', code))

        assert set(model.model_fields) <= read, f"{model.__name__}: {sorted(set(model.model_fields) - read)} do nothing"


@pytest.mark.parametrize("command", sorted({section.command for section in SECTIONS}))
def test_every_option_of_a_command_is_on_the_page(command: str) -> None:
    text = (DOCS / "configuration.md").read_text()

    for option in command_options(command).values():
        if "--help" not in option:
            assert f"`{option}`" in text, f"docs/configuration.md lacks {option} of poolgrid {command}"


# -- commands ----------------------------------------------------------------------------------------------------------


def test_every_command_is_in_the_readme_and_says_what_it_does() -> None:
    readme = (ROOT / "README.md").read_text()

    for name, command in COMMANDS.items():
        assert f"`poolgrid {name}`" in readme, f"README.md does not name poolgrid {name}"
        assert command.help, f"poolgrid {name} --help says nothing"


def _printed_commands() -> Iterator[tuple[str, str]]:
    for path in PAGES:
        for block in code_blocks(path.read_text(), "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                found = re.search(r"(?:^|&& |\s)(?:\.venv/bin/)?poolgrid (\S.*)$", re.sub(r"(^|\s)#.*", "", line))
                if found:
                    yield str(path.relative_to(ROOT)), found[1]


@pytest.mark.parametrize(("where", "line"), sorted(set(_printed_commands())))
def test_every_printed_command_parses(where: str, line: str) -> None:
    arguments = list(itertools.takewhile(lambda word: word != ">", shlex.split(line, comments=True)))
    command: Any = _group
    name = ""
    while isinstance(command, click.Group):
        name = arguments.pop(0)
        assert name.startswith("-") or name in command.commands, f"{where}: poolgrid {line}: {name} is no command"
        if name.startswith("-"):
            return
        command = command.commands[name]
    if not {"--help", "-h"} & set(arguments):
        try:
            command.make_context(name, arguments)
        except Exception as error:
            # A page may speak of the reader's files; options and values must be right.
            if "does not exist" not in str(error):
                raise AssertionError(f"{where}: poolgrid {line}: {error}") from error


# -- metrics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METRICS_PAGES)
def test_the_tables_of_metrics_are_what_the_code_says_and_name_no_metric_twice(name: str) -> None:
    page = (DOCS / name).read_text()
    named = re.findall(r"^\| `(poolgrid_\w+)", page, re.MULTILINE)

    assert with_tables(page, exported()) == page, "run: make docs"
    assert named, f"docs/{name} has no table of metrics"
    assert len(named) == len(set(named)), f"docs/{name} has a metric twice"
    assert re.findall(r"^\| `(poolgrid_\w+)", with_tables(page, []), re.MULTILINE) == [], "a table has no marks"


def test_the_page_of_metrics_has_a_table_for_every_metric() -> None:
    assert without_table((DOCS / EVERY_METRIC).read_text(), exported()) == []


def test_no_other_page_has_a_table_of_metrics_kept_by_hand() -> None:
    by_hand = [path.name for path in PAGES if re.search(r"^\| `poolgrid_[\w{},]+` \|", path.read_text(), re.MULTILINE)]

    assert sorted(by_hand) == sorted(METRICS_PAGES), "put the table between marks and the page into PAGES"


def test_what_is_said_further_is_said_of_metrics_that_exist() -> None:
    assert set(FURTHER) <= {each.name for each in exported()}


def test_a_metric_that_is_new_gets_a_row_beside_its_like_and_one_that_is_gone_loses_it() -> None:
    page = (DOCS / EVERY_METRIC).read_text()
    gone, new = exported()[0], Exported(GaugeMetricFamily("poolgrid_worker_queue_age_seconds", "Its age."), ("tier",))

    written = with_tables(page, [*exported()[1:], new])

    assert f"| `{gone.name}" not in written
    row = "| `poolgrid_worker_queue_age_seconds{tier}` | Its age. |"
    assert row in written
    above = written[: written.index(row)].splitlines()[-1]
    assert above.startswith("| `poolgrid_worker_queue_seconds")
    other = Exported(GaugeMetricFamily("other_blocks", "Blocks."), ())
    assert without_table(page, [*exported(), other]) == ["other_blocks"]


def test_a_help_that_changes_makes_every_table_with_it_stale() -> None:
    said = next(each for each in exported() if each.name == "poolgrid_worker_requests_total")
    family = CounterMetricFamily("poolgrid_worker_requests", "Other words.")
    changed = [*(each for each in exported() if each is not said), Exported(family, said.labels)]

    for name in (EVERY_METRIC,):
        page = (DOCS / name).read_text()
        assert with_tables(page, changed) == page.replace(f" {said.family.documentation} |", " Other words. |")


def test_metrics_that_pages_speak_of_exist() -> None:
    names = {each.name for each in exported()}
    kinds = "router|global_router|worker|trtllm|frontend|consolidator|http|plane"

    for path in PAGES:
        # A history may speak of what is no more.
        text = re.sub(r"^- Metrics, old -> new:.*(?:\n  .*)*", "", path.read_text(), flags=re.MULTILINE)
        for name in re.findall(rf"\bpoolgrid_(?:{kinds})_\w*[a-z]\b", text):
            assert name in names, f"{path.relative_to(ROOT)} speaks of {name}"


ALONE = ("poolgrid_worker_", "poolgrid_trtllm_")
"""Processes that never share a port with others of their kind."""


def test_every_gauge_says_what_becomes_of_it_across_http_processes() -> None:
    gauges = [metric for metric, _ in exported() if metric.type == "gauge"]
    silent = [metric.name for metric in gauges if not isinstance(metric, GaugeMetricFamily)]

    assert [name for name in silent if not name.startswith(ALONE)] == []


COUNT_ENDINGS = ("_total", "_count", "_sum", "_bucket", "_created", "_info")
"""What Prometheus puts behind the names of counters and histograms; nothing else may end so."""

BASE_UNITS = ("seconds", "bytes", "ratio")
"""A unit is one of these, and stands last (before ``_total``); without one a number counts what its name says."""

OTHER_UNITS = {
    *("ns", "us", "ms", "milliseconds", "microseconds", "minutes", "hours"),
    *("kb", "mb", "gb", "kib", "mib", "gib", "megabytes", "bits"),
    *("percent", "percentage", "share", "fraction", "rate"),
}


def text_says_one(metric: Metric) -> bool:
    """Tell whether it is always 1, and says what it says with its labels: such a gauge is called ``_info``."""
    return metric.documentation.startswith("1, with ")


def _unconventional(metric: Metric) -> str | None:
    """What is wrong with a metric by https://prometheus.io/docs/practices/naming/ and the rules of this project."""
    name, kind = metric.name, metric.type
    words = name.split("_")
    if not re.fullmatch(r"poolgrid(_[a-z0-9]+)+", name):
        return "is not poolgrid_ and lower-case words"
    if name.endswith("_info") and kind == "gauge" and text_says_one(metric):
        return None
    if name.endswith(COUNT_ENDINGS):
        return f"is a {kind} and ends like what Prometheus adds itself"
    if kind not in ("counter", "gauge", "histogram"):
        return f"is a {kind}"
    if wrong := OTHER_UNITS.intersection(words):
        return f"has {wrong} in its name; units are {', '.join(BASE_UNITS)}"
    if set(BASE_UNITS).intersection(words[:-1]):
        return "has its unit before the end"
    if kind == "histogram" and words[-1] not in (*BASE_UNITS, "tokens"):
        return "is a histogram of something without a unit"
    text = metric.documentation
    if not text[:1].isupper() and not text[:1].isdigit():
        return f"has a help that says nothing or begins in the middle: {text!r}"
    if kind == "gauge" and re.match(r"(Times|How often|Number of times)\b", text):
        return f"is a gauge that only grows: {text!r}"
    if any(not re.fullmatch(r"[a-z]+(_[a-z]+)*", label) for sample in metric.samples for label in sample.labels):
        return "has a label that is not lower-case words"
    return None


def test_metrics_are_named_by_the_conventions_of_prometheus() -> None:
    wrong = {metric.name: why for metric, _ in exported() if (why := _unconventional(metric))}

    assert not wrong


@pytest.mark.parametrize(
    ("metric", "why"),
    [
        (GaugeMetricFamily("poolgrid_x_blocks_total", "Blocks."), "ends like what Prometheus adds"),
        (GaugeMetricFamily("poolgrid_x_overflows", "Times it ran over."), "only grows"),
        (GaugeMetricFamily("poolgrid_x_lag_ms", "Lag."), "units are seconds"),
        (GaugeMetricFamily("poolgrid_x_seconds_lag", "Lag."), "unit before the end"),
        (GaugeMetricFamily("poolgrid_x_hit_rate", "Hits."), "units are seconds"),
        (GaugeMetricFamily("poolgrid_xBlocks", "Blocks."), "lower-case words"),
        (GaugeMetricFamily("poolgrid_x_blocks", ""), "says nothing"),
        (HistogramMetricFamily("poolgrid_x_delay", "Delay."), "without a unit"),
    ],
    ids=lambda value: value.name if isinstance(value, Metric) else "",
)
def test_a_metric_that_breaks_a_convention_is_named_with_the_reason(metric: Metric, why: str) -> None:
    assert why in (_unconventional(metric) or "")


# -- policies ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def example_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Policy]:
    """The policy that docs/policies.md prints, loaded the way a router does."""
    text = (DOCS / "policies.md").read_text()
    marked = re.search(r"<!-- example: (\w+)\.py -->\n```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    shown = re.search(r"--policy (\w+:\w+)", text)
    assert marked is not None
    assert shown is not None
    (tmp_path / f"{marked[1]}.py").write_text(marked[2])
    monkeypatch.syspath_prepend(tmp_path)
    yield load_policy(RouterSettings.model_validate({"policy": shown[1]}))
    sys.modules.pop(marked[1], None)


def test_the_policy_example_reuses_unless_the_holder_has_a_long_queue(example_policy: Policy) -> None:
    pool = Pool()
    pool.join("a", "b")
    path = list(range(100, 110))
    request = RoutingRequest("r", "m", 10 * BLOCK_SIZE, BLOCK_SIZE, 10)
    pool.say(worker_key("b"), stored(path[:8]))
    selector = pool.selector(example_policy)

    unknown = decided(selector.select(WorkerWanted(request, list(range(200, 210)), now_ms=0.0, time_ms=0)))
    reused = decided(selector.select(WorkerWanted(request, path, now_ms=0.0, time_ms=0)))
    pool.say(worker_key("b"), RequestStarted("long", 16_384 + 9 * BLOCK_SIZE, 0, 1))
    avoided = decided(selector.select(WorkerWanted(request, path, now_ms=0.0, time_ms=0)))

    assert unknown.choice.reason == "tie"
    assert (reused.worker, reused.policy) == (worker_key("b"), "reuse-unless-queued")
    assert avoided.worker == worker_key("a")
    assert list(avoided.choice.terms["queued_blocks"]) == [0.0, 9.0]


def test_a_policy_that_lacks_something_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("half_a_policy")
    module.Half = type("Half", (), {"name": "half"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "half_a_policy", module)

    with pytest.raises(PolicyError, match="it lacks needs_overlap, choose"):
        load_policy(RouterSettings.model_validate({"policy": "half_a_policy:Half"}))


def test_every_policy_is_on_the_page() -> None:
    text = (DOCS / "policies.md").read_text()

    for name in policy_names():
        assert f"| `{name}`" in text


# -- links and words ---------------------------------------------------------------------------------------------------


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)

    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), f"{path.relative_to(ROOT)} links to {link}"
        if anchor:
            anchors = {_anchor(heading) for heading in re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)}
            assert anchor in anchors, f"{path.relative_to(ROOT)} links to {link}"


def test_files_that_pages_speak_of_exist() -> None:
    for path in PAGES:
        for name in re.findall(
            r"`((?:docs|tests|lab|deploy|launch|src|router|global_router|workers|kernel|server|plugins)/[\w./-]+\.\w+)"
            r"(?:::\w+)?`",
            path.read_text(),
        ):
            is_there = (ROOT / name).exists() or (PACKAGE / name).exists()
            assert "NAME" in name or is_there, f"{path.relative_to(ROOT)} speaks of {name}"


DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_has_the_parts_of_the_template_and_a_line_in_the_index(path: Path) -> None:
    headings = re.findall(r"^## (.*)$", path.read_text(), re.MULTILINE)
    number, title = re.findall(r"\A# (\d{4}): (.+)$", path.read_text(), re.MULTILINE)[0]

    assert headings == re.findall(r"^## (.*)$", (DOCS / "decisions" / "template.md").read_text(), re.MULTILINE)
    assert path.name.startswith(f"{number}-")
    assert title
    assert f"- [{number}]({path.name}): " in (DOCS / "decisions" / "README.md").read_text()


def test_no_number_is_given_to_two_decisions() -> None:
    numbers = [path.name[:4] for path in DECISIONS]

    assert len(set(numbers)) == len(numbers)


def test_no_text_installs_from_an_index_a_name_that_is_not_ours() -> None:
    """Whoever registers it there runs code where the line is copied: install from a checkout or a wheel file."""
    texts = [*PAGES, *(path for name in ("src", "deploy", "launch") for path in sorted((ROOT / name).rglob("*")))]
    wrong = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in texts
        if path.suffix in (".md", ".py", ".sh", ".yml", ".yaml", ".service") and path.is_file()
        for found in re.finditer(
            r"pip install(?: -[\w-]+)* ['\"]?poolgrid\b(?![-/.]|==).*", path.read_text(encoding="utf-8")
        )
    ]

    assert not wrong


def test_python_on_pages_is_python() -> None:
    for path in PAGES:
        for block in code_blocks(path.read_text(), "python"):
            ast.parse(block)
