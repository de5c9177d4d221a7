# ruff: noqa: TID252 - relative, so that it imports as tensorrt_llm and as tests.fakes.tensorrt_llm
"""``SharedTensorContainer`` with as much of torch as is done with its tensors.

1. The encoder's tensors pretend to be in CUDA memory. What is in them follows from their digest, so that another
   process of the same machine (``behaviour.machine``) has the same when it opens a handle. A process opens one once.
2. Tensors of the host lie in this process. Their handles are good here, and while their tensor lives.
3. As in torch, what is on the device or has the type ``bfloat16`` has no NumPy array.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ..._fake.behaviour import behaviour

HIDDEN_SIZE = 4096
_CUDA, _HOST = 1, 2

_numbers = itertools.count()
_shared: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
_opened: set[str] = set()


@dataclass(frozen=True)
class _Dtype:
    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


_BFLOAT16, _INT16 = _Dtype("bfloat16"), _Dtype("int16")


class Tensor:
    """A contiguous tensor."""

    def __init__(self, data: np.ndarray[Any, Any], dtype: _Dtype, device: str = "cpu") -> None:
        self._data = data
        self.dtype = dtype
        self.device = device

    def detach(self) -> Tensor:
        return self

    def contiguous(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return Tensor(self._data, self.dtype)

    def view(self, dtype: _Dtype) -> Tensor:
        return Tensor(self._data.view(np.int16 if dtype == _BFLOAT16 else dtype.name), dtype, self.device)

    def numpy(self) -> np.ndarray[Any, Any]:
        if self.device != "cpu":
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        if self.dtype == _BFLOAT16:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self._data

    def content(self) -> tuple[str, tuple[int, ...], bytes]:
        """What the engine sees; not torch's."""
        return str(self.dtype), self._data.shape, self._data.tobytes()


def _from_numpy(data: np.ndarray[Any, Any]) -> Tensor:
    return Tensor(data, _Dtype(data.dtype.name))


torch = SimpleNamespace(Tensor=Tensor, from_numpy=_from_numpy, bfloat16=_BFLOAT16, int16=_INT16)


def embeddings_of(digest: bytes, rows: int) -> Tensor:
    """Return what the encoder makes of a picture."""
    size = rows * HIDDEN_SIZE * 2
    data = (digest * math.ceil(size / len(digest)))[:size]
    return Tensor(np.frombuffer(data, np.int16).reshape(rows, HIDDEN_SIZE), _BFLOAT16, "cuda:0")


def encoder_handle(digest: bytes, rows: int) -> dict[str, Any]:
    """Return the handle of what the encoder makes of a picture."""
    made = f"{os.getpid()}-{next(_numbers)}"
    size = rows * HIDDEN_SIZE * 2
    return {
        "method_key": _CUDA,
        "tensor_size": [rows, HIDDEN_SIZE],
        "tensor_stride": [HIDDEN_SIZE, 1],
        "tensor_offset": 0,
        "dtype": "torch.bfloat16",
        "storage_device": 0,
        "storage_handle": _packed({"machine": behaviour.machine, "made": made, "digest": digest.hex()}),
        "storage_size_bytes": size,
        "storage_offset_bytes": 0,
        "requires_grad": False,
        "ref_counter_handle": "",
        "ref_counter_offset": 0,
        "event_handle": "",
        "event_sync_required": False,
    }


class SharedTensorContainer:
    """A tensor on its way to another process."""

    def __init__(self, method_key: int, tensor_handle: Any) -> None:
        self.method_key = method_key
        self.tensor_handle = tensor_handle

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> SharedTensorContainer:
        if tensor.device != "cpu":
            raise NotImplementedError("the fake makes no handles of what is on the device")
        number = next(_numbers)
        _shared[number] = tensor
        shape = list(tensor.content()[1])
        where = {"machine": behaviour.machine, "process": os.getpid(), "number": number}
        return cls(_HOST, {"tensor_size": shape, "storage_handle": _packed(where)})

    @classmethod
    def from_dict(cls, tensor_info: dict[str, Any]) -> SharedTensorContainer:
        method_key = tensor_info["method_key"]
        if method_key not in (_CUDA, _HOST):
            raise ValueError(f"Unsupported shared tensor method key: {method_key}")
        return cls(method_key, tensor_info)

    def get_local_view(self) -> Tensor:
        where = json.loads(base64.b64decode(self.tensor_handle["storage_handle"]))
        if where["machine"] != behaviour.machine:
            raise RuntimeError("CUDA error: invalid argument" if self.method_key == _CUDA else "No such file (2)")
        if self.method_key == _CUDA:
            if where["made"] in _opened:
                raise RuntimeError("CUDA error: invalid resource handle")
            _opened.add(where["made"])
            return embeddings_of(bytes.fromhex(where["digest"]), self.tensor_handle["tensor_size"][0])
        tensor = _shared.get(where["number"]) if where["process"] == os.getpid() else None
        if tensor is None:
            raise RuntimeError("unable to open shared memory object: No such file or directory (2)")
        return tensor

    def dump_to_dict(self) -> dict[str, Any]:
        return {**self.tensor_handle, "method_key": self.method_key}


def _packed(where: dict[str, Any]) -> str:
    return base64.b64encode(json.dumps(where).encode()).decode()
