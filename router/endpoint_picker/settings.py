"""What can be set on a router that picks endpoints for gateways; ``docs/configuration.md`` lists every field."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Self

from pydantic import Field, model_validator

from poolgrid.process.settings import Settings


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


class EndpointPickerSettings(Settings):
    """The endpoint picker of a router; nothing of it runs without a port."""

    ext_proc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of the endpoint picker, at which Envoy asks over ext-proc (gRPC) where a request is to go, "
        "usually 9002; 0 takes any free one, empty = none. Needs poolgrid[ext-proc].",
    )
    ext_proc_fallbacks: int = Field(
        2,
        ge=0,
        le=16,
        description="Endpoints that a gateway is told beside the first, in the order in which they would be chosen. "
        "Two outlive a pod that is gone and its neighbour; each costs a further choice.",
    )
    ext_proc_streams: int = Field(
        4096,
        ge=1,
        le=1_000_000,
        description="Most requests of gateways at a time, each a gRPC stream until its answer ends. At the limit the "
        "one that has waited longest for the rest of its request is answered 429; when all have an endpoint, the new "
        "one is refused, and the gateway's failure mode decides. As many as sixteen engines with 256 requests each. "
        "Streams and bodies have the times of the HTTP server (http_request_timeout_ms, "
        "http_write_timeout_ms).",
    )
    ext_proc_body_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1024,
        le=2**40,
        description="Memory for requests that are gathered before the choice, headers and bodies together; beyond it "
        "the unfinished request that began first is answered 429. Sixteen of the largest bodies (max_body_bytes, above "
        "which a body is answered 413).",
    )

    @model_validator(mode="after")
    def _check_library(self) -> Self:
        if self.ext_proc_port is None:
            return self
        missing = [name for name in ("grpc", "google.protobuf") if not _is_there(name)]
        if missing:
            raise ValueError(
                f"ext_proc_port is {self.ext_proc_port}, and {' and '.join(missing)} cannot be imported: install "
                "poolgrid[ext-proc], or leave ext_proc_port out"
            )
        return self
