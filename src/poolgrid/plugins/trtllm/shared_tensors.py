"""From TensorRT-LLM's handles of tensors to bytes on the host, and back: the only place that touches torch.

Rules:

1. A handle in CUDA memory may be opened once, by one process: its maker frees the memory when that process lets go. So
   handles that were opened here never travel, and bytes go in their place.
2. A handle that is made here lies in shared memory of the host, whatever the first one lay in. The engine copies it to
   its device, as it does with any. Its tensor lives as long as what ``share`` returned.
3. NumPy has no ``bfloat16``: such a tensor travels as ``uint16``.
4. Everything here may take long, and runs in threads. Handles are made one at a time: meanwhile the container changes
   how this process shares memory.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from poolgrid.kernel.worker_protocol.refusal import RefusedError, UnableError
from poolgrid.kernel.worker_protocol.tensor_transfer import Tensor
from poolgrid.plugins.trtllm.core.disaggregated_params import HANDLE_FIELDS, CarriedTensor, HandleField
from poolgrid.plugins.trtllm.library import LibraryMissingError

_BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class HostTensor:
    """What a handle stood for."""

    field: HandleField
    dtype: str
    """PyTorch's name."""
    data: Tensor


@dataclass(frozen=True, slots=True)
class SharedHandles:
    """Handles that this machine's engines can open, while this object lives."""

    handles: tuple[tuple[HandleField, dict[str, Any]], ...]
    kept: tuple[Any, ...]


class SharedTensors:
    """``SharedTensorContainer`` of the installed TensorRT-LLM, with the torch that it imports."""

    def __init__(self) -> None:
        """Import them; raises ``LibraryMissingError``."""
        self._making = threading.Lock()
        try:
            module = importlib.import_module("tensorrt_llm._torch.shared_tensor.shared_tensor")
            self._container: Any = module.SharedTensorContainer
            self._torch: Any = module.torch
        except (ImportError, AttributeError) as error:
            raise LibraryMissingError(
                f"tensor_transport is given, and this TensorRT-LLM has no handles that can be opened ({error}): start "
                "the worker with tensor_transport none"
            ) from error

    def copy_out(self, params: Any) -> tuple[HostTensor, ...]:
        """Open every handle of a ``DisaggregatedParams`` and return what it stands for; raises ``UnableError``."""
        copies: list[HostTensor] = []
        try:
            for field in HANDLE_FIELDS:
                found = getattr(params, field, None)
                handles = found if isinstance(found, list) else [] if found is None else [found]
                copies.extend(self._copied(field, handle) for handle in handles)
        except Exception as error:  # whatever CUDA and torch raise
            raise UnableError(f"the engine's embeddings cannot be copied to the host: {error!r}") from None
        return tuple(copies)

    def share(self, carried: Sequence[CarriedTensor], tensors: Sequence[Tensor]) -> SharedHandles:
        """Return handles of tensors that were fetched; raises ``RefusedError``."""
        made: list[tuple[HandleField, dict[str, Any]]] = []
        kept: list[Any] = []
        for each, data in zip(carried, tensors, strict=True):
            try:
                tensor = self._tensor(data, each.dtype)
                container = self._container.from_tensor(tensor)
                with self._making:
                    made.append((each.field, container.dump_to_dict()))
            except RefusedError:
                raise
            except Exception as error:
                raise UnableError(f"fetched embeddings cannot be given to the engine: {error!r}") from None
            kept += [tensor, container]
        return SharedHandles(tuple(made), tuple(kept))

    def _copied(self, field: HandleField, handle: dict[str, Any]) -> HostTensor:
        tensor = self._container.from_dict(handle).get_local_view().detach().contiguous().cpu()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype == _BFLOAT16:
            return HostTensor(field, dtype, tensor.view(self._torch.int16).numpy().view("uint16"))
        return HostTensor(field, dtype, tensor.numpy())

    def _tensor(self, data: Tensor, dtype: str) -> Any:
        if dtype == _BFLOAT16:
            tensor = self._torch.from_numpy(data.view("int16")).view(self._torch.bfloat16)
        else:
            tensor = self._torch.from_numpy(data)
        if str(tensor.dtype) != f"torch.{dtype}":
            raise RefusedError(f"disaggregated_params: a tensor of {data.dtype} is declared as torch.{dtype}")
        return tensor
