"""Settings that close a process's sockets, the same for every process, and what is said when they are left open."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from poolgrid.process.settings import InputFile, Settings


class SecuritySettings(Settings):
    """TLS for HTTP and CURVE for the ZMQ planes."""

    panel: ClassVar[str] = "TLS and CURVE"

    tls_certificate: InputFile | None = Field(
        None,
        description=("Serve HTTPS with the certificate chain in this PEM file; needs tls_key. Unset = plain HTTP."),
    )
    tls_key: InputFile | None = Field(None, description=("Read the private key of tls_certificate from this PEM file."))
    tls_client_ca: InputFile | None = Field(
        None,
        description=("Require client certificates from the authorities in this PEM file (mTLS)."),
    )
    curve_key: InputFile | None = Field(
        None,
        description=(
            "Encrypt every ZMQ connection with this CURVE secret key file (poolgrid keys curve). Unset = no encryption."
        ),
    )
    curve_server_key: InputFile | None = Field(
        None,
        description=(
            "Read the public key of the servers that this process connects to from this file. Unset = this "
            "process's own key."
        ),
    )
    curve_allowed_keys: Path | None = Field(
        None,
        description=(
            "Allow peers whose public key files (*.key) are in this directory. Unset = only this process's "
            "own key. Changes apply to new connections."
        ),
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together: give both, or neither")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        if self.curve_key is None and (self.curve_server_key is not None or self.curve_allowed_keys is not None):
            raise ValueError("curve_server_key and curve_allowed_keys need curve_key")
        return self

    def tls_pair(self) -> tuple[Path, Path] | None:
        """Return the files of the certificate and its key, if there are any."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return self.tls_certificate, self.tls_key

    def exposures(self, host: str, http: bool, planes: str, keyed: bool = True) -> list[str]:
        """Return warnings for the start about sockets at ``host`` that any host of the network can use.

        ``http``: there is an HTTP server; ``planes``: the ZMQ planes, in words (empty = none); ``keyed``: HTTP asks for
        API keys, or shows nothing that needs one.
        """
        if is_loopback(host):
            return []
        warnings = []
        if planes and self.curve_key is None:
            warnings.append(
                f"{planes} at {host}: open to every client that can connect, and unencrypted; set --curve-key"
            )
        if http and self.tls_certificate is None:
            warnings.append(f"HTTP at {host} is unencrypted; set --tls-certificate and --tls-key, or put TLS in front")
        if http and not keyed and self.tls_client_ca is None:
            warnings.append(f"HTTP at {host} is open to every client that can connect; set --api-keys")
        return warnings


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
