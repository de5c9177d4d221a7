"""What a client asks of routing reaches the router as it came, and what the router says of pools reaches the client."""

from __future__ import annotations

from typing import Any

import pytest

from poolgrid.kernel.pool_grids.axis import AXIS, TARGETS
from poolgrid.kernel.requests.inference import HINT_HEADERS, PRIORITY_HEADER, Refused
from tests.frontend.fake_backend import FakeBackend
from tests.frontend.server import application, in_process
from tests.frontend.test_inference import COMPLETIONS, post


def hints_of(headers: dict[str, str] | None = None, **fields: Any) -> Any:
    backend = FakeBackend()
    assert post(backend, COMPLETIONS, headers, prompt="hi", **fields).status_code == 200
    return backend.requests[0].hints


def test_targets_and_agent_hints_are_handed_over_unread() -> None:
    nvext = {"router": {"ttft_target": "whatever", "new": [1]}, "agent_hints": {"priority": -3, "osl": 7}}

    assert hints_of(nvext=nvext) == {"nvext": nvext}


def test_headers_are_handed_over_by_lower_case_name() -> None:
    given = {"X-TTFT-Target-Ms": "12.5", "x-itl-target-ms": "soon"}

    assert hints_of(headers=given) == {"headers": {AXIS["ttft"].hint_header: "12.5", AXIS["itl"].hint_header: "soon"}}


def test_the_names_are_those_that_the_global_router_reads() -> None:
    assert (*(kind.hint_header for kind in TARGETS), PRIORITY_HEADER) == HINT_HEADERS


def test_every_choice_of_a_request_has_the_same_hints() -> None:
    backend = FakeBackend()
    nvext = {"router": {"ttft_target": 5}}
    post(backend, COMPLETIONS, prompt=["a", "b"], n=2, nvext=nvext)

    assert len(backend.requests) == 4
    assert all(request.hints["nvext"]["router"] == {"ttft_target": 5} for request in backend.requests)


def test_a_router_that_refuses_a_hint_names_the_field_to_the_client() -> None:
    refusal = Refused(400, "invalid_value", "nvext.router is 5", param="nvext.router")

    answer = post(FakeBackend(refusal=refusal), COMPLETIONS, prompt="hi", nvext={"router": 5})

    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "nvext.router is 5",
        "type": "invalid_request_error",
        "param": "nvext.router",
        "code": "invalid_value",
    }


@pytest.mark.parametrize("number", ["NaN", "1e999", "Infinity"])
async def test_numbers_that_json_does_not_have_are_a_400(number: str) -> None:
    async with in_process(application(FakeBackend())) as client:
        body = '{"model": "tiny", "prompt": "x", "nvext": {"router": {"ttft_target": ' + number + "}}}"
        assert (await client.post(COMPLETIONS, content=body)).status_code == 400


def test_the_pool_is_in_the_answers_header_where_there_are_pools() -> None:
    backend = FakeBackend()
    assert "x-poolgrid-pool" not in post(backend, COMPLETIONS, prompt="hi").headers

    class Pooled(FakeBackend):
        async def submit(self, request: Any) -> Any:
            stream = await super().submit(request)
            stream.pool = "fast,cheap"
            return stream

    assert post(Pooled(), COMPLETIONS, prompt="hi").headers["x-poolgrid-pool"] == "fast,cheap"
