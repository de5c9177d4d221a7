"""A worker's sockets towards others say whom an endpoint cannot be used for, and leave nothing open."""

from __future__ import annotations

import pytest
import zmq

from poolgrid.server.workers.adapters.sockets import CONSOLIDATOR, PREFILL_WORKER, DealerSocket, Peer


@pytest.mark.parametrize(
    ("peer", "endpoint", "said"),
    [
        (CONSOLIDATOR, "nowhere", "connecting consolidator: 'nowhere' cannot be used"),
        (PREFILL_WORKER, "inproc://a", "the prefill worker's endpoint 'inproc://a' cannot be used"),
    ],
)
def test_an_endpoint_that_is_none_is_refused_with_whom_it_is_for(peer: Peer, endpoint: str, said: str) -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context:  # which would wait for ever for a socket that is open
        with pytest.raises(ValueError, match="cannot be used") as refused:
            DealerSocket(context, peer, endpoint, lambda frames: None)
        assert said in str(refused.value)
        assert peer.advice in str(refused.value)


@pytest.mark.parametrize("peer", [CONSOLIDATOR, PREFILL_WORKER])
async def test_only_what_a_prefill_worker_is_asked_waits_for_one_that_is_not_there(peer: Peer) -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        socket = DealerSocket(context, peer, "tcp://127.0.0.1:1", lambda frames: None)
        assert socket.send([b"frame"]) is (peer is PREFILL_WORKER)
        socket.close(orderly=False)
