"""Every setting of a worker in front of an engine server: the command line, the environment and the documentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from poolgrid.kernel.wire.addresses import ip_endpoint_problem
from poolgrid.kernel.wire.limits import SERVING_ENDPOINTS_MAX
from poolgrid.server.http.http_client import HttpTarget
from poolgrid.server.process.settings import Settings, ZmqEndpoint
from poolgrid.server.workers.engines.server.core.launching import check_arguments
from poolgrid.server.workers.engines.server.core.server_list import SERVERS_MAX, ServerEntry, read_entry, role_and_url
from poolgrid.server.workers.settings import (
    ENGINE_ARGUMENT_HELP,
    MODEL_PATH_HELP,
    ROLE_HELP,
    StepTimesSettings,
    WorkerProcessSettings,
)

PORTS = 65_536

TIMEOUT_MS_MAX = 86_400_000.0
"""A day: beyond it a time-out is a mistake in the unit."""


Argument = Annotated[str, StringConstraints(min_length=1, max_length=65_536)]

OF_OWN_SERVERS = ("engine_argument", "engine_port", "start_timeout_ms")
"""Settings that say nothing of a server that runs already."""

OF_RUNNING_SERVERS = ("kv_events_endpoint", "kv_events_replay_endpoint", "data_parallel_size")
"""Settings that say what a worker knows of the server that it started itself."""

OF_EACH_SERVER = ("kv_events_endpoint", "kv_events_replay_endpoint", "serving_endpoint")
"""Settings that are given for one server after the other, equally often for each."""


def _check_url(given: str) -> str:
    HttpTarget(role_and_url(given, "")[1])
    return given


ServerUrl = Annotated[str, StringConstraints(min_length=1, max_length=2048), AfterValidator(_check_url)]


ENGINE_URL_HELP = (
    "Use this engine server: http://gpu1:8000 or prefill=URL; with --engine server also dns+http://NAME:PORT or "
    "k8s+http://:PORT?selector=LABELS. Repeat for more."
)


def shares_of(settings: EngineServersSettings, number: int, servers: int) -> dict[str, object]:
    """Return one server's part of what is given for one after the other."""
    own: dict[str, object] = {}
    for name in OF_EACH_SERVER:
        given = getattr(settings, name)
        share = len(given) // servers
        own[name] = given[number * share : (number + 1) * share]
    return own


class EngineServersSettings(Settings):
    """What holds for engine servers that run already, whatever follows them."""

    panel: ClassVar[str] = "Engine server"

    engine_url: tuple[ServerUrl, ...] = Field(
        (),
        max_length=256,
        description=ENGINE_URL_HELP,
    )
    engine_api_key: str = Field(
        "",
        max_length=4096,
        description=(
            "Send this API key to the engine server. Set the environment variable instead, so that no process "
            "list shows it."
        ),
    )
    served_model_name: str = Field(
        "",
        max_length=256,
        description=(
            "Serve the model under this name. Unset = the model path, or an engine server's first base model."
        ),
    )
    kv_block_size: int | None = Field(
        None,
        ge=1,
        le=4096,
        description=(
            "Set the tokens in a KV block, equal in all workers of a pool. Unset = as an engine server reports."
        ),
    )
    max_batch_size: int = Field(
        256,
        ge=1,
        le=65_536,
        description="Assume this limit per rank if the server reports none.",
    )
    data_parallel_size: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Route to this many data-parallel ranks behind the URL. Unset = as the server reports.",
    )
    kv_events_endpoint: tuple[ZmqEndpoint, ...] = Field(
        (),
        max_length=1024,
        description=(
            "Subscribe to the server's cache events at this ZMQ endpoint. Repeat for each rank. Unset = as "
            "the server reports."
        ),
    )
    kv_events_replay_endpoint: tuple[ZmqEndpoint, ...] = Field(
        (),
        max_length=1024,
        description="Request missed events at this ZMQ endpoint. Repeat for each rank; needs kv_events_endpoint.",
    )
    follow_events: bool = Field(
        True,
        description="Follow the server's cache events. Without them, give routers --policy approximate.",
    )
    serving_endpoint: tuple[str, ...] = Field(
        (),
        max_length=SERVING_ENDPOINTS_MAX,
        description=(
            "Announce ip:port at which Envoy reaches the server, once per rank or once for all. Unset = "
            "engine_url's address."
        ),
    )
    progress_timeout_ms: float = Field(
        120_000.0,
        ge=10.0,
        le=TIMEOUT_MS_MAX,
        description="Treat the engine as hung when its requests make no progress for this time.",
    )

    @field_validator("engine_url")
    @classmethod
    def _check_urls(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        urls = [role_and_url(each, "")[1] for each in given]
        twice = [url for url in urls if urls.count(url) > 1]
        if twice:
            raise ValueError(f"engine_url is {twice[0]!r} {len(twice)} times: a server has one worker")
        return given

    @field_validator("serving_endpoint")
    @classmethod
    def _check_serving(cls, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        for endpoint in endpoints:
            problem = ip_endpoint_problem(endpoint)
            if problem is not None:
                raise ValueError(
                    f"serving_endpoint is {endpoint!r}, which {problem}; allowed are ip:port and [ipv6]:port"
                )
        return endpoints

    @model_validator(mode="after")
    def _check_events(self) -> Self:
        replays, endpoints = len(self.kv_events_replay_endpoint), len(self.kv_events_endpoint)
        if replays not in (0, endpoints):
            raise ValueError(
                f"kv_events_replay_endpoint is given {replays} times and kv_events_endpoint {endpoints} times: allowed "
                "are as many, or none"
            )
        ranks = max(1, len(self.engine_url)) * (self.data_parallel_size or 0)
        if self.data_parallel_size is not None and endpoints not in (0, ranks):
            raise ValueError(
                f"kv_events_endpoint is given {endpoints} times, data_parallel_size is {self.data_parallel_size}: one "
                "for each rank of each server"
            )
        return self


def _check_listed(given: str) -> str:
    read_entry(given)
    return given


ListedServer = Annotated[str, StringConstraints(min_length=1, max_length=2048), AfterValidator(_check_listed)]


class FollowedServersSettings(EngineServersSettings):
    """Engine servers of any kind, which come and go while they are followed."""

    panel: ClassVar[str] = "Engine servers"

    engine_url: tuple[ListedServer, ...] = Field(
        (),
        max_length=SERVERS_MAX,
        description=ENGINE_URL_HELP,
    )
    engine_urls_file: Path | None = Field(
        None,
        description=(
            "Follow the engine servers in this file, a URL or ROLE=URL on each line. Changes are read within a second."
        ),
    )

    @property
    def follows_servers(self) -> bool:
        return bool(self.engine_url) or self.engine_urls_file is not None

    @model_validator(mode="after")
    def _check_each(self) -> Self:
        entries = [read_entry(each) for each in self.engine_url]
        single = [each for each in entries if isinstance(each, ServerEntry)]
        fixed = bool(entries) and len(single) == len(entries) and self.engine_urls_file is None
        for name in OF_EACH_SERVER:
            given = len(getattr(self, name))
            if given and (not fixed or given % len(entries)):
                raise ValueError(
                    f"{name} is given {given} times: allowed are as many for each engine_url, all of which are single "
                    "servers, without engine_urls_file"
                )
        return self

    def own_of(self, entry: ServerEntry) -> dict[str, object]:
        """Return the settings of which each server has its own."""
        urls = [read_entry(each) for each in self.engine_url]
        if entry not in urls:
            return dict.fromkeys(OF_EACH_SERVER, ())
        return shares_of(self, urls.index(entry), len(urls))


class EngineServerSettings(EngineServersSettings, StepTimesSettings, WorkerProcessSettings):
    """A worker in front of an engine server, or several workers in one process, each in front of its own."""

    panel: ClassVar[str] = "Engine server"

    own_arguments: ClassVar[Callable[[], Mapping[str, str]]]
    """Options of the server that the worker sets, each with what to do instead."""

    model_path: str = Field(
        "",
        max_length=4096,
        description=MODEL_PATH_HELP,
    )
    engine_command: str = Field(
        "",
        max_length=4096,
        description="Start the server with this command line. Unset = the engine's usual command, found on PATH.",
    )
    engine_argument: tuple[Argument, ...] = Field(
        (),
        max_length=1024,
        description=ENGINE_ARGUMENT_HELP,
    )
    engine_port: int = Field(
        0, ge=0, le=65535, description="Start the server at this port of the loopback interface; 0 = any free port."
    )
    log_dir: Path = Field(
        Path("poolgrid-logs"),
        description="Write the server's log into this directory, in a file with the worker's name.",
    )
    start_timeout_ms: float = Field(
        1_800_000.0,
        gt=0,
        le=86_400_000,
        description=(
            "Give up when the server does not answer after this time. Large models may load for half an hour."
        ),
    )
    engine_stop_timeout_s: ClassVar[float] = 60.0
    """How long its own server may take to end before it is killed."""
    engine_restarts_max: ClassVar[int] = 3
    """Deaths of its own server in a row after which the worker ends; each start loads the model."""
    role: Literal["aggregated", "prefill", "decode"] = Field(
        "aggregated",
        description=ROLE_HELP,
    )
    max_num_tokens: ClassVar[int] = 8192
    """Tokens in one engine step of a rank, where the server does not say."""
    health_interval_ms: ClassVar[float] = 2_000.0
    """Time between two health checks of the server."""
    health_timeout_ms: ClassVar[float] = 10_000.0
    """How long its answer may take before the worker leaves the pool: above the longest step of a loaded server."""

    @model_validator(mode="after")
    def _check_that_there_is_a_server(self) -> Self:
        if not (self.engine_url or self.model_path):
            raise ValueError(
                f"neither engine_url nor model_path is given: a worker with the engine {self.engine_name} goes before "
                "a server that runs, as http://gpu1:8000, or starts one with a model"
            )
        wrong = OF_RUNNING_SERVERS if self.starts_server else OF_OWN_SERVERS
        for name in wrong:
            if getattr(self, name) != type(self).model_fields[name].default:
                mine, other = (
                    ("no engine_url", "a server that runs already")
                    if self.starts_server
                    else ("engine_url", "a server that the worker starts")
                )
                raise ValueError(f"{name} is {getattr(self, name)!r} with {mine}: it is for {other}")
        return self

    @model_validator(mode="after")
    def _check_several(self) -> Self:
        servers = len(self.engine_url)
        for name in OF_EACH_SERVER if servers > 1 else ():
            given = len(getattr(self, name))
            if given % servers:
                raise ValueError(
                    f"{name} is given {given} times with {servers} engine_url: allowed are as many for each server"
                )
        for name in ("request_port", "http_port") if servers > 1 else ():
            if getattr(self, name) + servers > PORTS:
                raise ValueError(f"{name} is {getattr(self, name)}: {servers} engine_url need as many ports from it on")
        return self

    def workers(self) -> tuple[Self, ...]:
        """Return the settings of each worker of the process; names and fixed ports count up from those given."""
        servers = len(self.engine_url)
        if not servers:
            return (self,)
        return tuple(self._of_server(number, servers) for number in range(servers))

    def _of_server(self, number: int, servers: int) -> Self:
        role, url = role_and_url(self.engine_url[number], self.role)
        own: dict[str, object] = {"engine_url": (url,), "role": role}
        if servers > 1:
            own["worker_id"] = f"{self.worker_id}-{number}"
            own |= {name: port + number for name in ("request_port", "http_port") if (port := getattr(self, name))}
            own |= shares_of(self, number, servers)
        return self.model_copy(update=own)

    @property
    def server_url(self) -> str:
        """The URL of the server of one worker; empty for one that is yet to be started."""
        return role_and_url(self.engine_url[0], self.role)[1] if self.engine_url else ""

    def serves(self) -> tuple[str, str]:
        return self.served_model_name or self.model_path, self.role

    def loads(self) -> str | None:
        """Return the model that the worker's own server loads; ``None`` before a server that runs already."""
        return self.model_path if self.starts_server else None

    def with_model(self, path: Path) -> Self:
        """Return settings by which the server loads its model from a directory, under the name it would have had."""
        name = self.served_model_name or self.model_path
        return self.model_copy(update={"model_path": str(path), "served_model_name": name})

    @property
    def starts_server(self) -> bool:
        """Whether the worker starts a server, and is not in front of one that runs already.

        With both, ``model_path`` says nothing: its environment variable is the routers' too.
        """
        return not self.engine_url

    @field_validator("engine_argument")
    @classmethod
    def _check_arguments(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        if arguments:
            check_arguments(arguments, cls.own_arguments())
        return arguments


class FollowerSettings(FollowedServersSettings, StepTimesSettings, WorkerProcessSettings):
    """Follows engine servers of any kind in one process, a worker for each."""

    engine_name: ClassVar[str] = "server"

    @model_validator(mode="after")
    def _check_that_servers_are_given(self) -> Self:
        if not self.follows_servers:
            raise ValueError(
                "neither engine_url nor engine_urls_file is given: a worker with the engine server follows servers "
                "that run, as http://gpu1:8000"
            )
        for name in ("request_port", "http_port"):
            if getattr(self, name) + SERVERS_MAX > PORTS:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: as many ports as there may be servers ({SERVERS_MAX}) follow it"
                )
        return self

    def of_server(self, entry: ServerEntry, number: int) -> FollowedServerSettings:
        """Return the settings of a server's worker; ``number`` is that of its ports after the follower's own."""
        shared = {
            name: getattr(self, name)
            for name in self.model_fields_set
            if name in FollowedServerSettings.model_fields and name not in OF_EACH_SERVER
        }
        ports = {"request_port": self.request_port + number, "http_port": self.http_port + 1 + number}
        own = {
            **self.own_of(entry),
            **{name: port for name, port in ports.items() if getattr(self, name)},
            "engine_url": (entry.url,),
            "role": entry.role,
            "worker_id": entry.worker_id,
        }
        return FollowedServerSettings.model_validate({**shared, **own})


class FollowedServerSettings(EngineServerSettings):
    """The worker of one server that is followed."""

    engine_name: ClassVar[str] = FollowerSettings.engine_name
