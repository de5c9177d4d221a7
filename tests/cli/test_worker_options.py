"""`poolgrid worker`: two engines with options of their own behind one command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from poolgrid.kernel.wire.card import ChatSpec
from poolgrid.plugins.simulated.settings import SimulatedWorkerSettings
from poolgrid.plugins.trtllm.settings import TrtllmWorkerSettings
from poolgrid.server.cli.commands import worker as worker_command
from poolgrid.server.cli.main import app
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.workers.bootstrap import card_of_rank, chat_spec, told_card
from poolgrid.server.workers.settings import WorkerProcessSettings
from tests.installed import needs_parsers
from tests.wire.test_wire_frames import SMALL_CARD

Settings = SimulatedWorkerSettings | TrtllmWorkerSettings


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that workers would be started with."""
    found: list[Settings] = []

    async def serve(settings: Settings, stop: Any, ready: Any) -> None:
        found.append(settings)

    monkeypatch.setattr("poolgrid.server.workers.bootstrap.serve", serve)
    monkeypatch.setattr(worker_command, "run_service", lambda name, log, prepare, worker: _run(prepare()))
    return found


def _run(run: Any) -> None:
    try:
        run(None).send(None)
    except StopIteration:
        pass


def worker(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(app, ["worker", *arguments], env=environment)


def test_the_engine_decides_which_settings_there_are(chosen: list[Settings]) -> None:
    assert worker("--max-batch-size", "9").exit_code == 0
    assert worker("--engine", "trtllm", "--model-path", "m").exit_code == 0
    simulated, trtllm = chosen
    assert isinstance(simulated, SimulatedWorkerSettings)
    assert isinstance(trtllm, TrtllmWorkerSettings)
    assert (simulated.max_batch_size, trtllm.max_batch_size) == (9, 2048), "each has a default of its own"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine", "trtllm", "--speedup", "2"), "--speedup: --engine trtllm has no such option"),
        (("--kv-events-endpoint", "tcp://a:1"), "--kv-events-endpoint: --engine simulated has no such option"),
        (("--engine", "vllm", "--total-kv-blocks", "9"), "did you mean --kv-block-size?"),
        (("--engine", "vllm"), "neither --engine-url nor --model-path is given"),
        (("--engine", "vllm", "--engine-url", "gpu1:8000"), "--engine-url gpu1:8000: reading the URL 'gpu1:8000'"),
        (("--engine", "none"), "--engine none: must be 'simulated'"),
        (("--engine", "trtllm", "--kv-block-size", "0"), "--kv-block-size"),
    ],
)
def test_an_option_of_the_other_engine_is_an_error(
    chosen: list[Settings], arguments: tuple[str, ...], words: str
) -> None:
    result = worker(*arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert not chosen


def test_the_model_that_ships_brings_its_tokenizer(chosen: list[Settings], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for arguments in (
        ("--served-model-name", "tiny"),
        ("--served-model-name", "other"),
        ("--served-model-name", "tiny", "--vocabulary-size", "99"),
        ("--served-model-name", "tiny", "--model-path", str(tmp_path)),
    ):
        assert worker(*arguments).exit_code == 0
    simulated = [each for each in chosen if isinstance(each, SimulatedWorkerSettings)]
    assert [(each.tokenizer_path, each.vocabulary_size) for each in simulated] == [
        (TINY_MODEL_PATH, None),
        (None, None),
        (None, 99),
        (tmp_path, None),
    ]


@needs_parsers
@pytest.mark.parametrize("engine", ["simulated", "trtllm"])
@pytest.mark.parametrize("option", ["--chat-template", "--custom-jinja-template"])
def test_what_routers_need_to_know_of_a_model_may_be_given_to_its_workers(
    chosen: list[Settings], tmp_path: Path, engine: str, option: str
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    options = ("--reasoning-parser", "deepseek-r1", "--tool-call-parser", "hermes", "--max-file-size-mb", "7")
    assert worker("--engine", engine, *options, option, str(template)).exit_code == 0

    (settings,) = chosen
    chat = chat_spec(settings)
    card = told_card(SMALL_CARD, settings, chat)
    assert chat == ChatSpec("deepseek_r1", "hermes", "{{ messages }}")
    assert (card.chat, card.media.item_bytes_max) == (chat, 7 * 2**20)
    assert card_of_rank(card, 0) == card
    assert card_of_rank(card, 1).chat == ChatSpec("deepseek_r1", "hermes"), "a template travels once for each worker"
    assert told_card(SMALL_CARD, WorkerProcessSettings(), ChatSpec()) == SMALL_CARD


@pytest.mark.parametrize(
    ("content", "words"), [("{% if %}", "compiling the chat template"), (None, "no such file"), (b"\xff", "utf-8")]
)
def test_a_template_that_no_router_could_use_ends_the_start(
    chosen: list[Settings], tmp_path: Path, content: str | bytes | None, words: str
) -> None:
    template = tmp_path / "chat.jinja"
    if content is not None:
        template.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = worker("--chat-template", str(template))
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert not chosen


@pytest.mark.parametrize("engine", ["simulated", "trtllm"])
@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--advertise-host", "http://w9", "--advertise-host is 'http://w9'"),
        ("--advertise-host", "my host", "--advertise-host is 'my host'"),
        ("--advertise-host", "*", "--advertise-host is '*'"),
        ("--advertise-host", "0.0.0.0", "every address of a machine"),
        ("--advertise-host", "w9:4001", "no IPv6 address"),
        ("--host", "my host", "host is 'my host'"),
        ("--consolidator", "tcp://events", "'tcp://events' names no port"),
    ],
)
def test_an_address_that_nobody_could_connect_to_ends_the_start(
    chosen: list[Settings], engine: str, option: str, value: str, words: str
) -> None:
    result = worker("--engine", engine, option, value)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert not chosen


def test_engine_arguments_are_printed_with_their_sources_and_nothing_is_started(
    chosen: list[Settings], tmp_path: Path
) -> None:
    file = tmp_path / "qwen.yaml"
    file.write_text("max_num_tokens: 4096\n")
    result = worker(
        *("--engine", "trtllm", "--print-engine-args", "--extra-engine-args", str(file)),
        *("--override-engine-args", '{"max_batch_size": 5}'),
        POOLGRID_MODEL_PATH="some/model",
    )
    assert result.exit_code == 0, result.output
    values = yaml.safe_load(result.stdout)
    assert (values["model"], values["max_num_tokens"], values["max_batch_size"]) == ("some/model", 4096, 5)
    sources = {line.split(":")[0]: line.rpartition("# ")[2] for line in result.stdout.splitlines()}
    assert sources["max_num_tokens"] == str(file)
    assert sources["max_batch_size"] == "--override-engine-args"
    assert sources["model"] == "command line"
    assert not chosen


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--print-engine-args",), 2, "give --engine trtllm"),
        (("--engine", "trtllm", "--print-engine-args"), 1, "--model-path"),
        (
            ("--engine", "trtllm", "--model-path", "m", "--print-engine-args", "--override-engine-args", '{"top": 1}'),
            1,
            "top: is not a known argument",
        ),
    ],
)
def test_arguments_that_the_engine_would_refuse_are_not_printed(
    arguments: tuple[str, ...], status: int, words: str
) -> None:
    result = worker(*arguments)
    assert result.exit_code == status
    assert words in result.output
