"""Settings of names: where processes register, under which namespace, and for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, model_validator

from poolgrid.kernel.wire.addresses import bracketed, is_name, part_problem
from poolgrid.kernel.wire.limits import IDENTIFIER_BYTES_MAX
from poolgrid.server.process.nats_settings import NatsSettings
from poolgrid.server.transport.security import is_loopback

EVERYWHERE = ("0.0.0.0", "::", "*")
"""Hosts that stand for all addresses of a machine."""

KubernetesNamespace = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
"""A namespace of Kubernetes, which is no namespace of names."""


class DiscoverySettings(NatsSettings):
    """Where a process registers under its name, and finds others by theirs."""

    panel: ClassVar[str] = "Service discovery"

    names: Literal["none", "directory", "nats", "kubernetes"] = Field(
        "none",
        description=(
            "Choose where processes register and find each other: none = configured addresses; files in "
            "names_dir; a NATS bucket; or Kubernetes EndpointSlices."
        ),
    )
    names_dir: Path | None = Field(
        None,
        description=(
            "With names directory, keep registrations in this directory. It is created with mode 0700; write "
            "access allows registration."
        ),
    )
    namespace: str = Field(
        "poolgrid",
        min_length=1,
        max_length=IDENTIFIER_BYTES_MAX,
        description="Name the pool: the first part of namespace.component.endpoint.",
    )
    advertise_host: str = Field(
        "",
        max_length=IDENTIFIER_BYTES_MAX,
        description=(
            "Register this host for other processes to connect to. Unset = the bound address. Needed when "
            "host is 0.0.0.0 or ::."
        ),
    )
    names_lease_ms: ClassVar[int] = 10_000
    """A registration that was not renewed for so long is removed; it is renewed three times as often. What is lost is
    found earlier by the lease of its events; names only have to outlast a restart of what keeps them."""

    kubernetes_api: str = Field(
        "",
        max_length=IDENTIFIER_BYTES_MAX,
        description=(
            "With names kubernetes, use this API server (https://HOST:PORT, or http://127.0.0.1:PORT of "
            "kubectl proxy). Unset = the pod's cluster."
        ),
    )
    kubernetes_namespace: tuple[KubernetesNamespace, ...] = Field(
        (),
        max_length=64,
        description="With names kubernetes, look in this Kubernetes namespace. Repeat for more. Unset = the pod's.",
    )

    @model_validator(mode="after")
    def _check_kubernetes(self) -> Self:
        on_kubernetes = self.names == "kubernetes"
        for name in ("kubernetes_api", "kubernetes_namespace"):
            # Not whether it was given: a router hands all of its settings on to the processes that it starts.
            is_set = getattr(self, name) != DiscoverySettings.model_fields[name].default
            if is_set and not on_kubernetes:
                raise ValueError(f"{name} is given and names is {self.names}: it goes with names kubernetes")
        if not self.kubernetes_api:
            return self
        try:
            parts = urlsplit(self.kubernetes_api)
            good = parts.scheme == "https" and bool(parts.hostname)
            good = good or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
            good = good and parts.port != 0 and not parts.path.strip("/") and not parts.username
        except ValueError:
            good = False
        if not good:
            raise ValueError(
                f"kubernetes_api is {self.kubernetes_api!r}; allowed are https://host:port, and http://127.0.0.1:port "
                "for kubectl proxy"
            )
        if self.kubernetes_api.startswith("http:") and not self.kubernetes_namespace:
            raise ValueError(
                f"kubernetes_api is {self.kubernetes_api} and kubernetes_namespace is not given: kubectl proxy has no "
                "account that would name one"
            )
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if (self.names == "directory") != (self.names_dir is not None):
            given = f"names is {self.names} and names_dir is {self.names_dir or 'not given'}"
            raise ValueError(f"{given}: names_dir goes with names directory, and the other way round")
        if self.has_names:
            problem = part_problem(self.namespace)
            if problem is not None:
                raise ValueError(f"namespace is {self.namespace!r}, which {problem}")
            host = getattr(self, "host", "")
            registers = self.names != "kubernetes"
            if registers and host in EVERYWHERE and not self.advertise_host:
                raise ValueError(
                    f"host is {host!r}, to which no process can connect, and names is {self.names}: set "
                    "advertise_host to this machine's address"
                )
        return self

    def check_named(self, setting: str, address: str | None) -> None:
        """Raise ``ValueError`` when an address is a name and there are none."""
        if address is not None and is_name(address) and not self.has_names:
            raise ValueError(f"{setting} is {address} and names is none: nothing would know where that is")

    def reachable(self, address: str) -> str:
        """Return an address that this process bound as others connect to it."""
        if not self.advertise_host or not address:
            return address
        scheme, _, place = address.partition("://")
        return f"{scheme}://{bracketed(self.advertise_host)}:{place.rpartition(':')[2]}"

    @property
    def has_names(self) -> bool:
        return self.names != "none"
