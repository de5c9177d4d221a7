"""Settings of NATS: how processes reach it, and of the event plane, which may be there."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from poolgrid.kernel.wire.addresses import without_credentials
from poolgrid.server.process.settings import InputFile, Settings

SCHEMES = ("nats", "tls")


def _check_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        good = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ValueError(
            f"{without_credentials(url)!r} is no address of a NATS server; allowed are nats://host:port and tls://host:port"
        )
    return url


NatsUrl = Annotated[str, AfterValidator(_check_url)]
"""Where a NATS server listens."""


class NatsSettings(Settings):
    """How to reach NATS, for whatever a process keeps there."""

    panel: ClassVar[str] = "NATS"

    nats_url: tuple[NatsUrl, ...] = Field(
        (),
        max_length=64,
        description=(
            "Connect to this NATS server with JetStream, nats://HOST:PORT or tls://HOST:PORT. Repeat for the "
            "other servers of the cluster."
        ),
    )
    nats_credentials: InputFile | None = Field(
        None, description="Read the NATS user from this file: credentials (.creds), or the seed of an nkey."
    )
    nats_tls_ca: InputFile | None = Field(
        None,
        description="Trust the authorities in this PEM file for NATS servers. Unset = the system's.",
    )
    nats_tls_certificate: InputFile | None = Field(
        None, description="Present the certificate in this PEM file to NATS servers that ask for one."
    )
    nats_tls_key: InputFile | None = Field(
        None, description="Read the private key of nats_tls_certificate from this PEM file."
    )
    nats_replicas: int = Field(
        1,
        ge=1,
        le=5,
        description=(
            "Keep this many copies of the streams and buckets that this process creates. 3 in a cluster "
            "tolerates the loss of one server."
        ),
    )

    @model_validator(mode="after")
    def _check_nats(self) -> Self:
        users = {name: getattr(self, name) for name in ("event_plane", "names") if hasattr(self, name)}
        said = " and ".join(f"{name} is {value}" for name, value in users.items())
        if "nats" in users.values() and not self.nats_url:
            raise ValueError(f"{said} and nats_url is not given: name at least one server")
        if "nats" not in users.values() and self.nats_url:
            raise ValueError(f"nats_url is given and {said}: nothing would connect there")
        if self.nats_replicas != 1 and not self.nats_url:
            raise ValueError(f"nats_replicas is {self.nats_replicas} and {said}: it is for nats")
        if (self.nats_tls_certificate is None) != (self.nats_tls_key is None):
            raise ValueError("nats_tls_certificate and nats_tls_key go together: give both, or neither")
        return self


class EventPlaneSettings(NatsSettings):
    """Where a pool's journal is, and how to reach it."""

    panel: ClassVar[str] = "NATS"

    event_plane: Literal["zmq", "nats"] = Field(
        "zmq",
        description=(
            "Choose where the pool's journal is: zmq = at its consolidator, followed over ZMQ; nats = in a "
            "JetStream stream (needs poolgrid[nats])."
        ),
    )
    nats_pool: str = Field(
        "default",
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="Name the pool within the NATS account; its stream is poolgrid-NAME.",
    )

    @property
    def on_nats(self) -> bool:
        return self.event_plane == "nats"
