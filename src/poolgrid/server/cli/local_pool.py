"""A whole pool on this machine: what `poolgrid up` takes, and the parts that it starts.

Rules
    1. An option that may differ by role is given as ``ROLE=VALUE`` or ``VALUE``; see ``by_role``.
    2. Workers with a real engine are planned before anything starts (``poolgrid.server.cli.launch_plan``): their GPUs
       are counted, compared with what is there and assigned. The pool is ready once requests have gone through all of
       it.
    3. Parts start in the order consolidator, router, workers.
    4. A part that dies is started again where it was, at growing intervals (``poolgrid.server.process.leash``): its
       ports are held for it (``transport.bound_socket``), and the others continue. The socket at which clients come in
       listens here, so that they wait for a router that is started again. Only a part that does not start the first
       time ends everything, and a worker with a real engine that has died more than ``REAL_RESTARTS_MAX`` times in a
       row.
    5. At the end parts stop in the order router, workers, consolidator; a part that is not gone in time is killed.
       Parts also stop when this process disappears, whatever became of it: they hold the other end of a pipe.

The first lines of `poolgrid up`: the processes it started, and three commands that show what a router is for.

Rules
    1. Each command works as printed, in a terminal of any width, with keys and without.
    2. Each shows something: of two turns of a conversation the second finds the first one's part cached; the
       explanation names the worker, and in a disaggregated pool the leg that computed the prompt.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import zmq
from prometheus_client import CollectorRegistry
from pydantic import Field, StringConstraints, model_validator

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.addresses import bracketed
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.selection import AskStatus, PoolStatus
from poolgrid.server.cli.command_line import API_KEY_VARIABLE, FORMAT_HELP, LEVEL_HELP, LogChoice
from poolgrid.server.cli.launch_plan import (
    ANY,
    INGEST,
    LaunchGroup,
    OptionProblem,
    PlannedPart,
    PlannedWorker,
    described_parts,
    options_as_arguments,
    plan_real,
    simulated_limits,
)
from poolgrid.server.cli.options import arguments_of, environment_name
from poolgrid.server.cli.part import START_TIMEOUT_S, STOP_TIMEOUT_S, Part, PartFailed, part_environment, stop_parts
from poolgrid.server.cli.router_client import api_key_headers, key_hint
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.process.figures import counted
from poolgrid.server.process.nats_settings import EventPlaneSettings
from poolgrid.server.process.plugins import policy_names
from poolgrid.server.process.settings import InputFile, OutputDirectory
from poolgrid.server.process.tasks import cancel_all, detached, owned
from poolgrid.server.transport.bound_socket import ReservedPorts, listen
from poolgrid.server.transport.planes import CurveKeys, PlaneContext, PlaneMetrics
from poolgrid.server.transport.security import SecuritySettings
from poolgrid.server.transport.zmq_socket import CallbackSocket, connect, make_socket
from poolgrid.server.workers.engines.server.core.server_list import SERVERS_MAX, ServerEntry, read_entry
from poolgrid.server.workers.settings import MODALITY_HELP, Modality
from poolgrid.server.workers.timing import PUBLISHED, TIMINGS, Timing

log = logging.getLogger(__name__)

ASK_INTERVAL_S = 0.02


async def until_workers_are_ready(endpoint: str, workers: int, timeout_s: float) -> None:
    """Wait until the router behind a select plane has so many workers that requests can be sent to.

    Raises ``TimeoutError``.
    """
    context = PlaneContext.make(_keys_of_environment(), PlaneMetrics(CollectorRegistry()))
    socket = make_socket(context, zmq.DEALER)
    complete = asyncio.Event()

    def on_frames(frames: list[bytes]) -> None:
        try:
            status = codec.from_pool.decode(frames[-1])
        except DecodeError:
            return  # no router of ours; the timeout reports it
        if isinstance(status, PoolStatus) and is_complete(status, workers):
            complete.set()

    asking = CallbackSocket(socket, on_frames)
    try:
        connect(socket, endpoint)
        async with asyncio.timeout(timeout_s):
            for number in range(1, 1 << 62):
                asking.send([codec.to_pool.encode(AskStatus(number))])
                try:
                    async with asyncio.timeout(ASK_INTERVAL_S):
                        await complete.wait()
                    return
                except TimeoutError:
                    continue
    finally:
        asking.close()
        context.destroy(linger=0)


def is_complete(status: PoolStatus, workers: int) -> bool:
    """Return whether so many workers can be sent requests, with every rank of theirs that the router knows."""
    roles = [role for model in status.models for role in model.roles]
    return sum(role.ready for role in roles) >= workers and not any(role.unreachable for role in roles)


def _keys_of_environment() -> CurveKeys | None:
    """Return the CURVE keys that the parts of a pool take from their environment."""
    names = {name: environment_name(name) for name in SecuritySettings.model_fields if name.startswith("curve_")}
    given = {name: os.environ[variable] for name, variable in names.items() if os.environ.get(variable)}
    return CurveKeys.load(SecuritySettings.model_validate(given))


def program() -> str:
    """Return how this program was called, so that the commands can be pasted."""
    called = Path(sys.argv[0])
    if called.name != "poolgrid":
        return f"{sys.executable} -m poolgrid"
    found = shutil.which("poolgrid")
    return "poolgrid" if found is not None and Path(found) == called else str(called)


def two_turns(url: str, model: str, keyed: bool) -> str:
    """Return a command that sends two turns of a conversation and prints what was cached of each.

    A turn adds a thousand numbers, a few thousand tokens: more than a decode worker computes by itself.
    """
    authorization = [f'    -H "authorization: Bearer ${API_KEY_VARIABLE}" \\'] if keyed else []
    fields = f'\\"model\\": \\"{model}\\", \\"max_tokens\\": 8'
    lines = [
        "for turn in 1 2; do",
        f"  curl -s {url}/v1/completions \\",
        "    -H 'content-type: application/json' -H \"x-request-id: turn-$turn\" \\",
        *authorization,
        f'    -d "{{{fields}, \\"prompt\\": \\"$(seq -s " " ${{turn}}000)\\"}}" |',
        "    grep -o '\"cached_tokens\":[0-9]*'",
        "done",
    ]
    return "\n".join(lines)


def greeting(what: str, url: str, model: str, keyed: bool, explained: str) -> str:
    """Return the first lines: ``what`` runs at ``url``, what to try, and what the explanation shows.

    ``keyed``: requests need an API key.
    """
    command = program()
    lines = [
        f"Model {model!r} is served at {url}/v1",
        f"by {what}. Ctrl-C ends it. In another terminal, try:",
    ]
    if keyed:
        lines += ["", "0. Requests need a key; to look inside, an operator's", f"   export {API_KEY_VARIABLE}=pg-..."]
    lines += [
        "",
        "1. Send two turns of a conversation: the second reuses the prompt of the first",
        *(f"   {line}" for line in two_turns(url, model, keyed).splitlines()),
        f"2. Show why each went to its worker{explained}",
        f"   {command} explain turn-2 --url {url}",
        "3. Watch workers, their caches and the last decisions",
        f"   {command} top --url {url}",
        "",
    ]
    return "\n".join(lines) + "\n"


DEFAULT_LOG_DIR = Path("poolgrid-logs")

WARM_UP_TIMEOUT_S = 600.0
"""Kernels may be tuned and compiled for the first requests."""

WARM_UP_TOKENS = 4

TYPED_PORTS = (5701, 5702, 5703)
"""Ports of the consolidator in the commands of a plan, to be typed; ``up`` itself takes any that are free."""

WARM_UP_PROMPT = "poolgrid warms up " * 64
"""Longer than what is prefilled where it is decoded, whatever the tokenizer makes of it."""

Option = Annotated[str, StringConstraints(min_length=1, max_length=4096)]

REAL_START_TIMEOUT_S = 1800.0
"""A large model may take half an hour to load."""

REAL_STOP_TIMEOUT_S = 60.0
"""An engine frees GPUs and ends processes of its own."""

REAL_RESTARTS_MAX = 3
"""An engine that dies at once dies again: each start loads the model, and hides the first cause in its log."""

ROLES = ("worker", "prefill", "decode", "encode")
"""Words for the roles of workers in options; ``worker`` does the whole of a request."""

PARTS = ("router", "global-router", "consolidator", *ROLES)
"""What ``part_option`` names."""

_OF_SIMULATED = ("speedup", "timing")
_OF_OWN_WORKERS = (
    *(
        "engine",
        "workers",
        "prefill",
        "decode",
        "encode",
        "modality",
        "dry_run",
        "kv_block_size",
        "engine_args",
    ),
)


def by_role(values: Sequence[str]) -> dict[str, list[str]]:
    """Return values of a repeatable option by role; those without one are of ``""``."""
    found: dict[str, list[str]] = {}
    for value in values:
        role, equals, rest = value.partition("=")
        of, meant = (role, rest) if equals and role in ROLES else ("", value)
        found.setdefault(of, []).append(meant)
    return found


def _check_servers(urls: Sequence[str]) -> None:
    """Raise ``ValueError`` for the servers of a pool that cannot be one."""
    given = by_role(urls)
    if "encode" in given:
        raise ValueError("engine_url has encode=URL: servers in front of others are prefill and decode")
    entries = [read_entry(url.removeprefix("worker=")) for url in urls]
    twice = next((each.url for each in entries if isinstance(each, ServerEntry) and entries.count(each) > 1), None)
    if twice is not None:
        raise ValueError(f"engine_url is {twice} more than once: a server has one worker")
    if "prefill" in given and "decode" not in given:
        raise ValueError("engine_url names prefill servers and no decode=URL to continue their requests")


class UpSettings(EventPlaneSettings):
    """A pool of workers on this machine: simulated, or with a real engine."""

    panel: ClassVar[str] = "Pool"

    engine: Literal["simulated", "trtllm"] = Field(
        "simulated",
        description=(
            "Choose the engine of the workers: simulated needs no GPU; trtllm assigns the GPUs that the "
            "engine files ask for."
        ),
    )

    engine_url: tuple[Option, ...] = Field(
        (),
        max_length=SERVERS_MAX,
        description=(
            "Route to this engine server: http://gpu1:8000, prefill=URL, decode=URL, dns+http://NAME:PORT or "
            "k8s+http://:PORT?selector=LABELS; with --pools POOL=URL. Repeat."
        ),
    )
    engine_urls_file: Path | None = Field(
        None,
        description=(
            "Route to the engine servers in this file, a URL or ROLE=URL on each line. Changes are read within a "
            "second."
        ),
    )
    engine_api_key: str = Field(
        "",
        max_length=4096,
        description=(
            "Send this API key to the engine servers. Set the environment variable instead, so that no "
            "process list shows it."
        ),
    )
    pools: InputFile | None = Field(
        None,
        description=(
            "Run a whole fleet from this pool-grid document: a global router, and per pool a router with workers "
            "or the pool's engine_url. Its urls are ignored."
        ),
    )
    workers: int | None = Field(
        None,
        ge=0,
        le=256,
        description="Start this many workers that serve whole requests. Unset = 4, or 0 with decode workers.",
    )
    prefill: int = Field(0, ge=0, le=256, description="Start this many prefill workers. They need decode workers.")
    decode: int = Field(0, ge=0, le=256, description="Start this many decode workers.")
    encode: int = Field(
        0, ge=0, le=256, description="Start this many workers that encode images; all workers then accept images."
    )
    host: str = Field("127.0.0.1", description="Listen on this address.")
    port: int = Field(8000, ge=0, le=65535, description="Serve the OpenAI API at this port; 0 = any free port.")
    speedup: float = Field(
        1.0,
        gt=0,
        le=1e6,
        description=(
            "Run the simulated engines this many times faster than real ones. With --pools, it multiplies "
            "each pool's own factor."
        ),
    )
    timing: Timing = Field(
        PUBLISHED,
        examples=list(TIMINGS),
        description=(
            "Choose the step times of the simulated engines: published (formulas), h100-qwen3-8b, h200-qwen3-8b "
            "(measured), or your own JSON file."
        ),
    )
    data_dir: OutputDirectory | None = Field(
        None,
        description=(
            "Keep the journal and the recorded decisions in this directory. Unset = a temporary one; with "
            "--pools, none."
        ),
    )
    consolidators: int = Field(
        1,
        ge=1,
        le=8,
        description=(
            "With event_plane nats, start this many consolidators. One is active, the others take over when it fails."
        ),
    )
    settings_file: InputFile | None = Field(
        None,
        description="Read settings of the routers from this TOML file; options given here override it.",
    )
    api_keys: InputFile | None = Field(
        None,
        description=(
            "Read API keys and tenants from this JSON file (poolgrid keys create). Unset = no authentication."
        ),
    )
    policy: str = Field(
        "kv",
        description=f"Choose how a worker is selected: {', '.join(policy_names())}, or your module:Class.",
    )
    model_path: Path = Field(
        TINY_MODEL_PATH,
        description=(
            "Load this Hugging Face style model directory, or ORG/MODEL of a hub, which is fetched first. Simulated "
            "workers need no weights."
        ),
    )
    kv_block_size: int = Field(32, ge=1, le=4096, description="Set the number of tokens in a KV block.")
    log_level: str = Field("warning", description=LEVEL_HELP)
    log_format: Literal["text", "json"] | None = Field(None, description=FORMAT_HELP)
    served_model_name: str = Field(
        "", max_length=256, description="Serve the model under this name. Unset = the name of its directory."
    )
    modality: Modality | None = Field(
        None,
        description=f"{MODALITY_HELP} Unset = multimodal with encode workers, else text.",
    )
    engine_args: tuple[Option, ...] = Field(
        (),
        max_length=8,
        description=(
            "Read engine arguments from this YAML file, or ROLE=FILE for prefill, decode or encode workers. "
            "Repeat for more roles."
        ),
    )
    part_option: tuple[Option, ...] = Field(
        (),
        max_length=256,
        description=(
            "Give a part a further option, PART.NAME=VALUE, as router.log-level=debug. PART is a command, or "
            "prefill, decode or encode. Repeat for more."
        ),
    )
    gpus: tuple[Option, ...] = Field(
        (),
        max_length=8,
        description=(
            "Use only these GPUs (0,1,2,3 or UUIDs), or ROLE=GPUS for workers of a role. Unset = "
            "CUDA_VISIBLE_DEVICES, else all."
        ),
    )
    dry_run: bool = Field(
        False,
        description="Print every process, its GPUs, port and command, and whether the GPUs exist. Start nothing.",
    )
    log_dir: OutputDirectory | None = Field(
        None,
        description=(
            "Write a log file per worker into this directory. Unset = poolgrid-logs with a real engine, "
            "standard error otherwise."
        ),
    )
    start_timeout_ms: float | None = Field(
        None,
        gt=0,
        le=86_400_000,
        description="Give up when a worker is not ready after this time. Unset = 60,000, or 1,800,000 with trtllm.",
    )

    @model_validator(mode="after")
    def _check_consolidators(self) -> Self:
        if self.consolidators > 1 and not self.on_nats:
            raise ValueError(
                f"consolidators is {self.consolidators} and event_plane is zmq: a journal in a directory has one writer"
            )
        if self.pools is not None and self.nats_pool != type(self).model_fields["nats_pool"].default:
            raise ValueError(
                f"nats_pool is {self.nats_pool!r} and pools is given: each pool of a fleet has its own name, there too"
            )
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_roles()
        if self.has_servers:
            return self._check_front()
        wrong = _OF_SIMULATED if self.real else ("gpus",)
        for name in wrong:
            if name in self.model_fields_set and getattr(self, name) != type(self).model_fields[name].default:
                other = "simulated" if self.real else "trtllm"
                raise ValueError(
                    f"{name} is {getattr(self, name)!r} with engine {self.engine}: it is for {other} workers"
                )
        if self.real and "model_path" not in self.model_fields_set:
            raise ValueError(f"model_path is not given, and engine {self.engine} needs a model with weights")
        if self.prefill and not self.decode:
            raise ValueError(f"prefill is {self.prefill} and decode is 0: prefill workers need a decode worker")
        if not self.whole_workers + self.decode:
            raise ValueError("workers and decode are 0: no worker would generate tokens")
        return self

    def _check_front(self) -> Self:
        """Refuse options of workers that running servers have settled already."""
        for name in (*_OF_SIMULATED, "gpus", *_OF_OWN_WORKERS):
            if name in self.model_fields_set and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r} with engine_url: the servers run already, and have theirs"
                )
        if self.pools is None:
            _check_servers(self.engine_url)
            return self
        if self.engine_urls_file is not None:
            raise ValueError("engine_urls_file is given with pools: give each pool its servers, as engine_url POOL=URL")
        for pool, urls in self.urls_by_pool().items():
            if not pool:
                raise ValueError(f"engine_url is {urls[0]!r} with pools: name its pool, as POOL=URL")
            _check_servers(urls)
        return self

    def _check_roles(self) -> None:
        for option in self.part_option:
            if option.removeprefix("--").partition(".")[0] not in PARTS:
                raise ValueError(f"part_option is {option!r}, allowed are PART.NAME=VALUE; parts: {', '.join(PARTS)}")
        for name in ("engine_args", "gpus"):
            for role, values in by_role(getattr(self, name)).items():
                if len(values) > 1:
                    raise ValueError(
                        f"{name} is given {len(values)} times for {role or 'no role'}: give ROLE=VALUE, once for each"
                    )

    @property
    def has_servers(self) -> bool:
        """Whether the pool is in front of engine servers that run."""
        return bool(self.engine_url) or self.engine_urls_file is not None

    def backends(self) -> dict[str, list[str]]:
        """Return the URLs of servers that run already, by the role of their worker."""
        given = by_role(self.engine_url)
        whole = [*given.get("", ()), *given.get("worker", ())]
        return {"aggregated": whole, "prefill": given.get("prefill", []), "decode": given.get("decode", [])}

    def urls_by_pool(self) -> dict[str, list[str]]:
        """Return the servers of each pool of ``pools``, without its name; those that name no pool are of ``""``."""
        found: dict[str, list[str]] = {}
        for value in self.engine_url:
            pool, equals, url = value.partition("=")
            of, meant = (pool, url) if equals and "://" not in pool else ("", value)
            found.setdefault(of, []).append(meant)
        return found

    def options_of(self, *parts: str) -> list[str]:
        """Return the further options of parts as arguments; raises ``OptionProblem``."""
        found = (option.removeprefix("--").partition(".") for option in self.part_option)
        return options_as_arguments([option for part, _, option in found if part in parts])

    def start_timeout_s(self, default: float) -> float:
        return default if self.start_timeout_ms is None else self.start_timeout_ms / 1000

    @property
    def real(self) -> bool:
        return self.engine != "simulated"

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model_path.resolve().name

    @property
    def multimodal(self) -> bool:
        return self.modality == "multimodal" or (self.modality is None and bool(self.encode))

    @property
    def worker_modality(self) -> str:
        return self.modality or ("multimodal" if self.multimodal else "text")

    def groups(self, workers: Mapping[str, str] | None = None) -> list[LaunchGroup]:
        """Return the workers by kind, in the order in which they get GPUs; ``workers`` are roles by name."""
        names = self.workers_by_name() if workers is None else workers
        engine_args, gpus = by_role(self.engine_args), by_role(self.gpus)
        plain = engine_args.get("", [])
        if plain and "aggregated" not in names.values():
            roles = ", ".join(dict.fromkeys(names.values()))
            raise OptionProblem(
                f"engine_args is {plain[0]!r}, for workers of whole requests, of which there are none: "
                f"give ROLE=FILE, roles here: {roles}"
            )
        engine_args["worker"] = engine_args.get("worker") or plain
        kinds = {"aggregated": "worker", "prefill": "prefill", "decode": "decode", "encode": "encode"}
        return [
            LaunchGroup(
                tuple(name for name, each in names.items() if each == role),
                "prefill_and_decode" if role == "aggregated" else role,
                Path(engine_args[word][0]) if engine_args.get(word) else None,
                tuple(self.options_of("worker", word)),
                ",".join(gpus.get(word, ())),
            )
            for role, word in kinds.items()
            if role in names.values()
        ]

    @property
    def usable_gpus(self) -> str:
        """Return the GPUs that workers may get, as the option names them."""
        return ",".join(by_role(self.gpus).get("", ()))

    @property
    def log_choice(self) -> LogChoice:
        return LogChoice(self.log_level, self.log_format, default="warning")

    def router_arguments(self) -> list[str]:
        """Return a pool router's options for choosing workers, and for clients."""
        file = [] if self.settings_file is None else ["--settings-file", str(self.settings_file)]
        policy = self._unless_from_file("policy", "--policy", self.policy)
        return [*file, *policy, *self.options_of("router")]

    def _unless_from_file(self, name: str, option: str, value: str) -> list[str]:
        """Return an option, which would win over the settings file; so nothing that was not asked for."""
        left_to_file = self.settings_file is not None and name not in self.model_fields_set
        return [] if left_to_file else [option, value]

    @property
    def key_arguments(self) -> list[str]:
        """Return the options for API keys of the router that clients use."""
        return [] if self.api_keys is None else ["--api-keys", str(self.api_keys)]

    def event_plane_arguments(self, pool: str = "") -> list[str]:
        """Return every part's options for the event plane; none when the journal is the consolidator's own.

        ``pool`` is the name on NATS of one that is not this settings' own.
        """
        if not self.on_nats:
            return []
        plane = {name: getattr(self, name) for name in EventPlaneSettings.model_fields}
        return arguments_of(EventPlaneSettings(**{**plane, **({"nats_pool": pool} if pool else {})}))

    @property
    def whole_workers(self) -> int:
        if self.workers is not None:
            return self.workers
        return 0 if self.decode else 4

    def workers_by_name(self) -> dict[str, str]:
        counts = {"aggregated": self.whole_workers, "prefill": self.prefill, "decode": self.decode}
        return {
            f"{'worker' if role == 'aggregated' else role}-{number}": role
            for role, count in {**counts, "encode": self.encode}.items()
            for number in range(count)
        }


def plan(
    settings: UpSettings, model: PromptModel | None, usable: Callable[[str], Sequence[str]]
) -> list[PlannedWorker]:
    """Return every worker as it will be started; raises ``ValueError`` with what is wrong.

    ``usable`` tells which GPUs there are, and is asked only where workers need some; ``model`` is what simulated
    workers take their vocabulary from.
    """
    if settings.real:
        return plan_engines(settings, settings.groups(), usable)
    assert model is not None, "simulated workers have a model's vocabulary"
    roles = settings.workers_by_name()
    return [
        PlannedWorker(name, (*simulated_arguments(settings, model, name, roles[name], group),))
        for group in settings.groups()
        for name in group.names
    ]


def plan_engines(
    settings: UpSettings, groups: Sequence[LaunchGroup], usable: Callable[[str], Sequence[str]]
) -> list[PlannedWorker]:
    """Return workers with a real engine, with their GPUs; raises ``ValueError`` with what is wrong."""
    common = {
        "host": settings.host,
        "model-path": str(settings.model_path),
        "served-model-name": settings.model_name,
        "modality": settings.worker_modality,
    }
    if "kv_block_size" in settings.model_fields_set:
        common["kv-block-size"] = str(settings.kv_block_size)
    planned = plan_real(settings.engine, groups, common, usable(settings.usable_gpus), os.environ)
    return [replace(each, arguments=(*each.arguments, *settings.log_choice.arguments)) for each in planned]


def simulated_arguments(
    settings: UpSettings, model: PromptModel, name: str, role: str, group: LaunchGroup
) -> list[str]:
    """Return the command of a simulated worker."""
    return [
        *(
            "worker",
            "--engine",
            "simulated",
            "--worker-id",
            name,
            "--role",
            role,
            "--served-model-name",
            settings.model_name,
            "--host",
            settings.host,
        ),
        *("--modality", settings.worker_modality),
        *("--consolidator", INGEST, "--timing", settings.timing, "--speedup", str(settings.speedup)),
        *("--kv-block-size", str(settings.kv_block_size)),
        *output_arguments(settings, model),
        *("--shutdown-timeout-ms", "2000", *settings.log_choice.arguments),
        # The last option on the command line wins.
        *([] if group.engine_args is None else simulated_limits(group.engine_args)),
        *group.options,
    ]


JOIN_TIMEOUT_S = 10.0
"""How long the start waits for servers that have answered: they join within a second or two."""


@dataclass(frozen=True, slots=True)
class ServersInFront:
    """What a pool in front of engine servers has besides settings and workers."""

    what: str
    """What serves, for people."""
    arguments: Sequence[str]
    """What the consolidator follows them by; empty where processes of their own do."""
    answered: int
    """Servers that have answered."""
    settings_later: Callable[[], Awaitable[UpSettings | None]]
    """Waits for the first server that answers later; ``None`` = there is nothing to wait for."""


class LocalPool:
    """All parts of a pool on this machine."""

    def __init__(
        self,
        settings: UpSettings,
        data_dir: Path,
        workers: Sequence[PlannedWorker],
        servers: ServersInFront | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``servers`` is of a pool in front of engine servers; ``None`` = workers with the engine of the settings.
        ``environment`` is that of its parts, by default ours."""
        self._servers = servers
        self._what = servers.what if servers is not None else counted(len(workers), f"{settings.engine} worker")
        self._planning: asyncio.Task[None] | None = None
        self._settings = settings
        self._data_dir = data_dir
        self._planned = workers
        self._environment = part_environment() if environment is None else dict(environment)
        if settings.engine_api_key:
            # Not among the arguments, which every user of the machine may read.
            self._environment[environment_name("engine_api_key")] = settings.engine_api_key
        self._consolidators: list[Part] = []
        self._router: Part | None = None
        self._workers: list[Part] = []
        self._ports = ReservedPorts(settings.host)
        self._front: socket.socket | None = None
        """Where clients come to; the router is started with it."""
        self._ingest = ""
        """Where workers push; with an event plane on NATS they read it there."""

    async def start(self) -> str:
        """Start everything; return the URL of the OpenAI API."""
        settings = self._settings
        self._front = listen(settings.host, settings.port, "port")
        common = settings.log_choice.arguments
        if settings.on_nats:
            follow = settings.event_plane_arguments()
            data_dir = [] if settings.data_dir is None else ["--data-dir", str(settings.data_dir)]
            await asyncio.gather(*(self._start_standby(number) for number in range(settings.consolidators)))
        else:
            data_dir = ["--data-dir", str(self._data_dir)]
            planes = [f"--{key}-port={self._ports.hold()}" for key in ("ingest", "feed", "query")]
            own = [*planes, *settings.options_of("consolidator")]
            following = [] if self._servers is None else self._servers.arguments
            arguments = ["consolidator", "--host", settings.host, *data_dir, *own, *following, *common]
            only = await self._start_part("consolidator", arguments)
            self._ingest = only.word("ingest")
            follow = ["--feed-endpoint", only.word("feed"), "--query-endpoint", only.word("query")]
        ports = str(self._front.getsockname()[1]), str(self._ports.hold())
        rest = [*data_dir, *follow, *common]
        router = self._start_part("router", [*router_arguments(settings, *ports), *rest], self._front)
        started = await asyncio.gather(router, *(self._start_worker(each) for each in self._planned))
        self._router, self._workers = started[0], list(started[1:])
        url = self._router.ready_words[0]
        if self._servers is not None:
            await self._until_servers_joined(self._servers, self._router.word("select"))
            self._planning = detached(self._plan_again(self._servers, ports, rest), "plan by what servers report")
            return url
        workers = sum(each.count for each in self._planned)
        await until_workers_are_ready(self._router.word("select"), workers, START_TIMEOUT_S)
        if settings.real:
            await warm_up(url, settings)
        return url

    async def _until_servers_joined(self, front: ServersInFront, select: str) -> None:
        """Wait a moment for the servers that have answered; the others join when they do."""
        if front.answered:
            with suppress(TimeoutError):
                await until_workers_are_ready(select, front.answered, JOIN_TIMEOUT_S)

    async def _plan_again(self, front: ServersInFront, ports: tuple[str, str], rest: Sequence[str]) -> None:
        """Start the router again by what the first server reports, where none had answered before."""
        settings = await front.settings_later()
        assert self._router is not None, "it was started"
        if settings is not None:
            log.warning("an engine server has answered: the router starts again by what it reports")
            self._router.start_with([*router_arguments(settings, *ports), *rest])

    async def given_up(self) -> str:
        """Wait until a worker is not started again any more; return why."""
        return await first_given_up(self._workers)

    def ingests(self) -> list[str]:
        return [f"ingest={self._ingest}"] if self._ingest else []

    def greeting(self, url: str) -> str:
        settings = self._settings
        if self._servers is not None and not self._servers.answered:
            return f"OpenAI API at {url}/v1, by {self._what}. Ctrl-C ends it.\n"
        apart = settings.prefill or settings.backends()["prefill"]
        shown = ": one worker computed the prompt, another one continues" if apart else ""
        return greeting(self._what, url, settings.model_name, settings.api_keys is not None, shown)

    async def _start_worker(self, planned: PlannedWorker) -> Part:
        part = worker_part(self._settings, planned, self._ingest, self._environment)
        self._workers.append(part)
        await part.start()
        part.watch()
        return part

    async def _start_standby(self, number: int) -> None:
        """Start a consolidator that shares the pool with others; the first is the active one."""
        settings = self._settings
        name = "consolidator" if settings.consolidators == 1 else f"consolidator-{number}"
        arguments = ["consolidator", "--host", settings.host, *settings.event_plane_arguments()]
        further = settings.options_of("consolidator")
        await self._start_part(name, [*arguments, *settings.log_choice.arguments, *further])

    async def _start_part(self, name: str, arguments: list[str], listener: socket.socket | None = None) -> Part:
        part = Part(name, arguments, self._environment, listener=listener)
        if name == "router":
            self._router = part
        else:
            self._consolidators.append(part)
        await part.start()
        part.watch()
        return part

    async def stop(self) -> None:
        if self._front is not None:
            self._front.close()  # the router's copy is the last: once it is closed, connections are refused
        if self._planning is not None:
            self._planning.cancel()
        for parts in ([self._router], self._workers, self._consolidators):
            await stop_parts(parts)
        self._ports.close()


def worker_part(
    settings: UpSettings, planned: PlannedWorker, ingest: str, environment: Mapping[str, str], pool: str = ""
) -> Part:
    """Return the process of a worker that pushes its events to ``ingest``; with NATS to the journal of ``pool``."""
    log_dir = settings.log_dir or (DEFAULT_LOG_DIR if settings.real else None)
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    real = settings.real
    return Part(
        planned.name,
        pushing(settings, planned.arguments, ingest, pool),
        {**environment, **planned.environment()},
        REAL_STOP_TIMEOUT_S if real else STOP_TIMEOUT_S,
        settings.start_timeout_s(REAL_START_TIMEOUT_S if real else START_TIMEOUT_S),
        None if log_dir is None else log_dir / f"{planned.name}.log",
        REAL_RESTARTS_MAX if real else None,
    )


async def first_given_up(workers: Sequence[Part]) -> str:
    """Wait until a worker is not started again any more; return why."""
    waiting = [owned(worker.given_up(), f"bound of {worker.name}") for worker in workers]
    if not waiting:
        await asyncio.Event().wait()
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        await cancel_all(waiting)


def router_arguments(settings: UpSettings, port: str, select_port: str) -> list[str]:
    """Return the command of the router, but for where the consolidator is."""
    named = ["--served-model-name", settings.served_model_name] if settings.served_model_name else []
    return [
        *("router", "--host", settings.host, "--port", port),
        *("--select-port", select_port, "--model-path", str(settings.model_path), *named),
        *settings.key_arguments,
        *settings.router_arguments(),
    ]


def pushing(settings: UpSettings, arguments: Sequence[str], ingest: str, pool: str = "") -> list[str]:
    """Return a worker's arguments with where it pushes its events; ``pool`` as in ``event_plane_arguments``."""
    if not settings.on_nats:
        return [each.replace(INGEST, ingest) for each in arguments]
    kept: list[str] = []
    for each in arguments:
        if each == INGEST and kept and kept[-1] == "--consolidator":
            kept.pop()
        elif INGEST not in each:
            kept.append(each)
    return [*kept, *settings.event_plane_arguments(pool)]


def planned_parts(settings: UpSettings, workers: Sequence[PlannedWorker]) -> list[PlannedPart]:
    """Return what would be started."""
    address = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else bracketed(settings.host)
    ingest, feed, query = (f"tcp://{address}:{port}" for port in TYPED_PORTS)
    planes = [f"--{name}-port={port}" for name, port in zip(("ingest", "feed", "query"), TYPED_PORTS, strict=True)]
    follow = ["--feed-endpoint", feed, "--query-endpoint", query]
    if settings.on_nats:
        planes = follow = settings.event_plane_arguments()
    consolidator = (ANY, ["consolidator", "--host", settings.host, *planes, *settings.options_of("consolidator")])
    names = ["consolidator"]
    if settings.consolidators > 1:
        names = [f"consolidator-{number}" for number in range(settings.consolidators)]
    router = [*router_arguments(settings, str(settings.port), "0"), *follow]
    others = {**dict.fromkeys(names, consolidator), "router": (str(settings.port) if settings.port else ANY, router)}
    told = [replace(each, arguments=tuple(pushing(settings, each.arguments, INGEST))) for each in workers]
    return described_parts(told, others, ingest)


async def warm_up(url: str, settings: UpSettings) -> None:
    """Send requests through every kind of worker; raises ``PartFailed`` when one fails.

    The first request between a prefill and a decode worker opens the way that KV takes, which is slow; no client
    should wait for it.
    """
    import httpx

    paths = max(settings.whole_workers, settings.prefill * settings.decode, settings.decode)
    async with httpx.AsyncClient(base_url=url, timeout=WARM_UP_TIMEOUT_S, headers=api_key_headers()) as client:

        async def ask(prompt: str) -> None:
            body = {"model": settings.model_name, "prompt": prompt, "max_tokens": WARM_UP_TOKENS}
            try:
                answer = await client.post("/v1/completions", json=body)
            except httpx.HTTPError as error:
                raise PartFailed(f"warming up: a request got no answer: {error!r}") from error
            if answer.status_code != 200:
                hint = key_hint(answer.status_code)
                raise PartFailed(
                    f"warming up: a request was answered with {answer.status_code}: {answer.text[:500]}{hint}"
                )

        await asyncio.gather(*(ask(f"{at} {WARM_UP_PROMPT}") for at in range(paths)))


def output_arguments(settings: UpSettings, model: PromptModel) -> list[str]:
    """Return the settings of simulated workers for their answers: which tokens there are, and how many come."""
    return [
        *("--vocabulary-size", str(model.vocab_size)),
        *("--model-path", str(settings.model_path)),
    ]
