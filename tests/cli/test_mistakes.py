"""Mistakes on the command line, each with its message: what is wrong, as typed, and what is allowed.

All are found before a process starts.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from poolgrid.server.cli.main import app
from poolgrid.server.cli.part import Part

ANY = ("--port", "0")
MISTAKES = {
    ("up", "--policy", "kvv", *ANY): "--policy kvv: unknown, allowed are kv, approximate, ",
    ("up", "--engine-url", "gpu1:8000"): "'gpu1:8000' is no server, it begins with neither http:// nor https://",
    ("up", "--engine-url", "http://a:1", "--engine-url", "http://a:1/v1"): "--engine-url is http://a:1 more than once",
    ("up", "--engine-url", "http://a:1", "--workers", "3"): "--workers is 3 with --engine-url: the servers run already",
    ("up", "--worker-urls", "http://a:1"): "--worker-urls: Name engine servers with poolgrid up --engine-url URL",
    ("up", "--prefill", "2"): "--prefill is 2 and --decode is 0: prefill workers need a decode worker",
    ("up", "--workers", "0"): "--workers and --decode are 0: no worker would generate tokens",
    ("up", "--worker", "3"): "No such option '--worker'. Did you mean '--workers'?",
    ("up", "--port", "99999"): "--port 99999: must be less than or equal to 65535",
    ("up", "--start-timeout-ms", "-1"): "--start-timeout-ms -1.0: must be greater than 0",
    ("up", "--model-path", "/absent"): "--model-path /absent: not a directory",
    ("up", "--pools", "absent.json"): "--pools absent.json: no such file",
    ("up", "--data-dir", "FILE", *ANY): "--data-dir FILE: it is a file, needed is a directory",
    ("up", "--data-dir", "FILE/below", *ANY): "--data-dir FILE/below: FILE is a file, needed is a directory",
    ("up", "--api-keys", "FILE", *ANY): "--api-keys FILE: it is not JSON (Input data was truncated); poolgrid keys",
    ("up", "--settings-file", "FILE", *ANY): "--settings-file FILE: is not TOML: ",
    ("up", "--host", "192.0.2.1", *ANY): "--host 192.0.2.1: no address of this machine",
    ("up", "--port", "TAKEN"): "--port: 127.0.0.1:TAKEN cannot be used (Address already in use); choose a free port",
    ("router", "--data-dir", "FILE"): "--data-dir FILE: it is a file, needed is a directory",
    (
        "router",
        "--router-temperature",
        "0.5",
    ): "--router-temperature: Policy kv takes the least cost; remove this option.",
    ("global-router", "--pool-url", "long"): "--pool-url long: 'long' is not of the form NAME=http://host:port",
    ("worker", "--engine-url", "http://a:1"): "--engine-url: --engine simulated has no such option",
    ("top", "--url", "gpu1:8000"): "Invalid value for '--url': 'gpu1:8000' is none, allowed are http://HOST[:PORT]",
    ("explain", "turn-2", "--url", "gpu1"): "Invalid value for '--url': 'gpu1' is none, allowed are http://HOST[:PORT]",
    (
        "bench",
        "--url",
        "gpu1:8000",
    ): "--url gpu1:8000: 'gpu1:8000' begins with neither http:// nor https://",
    ("upp",): "No such command 'upp'. Did you mean 'up'?",
    ("POOLGRID_POLCY=kv", "up"): "POOLGRID_POLCY is no variable of poolgrid; did you mean POOLGRID_POLICY?",
    ("POOLGRID_PORT=abc", "up"): "Invalid value for POOLGRID_PORT: 'abc' is not a valid integer",
    ("POOLGRID_PORT=99999", "up"): "POOLGRID_PORT 99999: must be less than or equal to 65535",
}


@pytest.mark.parametrize("typed", MISTAKES, ids=" ".join)
def test_a_mistake_is_refused_with_the_words_typed(
    typed: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(part: Part) -> None:
        raise AssertionError(f"{part.name} was started")

    monkeypatch.setattr(Part, "start", start)
    (tmp_path / "FILE").write_text("{")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = [each.replace("FILE", str(tmp_path / "FILE")).replace("TAKEN", port) for each in typed]
        environment = dict(word.split("=") for word in words if word.startswith("POOLGRID_"))

        result = CliRunner().invoke(app, words[len(environment) :], env=environment)

    assert result.exit_code in (1, 2), result.output
    said = " ".join(result.output.replace(port, "TAKEN").replace(str(tmp_path), "").replace("/FILE", "FILE").split())
    assert MISTAKES[typed] in said


def test_a_variable_of_another_command_is_none_of_ours() -> None:
    result = CliRunner().invoke(app, ["worker", "--speedup", "0"], env={"POOLGRID_CONSOLIDATORS": "2"})

    assert "POOLGRID_CONSOLIDATORS" not in result.output
    assert result.output.startswith("--speedup 0.0: ")


def test_an_engine_whose_library_is_absent_is_found_before_its_model_is_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("poolgrid.plugins.trtllm.library.is_installed", lambda module: False)
    result = CliRunner().invoke(app, ["up", "--engine", "trtllm", "--model-path", "ORG/MODEL"])

    assert "--engine trtllm: the package tensorrt_llm is not installed in this Python; run it where" in result.output
    assert result.exit_code == 2
