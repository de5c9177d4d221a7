"""What a reader of Dynamo's TensorRT-LLM documents types beside options: it works, or is refused by name.

Options are in ``test_dynamo_options``, fields of requests in ``tests.frontend.test_dynamo_fields``, the health check
and a run of each script in ``tests.e2e.test_launch``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from poolgrid.cli.main import app
from tests.frontend.fake_backend import FakeBackend
from tests.frontend.server import application, in_process

ROOT = Path(__file__).parents[2]
LAUNCH = {path.stem: path.read_text() for path in (ROOT / "launch").glob("*.sh")}

SCRIPTS = {
    "agg.sh": "agg",
    "agg_router.sh": "agg_router",
    "disagg.sh": "disagg",
    "disagg_router.sh": "disagg_router",
    "epd_disagg.sh": "epd_disagg",
    "epd_multimodal_image_and_embeddings.sh": "epd_multimodal_image_and_embeddings",
    "agg_multimodal.sh": "agg_multimodal",
    "disagg_multimodal.sh": "disagg_multimodal",
    "gpt_oss_disagg.sh": "gpt_oss_disagg",
}
VARIABLES = {
    **{name: name for name in ("MODEL_PATH", "SERVED_MODEL_NAME", "MODALITY", "MAX_FILE_SIZE_MB", "CUSTOM_TEMPLATE")},
    **{name: name for name in ("ENCODE_ENDPOINT", "ALLOWED_LOCAL_MEDIA_PATH", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")},
    **{f"{role}_ENGINE_ARGS": "_ENGINE_ARGS" for role in ("AGG", "PREFILL", "DECODE", "ENCODE")},
    **{f"{role}_CUDA_VISIBLE_DEVICES": "_CUDA_VISIBLE_DEVICES" for role in ("PREFILL", "DECODE", "ENCODE")},
    **{f"{role}_MAX_BATCH_SIZE": "max_batch_size" for role in ("PREFILL", "DECODE")},
    **{f"{role}_FREE_GPU_MEMORY_FRACTION": "_FREE_GPU_MEMORY_FRACTION" for role in ("PREFILL", "DECODE")},
}
"""Variable of the documents' scripts to what reads it here; DYNAMO_HOME is not needed, paths are the repository's."""

PROGRAMS = {
    "dynamo.frontend": "router",
    "dynamo.router": "router",
    "dynamo.trtllm": "worker",
    "dynamo.mocker": "worker",
    "dynamo.global_router": "global-router",
}

ENDPOINTS = {
    "GET /health": True,
    "GET /live": True,
    "GET /metrics": True,
    "GET /v1/models": True,
    "POST /v1/chat/completions": True,
    "POST /v1/completions": True,
    "POST /v1/responses": True,
    "POST /v1/messages": True,
    "POST /v1/embeddings": True,
    "POST /v1/images/generations": True,
    "POST /v1/videos": True,
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_documented_script_is_there(script: str) -> None:
    assert SCRIPTS[script] in LAUNCH


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_documented_variable_is_read_by_the_scripts(variable: str) -> None:
    assert VARIABLES[variable] in "".join(LAUNCH.values())


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_documented_program_has_a_command(program: str) -> None:
    assert PROGRAMS[program] in app.commands
    assert f"`{program}`" in (ROOT / "docs" / "command_line.md").read_text()


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_documented_endpoint_answers_or_is_not_found_by_name(endpoint: str) -> None:
    method, path = endpoint.split()

    async def status() -> tuple[int, str]:
        async with in_process(application(FakeBackend())) as client:
            answer = await client.request(method, path, json={} if method == "POST" else None)
            return answer.status_code, answer.text

    code, text = asyncio.run(status())
    assert (code != 404) is ENDPOINTS[endpoint], text
    assert code != 404 or path in text
