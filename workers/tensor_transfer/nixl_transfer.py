"""Tensors read from the memory of their source by NIXL: no copy in Python, RDMA where the hardware has it.

Offering, leases and releases are those over ZMQ; descriptors get a region added. A taker reads the
region with its own agent and releases the tensor over ZMQ. A descriptor without a region, from a source without NIXL,
is fetched over ZMQ; a source with NIXL serves takers without it in the same way.

NIXL has no file descriptor to wait for; a transfer in progress is looked at every ``POLL_S``.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from typing import Any

import msgspec
import numpy as np

from poolgrid.kernel.wire.multimodal import NixlRegion, TensorDescriptor
from poolgrid.kernel.worker_protocol.tensor_transfer import Tensor, TensorUnavailable
from poolgrid.server.workers.tensor_transfer.zmq_transfer import TensorTransfer, dtype_of

log = logging.getLogger(__name__)

POLL_S = 0.0005
"""Between two looks at a transfer: below the time of the smallest embeddings, above that of a turn of the loop."""

HOST_MEMORY = "DRAM"


class NixlMissing(OSError):
    """NIXL cannot be used here; the message says why and what to do. Ends a worker like a port that is taken."""


def make_agent(name: str) -> Any:
    """Return a NIXL agent with the UCX backend; raises ``NixlMissing``."""
    # It logs to standard output, which belongs to the line that says a worker is ready.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        nixl = importlib.import_module("nixl._api")
    except ImportError as error:
        raise NixlMissing(
            f"tensor_transport is nixl, and NIXL cannot be imported ({error}): install poolgrid[nixl], or choose zmq"
        ) from None
    try:
        return nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
    except Exception as error:  # the bindings raise their own exceptions
        raise NixlMissing(f"tensor_transport is nixl, and its agent cannot be made: {error}") from None


class NixlTensorTransfer(TensorTransfer):
    """A worker's end of transfers by NIXL."""

    def __init__(self, agent: Any, name: str, *arguments: Any, **named: Any) -> None:
        """``agent`` is NIXL's, called ``name``; the others are those of ``TensorTransfer``."""
        super().__init__(*arguments, **named)
        self._agent = agent
        self._name = name
        self._registered: dict[str, Any] = {}
        self._remotes: dict[str, bytes] = {}
        """Metadata of the agents that this one knows, by name."""
        self._locks: dict[str, asyncio.Lock] = {}

    # -- as a source -----------------------------------------------------------------------------------------------

    def offer(self, name: str, tensor: Tensor) -> TensorDescriptor:
        """Keep a tensor and register its memory; raises ``RefusedError``."""
        descriptor, kept = self._keep(name, tensor)
        if kept.nbytes == 0:
            return descriptor
        address = kept.__array_interface__["data"][0]
        region = [(address, kept.nbytes, 0, "")]
        self._registered[descriptor.tensor_id] = self._agent.register_memory(region, HOST_MEMORY)
        # After the registration: what a peer needs to reach this memory is part of it.
        metadata = self._agent.get_agent_metadata()
        return msgspec.structs.replace(descriptor, nixl=NixlRegion(self._name, metadata, address))

    def withdraw(self, tensor_id: str) -> bool:
        self._deregister(tensor_id)
        return super().withdraw(tensor_id)

    def _gone(self, tensor_id: str, expired: bool) -> None:
        self._deregister(tensor_id)
        super()._gone(tensor_id, expired)

    def _deregister(self, tensor_id: str) -> None:
        registered = self._registered.pop(tensor_id, None)
        if registered is not None:
            self._agent.deregister_memory(registered)

    # -- as a taker ------------------------------------------------------------------------------------------------

    async def fetch(self, descriptor: TensorDescriptor) -> Tensor:
        """Return a tensor of another worker and let its source go; raises ``TensorUnavailable``."""
        region = descriptor.nixl
        if region is None:
            return await super().fetch(descriptor)
        began_ms = self._clock.monotonic_ms()
        try:
            buffer = np.empty(descriptor.size_bytes, np.uint8)
            dtype = dtype_of(descriptor)
            async with asyncio.timeout(self._timeout_ms / 1000):
                # One at a time from each source: loading newer memory of an agent ends its transfers in progress.
                async with self._locks.setdefault(region.agent, asyncio.Lock()):
                    await self._read(region, buffer)
        except (TensorUnavailable, TimeoutError) as error:
            self._metrics.fetched.labels("nixl", "failed").inc()
            why = str(error) or f"it took more than {self._timeout_ms:.0f} ms"
            raise TensorUnavailable(f"reading tensor {descriptor.tensor_id} by NIXL: {why}") from None
        finally:
            self.release(descriptor)
        self._metrics.observe_fetch("nixl", buffer.nbytes, self._clock.monotonic_ms() - began_ms)
        return buffer.view(dtype).reshape(descriptor.shape)

    async def _read(self, region: NixlRegion, buffer: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        agent = self._agent
        address = buffer.__array_interface__["data"][0]
        registered = handle = None
        try:
            self._meet(region)
            registered = agent.register_memory([(address, buffer.nbytes, 0, "")], HOST_MEMORY)
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs([(address, buffer.nbytes, 0)], HOST_MEMORY),
                agent.get_xfer_descs([(region.address, buffer.nbytes, 0)], HOST_MEMORY),
                region.agent,
            )
            state = agent.transfer(handle)
            while state == "PROC":
                await asyncio.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise TensorUnavailable(f"its transfer ended as {state}")
        except (TensorUnavailable, asyncio.CancelledError):
            raise
        except Exception as error:  # the bindings raise their own exceptions: a peer that is gone, memory that is
            self._forget(region.agent)
            raise TensorUnavailable(f"{type(error).__name__}: {error}") from None
        finally:
            # In this order: a transfer in progress is ended before its memory is freed.
            if handle is not None:
                agent.release_xfer_handle(handle)
            if registered is not None:
                agent.deregister_memory(registered)

    def _meet(self, region: NixlRegion) -> None:
        """Know the source's agent, and its memory as of now."""
        if self._remotes.get(region.agent) != region.metadata:
            # What it registered since is in the newer metadata only.
            self._forget(region.agent)
            self._agent.add_remote_agent(region.metadata)
            self._remotes[region.agent] = region.metadata

    def _forget(self, name: str) -> None:
        if self._remotes.pop(name, None) is not None:
            try:
                self._agent.remove_remote_agent(name)
            except Exception as error:
                log.warning("NIXL does not forget agent %s: %s", name, error)

    async def close(self) -> None:
        for tensor_id in list(self._registered):
            self._deregister(tensor_id)
        for name in list(self._remotes):
            self._forget(name)
        await super().close()
