"""Dynamo's DynamoGraphDeployment, read as values of the Helm chart in ``deploy/kubernetes``. Pure: text to text.

Read are its forms ``nvidia.com/v1alpha1`` (``services``, with ``resources`` and ``extraPodSpec``) and ``v1beta1``
(``components``, with a ``podTemplate``): the frontend's replicas and routing mode, and of workers the role, model,
engine options, replicas, GPUs, requests, shared memory and autoscaling. Facts are of its own examples.

What has no place in the chart is named, one remark each, and nothing is left out in silence. A worker is carried over
when poolgrid runs its engine inside the worker (TensorRT-LLM, the mocker). Servers of vLLM and SGLang stay as they
are, and workers run next to them (docs/engine_servers.md).

A gateway's endpoint picker with a ``pool-selector`` makes the grid of a global router, and a release for each pool.

An engine file is carried over with its content, as ``engineArgs``: it comes out of a ConfigMap of the same file, or by
``read_file``. A name on a hub becomes the chart's model cache, an engine over several nodes a group with ``nodes``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from poolgrid.kernel.pool_grids.grid_document import GridDocumentError
from poolgrid.server.cli.dynamo_options import in_our_words
from poolgrid.server.global_router.document.history import document_text
from poolgrid.server.global_router.document.reader import load_document

KIND = "DynamoGraphDeployment"
TEXT_BYTES_MAX = 4 * 1024 * 1024
"""Largest file that is read; a cluster's API takes objects of 1.5 MiB."""

MODELS = "/models"
"""Where the chart mounts a volume of models."""

ROLES = {"prefill": "prefill", "decode": "decode", "encode": "encode", "prefill_and_decode": "aggregated"}
"""Dynamo's word for what a worker does, and ours."""

ENGINES = {"dynamo.trtllm": "trtllm", "dynamo.mocker": "simulated"}
"""The program of a worker, and our engine."""

SSH_SECRET = "ranks"
"""Secret in the values of an engine over several nodes."""

BESIDE = {"dynamo.vllm": "vLLM", "dynamo.sglang": "SGLang"}

FRONTEND = "dynamo.frontend"

WITHOUT_EVENTS = "kv --no-kv-events"

ROUTING = {
    "kv": "kv",
    WITHOUT_EVENTS: "approximate",
    "round-robin": "round-robin",
    "random": "random",
    "least-loaded": "least-loaded",
}
"""DYN_ROUTER_MODE, and our policy."""

EVENT_OPTIONS = ("router-kv-events", "kv-events", "use-kv-events")
EVENT_VARIABLES = ("DYN_ROUTER_USE_KV_EVENTS", "DYN_USE_KV_EVENTS", "DYN_KV_EVENTS")

CARRIED = frozenset({"migration-limit", "reasoning-parser", "tool-call-parser"})
"""Options of a frontend that become options of our routers."""

REPEATED = "engine-argument"
"""An option that may be given several times."""

WORKERS = frozenset({"worker", "prefill", "decode", ""})
"""Types of components that run an engine."""

PICKER = "epp"
SELECTOR = "pool-selector"
"""Type of Dynamo's endpoint picker, and its plugin that has a pool grid."""

CONTAINER_KEYS = frozenset({"name", "image", "imagePullPolicy", "command", "args", "env", "envFrom", "resources"})
"""Fields of a container that are read, or that the chart sets by itself."""

REMARK_CHARS_MAX = 100
"""Longest command of a script that a remark quotes."""

OWN_OPTIONS = frozenset({"model-path", "served-model-name", "disaggregation-mode"})
"""Options that the chart gives by itself, from other values."""


class GraphDeploymentError(Exception):
    """What makes a file unusable; the message has the place, and what was expected."""


@dataclass(slots=True)
class Conversion:
    """Values for the chart, and what could not be carried over."""

    values: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    pools: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values of the release of each pool, by its name, where ``values`` are a global router's."""

    def texts(self) -> dict[str, str]:
        """Return the YAML of each release by its name; the first has none."""
        made = {"": self.values, **self.pools}
        return {name: yaml.safe_dump(each, sort_keys=False, allow_unicode=True) for name, each in made.items()}


@dataclass(slots=True)
class _Component:
    """One component in either form."""

    name: str
    kind: str
    raw: dict[str, Any]
    container: dict[str, Any]

    def words(self) -> list[str]:
        """Return its command line with its variables filled in; of a script, the command that runs a known program."""
        return self._command()[0]

    def other_commands(self) -> list[str]:
        """Return the other commands of a script."""
        return self._command()[1]

    def _command(self) -> tuple[list[str], list[str]]:
        words = [str(each) for each in (*_list(self.container.get("command")), *_list(self.container.get("args")))]
        variables = self.environment()
        if words[:1] and words[0].rpartition("/")[2] in ("sh", "bash") and "-c" in words:
            commands = _commands(words[-1])
            main = next((each for each in commands if any(word.startswith("dynamo.") for word in each)), None)
            if main is not None:
                others = [shlex.join(each) for each in commands if each is not main]
                return [_filled(word, variables) for word in main], others
        return [_filled(word, variables) for word in words], []

    def labels(self) -> dict[str, str]:
        """Return the labels of its pods."""
        metadata = _dict(self.raw.get("extraPodMetadata")) or _dict(_dict(self.raw.get("podTemplate")).get("metadata"))
        return {**_dict(self.raw.get("labels")), **_dict(metadata.get("labels"))}

    def environment(self) -> dict[str, str]:
        return {str(each["name"]): str(each["value"]) for each in self._variables() if "value" in each}

    def unknown_variables(self) -> list[str]:
        """Return the names of variables whose values are not in the manifest: fields of the pod, secrets."""
        return [str(each.get("name")) for each in self._variables() if "value" not in each]

    def _variables(self) -> list[dict[str, Any]]:
        given = (*_list(self.raw.get("envs")), *_list(self.container.get("env")))
        return [each for each in given if isinstance(each, dict) and "name" in each]


def _commands(script: str) -> list[list[str]]:
    """Return the commands of a shell script as words; one that cannot be read is one word."""
    commands: list[list[str]] = []
    for line in re.sub(r"\\\r?\n", " ", script).splitlines():
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:
            commands.append([line.strip()])
            continue
        command: list[str] = []
        for word in words:
            if word and set(word) <= set(";&|"):
                commands.append(command)
                command = []
            else:
                command.append(word)
        commands.append(command)
    return [command for command in commands if command]


_VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)\}|\((?P<kubernetes>\w+)\)|(?P<bare>\w+))")


def _filled(word: str, variables: Mapping[str, str]) -> str:
    """Return a word with those variables filled in that are known."""
    return _VARIABLE.sub(lambda found: variables.get(found[found.lastgroup or ""], found[0]), word)


def is_graph_deployment(text: str) -> bool:
    """Return whether a file has a DynamoGraphDeployment; JSON of a pool grid does not."""
    return re.search(rf'^\s*"?kind"?:\s*"?{KIND}"?\s*,?\s*$', text, re.MULTILINE) is not None


ReadFile = Callable[[str], str | None]
"""Returns the text of a file that a manifest names; ``None`` where it is not there."""


def convert_graph(
    text: str,
    trtllm_options: Collection[str],
    simulated_options: Collection[str],
    read_file: ReadFile = lambda path: None,
) -> Conversion:
    """Return the values of a DynamoGraphDeployment, the first of the file.

    The collections are the options that our workers have, without dashes. Raises ``GraphDeploymentError``.
    """
    if len(text.encode()) > TEXT_BYTES_MAX:
        raise GraphDeploymentError(f"the file has more than {TEXT_BYTES_MAX} bytes")
    try:
        documents = [each for each in yaml.safe_load_all(text) if isinstance(each, dict)]
    except yaml.YAMLError as error:
        raise GraphDeploymentError(f"is no YAML: {error}") from None
    graphs = [each for each in documents if each.get("kind") == KIND]
    if not graphs:
        raise GraphDeploymentError(f"has no document of the kind {KIND}")
    made = Conversion()
    others = sorted({str(each.get("kind")) for each in documents if each.get("kind") != KIND})
    if others or len(graphs) > 1:
        made.remarks.append(f"only the first {KIND} is read; the file also has {', '.join(others) or 'more of them'}")
    spec = _dict(graphs[0].get("spec"))
    components = list(_components(spec))
    if not components:
        raise GraphDeploymentError("spec has neither services (v1alpha1) nor components (v1beta1)")
    for key in sorted(set(spec) - {"services", "components", "pvcs", "backendFramework"}):
        made.remarks.append(f"spec.{key} is not carried over")
    engine_options = {"trtllm": trtllm_options, "simulated": simulated_options}
    mounted = {
        str(name): str(content)
        for each in documents
        if each.get("kind") == "ConfigMap"
        for name, content in _dict(each.get("data")).items()
    }

    def engine_file(path: str) -> str | None:
        return mounted.get(path.rpartition("/")[2]) or read_file(path)

    selector = _selector(components, mounted)
    if selector is None:
        _pool(components, made, engine_options, engine_file)
        if not made.values.get("workers"):
            raise GraphDeploymentError("; ".join(["no worker of it can be carried over", *made.remarks]))
        return made
    label, document = _grid(selector, made)
    model: dict[str, Any] = {}
    for pool in document["aggregated"]["pools"]:
        name = str(pool["name"])
        part = Conversion()
        of_pool = [
            each
            for each in components
            if each.kind != PICKER and (each.kind not in WORKERS or each.labels().get(label) == name)
        ]
        _pool(of_pool, part, engine_options, engine_file)
        made.remarks += [each for each in part.remarks if each not in made.remarks]
        pool["url"] = f"http://{_group_name(name)}-router:8000"
        groups = part.values.get("workers", [])
        if not any(group["role"] == "prefill" for group in groups):
            # Dynamo's picker finds a worker of whole requests by the sub-component decode.
            for group in groups:
                group["role"] = "aggregated" if group["role"] == "decode" else group["role"]
        if groups:
            made.pools[_group_name(name)] = part.values
            model = model or {"model": part.values["model"]}
        else:
            made.remarks.append(f"pool {name}: no worker with the label {label}={name} can be carried over")
    made.values = {"pool": {"enabled": False}, "globalRouter": {"enabled": True, "document": document}, **model}
    return made


def _pool(
    components: list[_Component], made: Conversion, engine_options: dict[str, Collection[str]], engine_file: ReadFile
) -> None:
    """Convert the components of one pool."""
    groups: list[dict[str, Any]] = []
    for component in components:
        if component.kind in ("frontend", "main"):
            _frontend(component, made)
        elif component.kind in WORKERS:
            group = _worker(component, made, engine_options, engine_file)
            if group is not None:
                groups.append(group)
        elif component.kind == "planner":
            made.remarks.append(
                f"{component.name}: the planner is not carried over; autoscaling of a group scales by the backlog"
            )
        else:
            made.remarks.append(f"{component.name}: a component of the type {component.kind} is not carried over")
    if groups:
        made.values["workers"] = groups


def _selector(components: list[_Component], mounted: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the parameters of the endpoint picker's pool-selector, if it has one."""
    for component in components:
        given = _dict(component.raw.get("eppConfig"))
        config = _dict(given.get("config"))
        if key := _dict(given.get("configMapRef")).get("key"):
            try:
                config = _dict(yaml.safe_load(mounted.get(str(key), "")))
            except yaml.YAMLError:
                continue
        for plugin in map(_dict, _list(config.get("plugins"))):
            if plugin.get("type") == SELECTOR:
                return _dict(plugin.get("parameters"))
    return None


def _grid(parameters: dict[str, Any], made: Conversion) -> tuple[str, dict[str, Any]]:
    """Return the label of pods that names their pool, and the document of a global router."""
    try:
        loaded = load_document(json.dumps({"poolLabels": [], **parameters}), SELECTOR)
    except GridDocumentError as error:
        raise GraphDeploymentError("; ".join(f"{SELECTOR}: {each}" for each in error.problems)) from None
    made.remarks += [f"{SELECTOR}: {each}" for each in loaded.warnings]
    return str(parameters.get("poolLabel", "")), json.loads(document_text(loaded.document))


def _components(spec: dict[str, Any]) -> Iterator[_Component]:
    for name, service in _dict(spec.get("services")).items():
        raw = _dict(service)
        container = _dict(_dict(raw.get("extraPodSpec")).get("mainContainer"))
        component = _Component(str(name), str(raw.get("componentType", "")), raw, container)
        if component.kind == "main":  # of any program
            runs_engine = not {*ENGINES, *BESIDE}.isdisjoint(component.words())
            component.kind = "worker" if runs_engine else "frontend"
        yield component
    for raw in map(_dict, _list(spec.get("components"))):
        containers = [_dict(each) for each in _list(_pod(raw).get("containers"))]
        main = next((each for each in containers if each.get("name") == "main"), containers[0] if containers else {})
        yield _Component(str(raw.get("name", "")), str(raw.get("type", "")), raw, main)


def _pod(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the pod of a component: all of it in v1beta1, what is added to it in v1alpha1."""
    return _dict(_dict(raw.get("podTemplate")).get("spec")) or _dict(raw.get("extraPodSpec"))


def _frontend(component: _Component, made: Conversion) -> None:
    router: dict[str, Any] = {"replicas": _number(component.raw.get("replicas", 1), component, "replicas")}
    name, environment, words = component.name, component.environment(), component.words()
    options, unread = _options(words[words.index(FRONTEND) + 1 :] if FRONTEND in words else [])
    mode = environment.pop("DYN_ROUTER_MODE", None)
    mode = options.pop("router-mode", mode)
    told = [environment.pop(each, "").lower() not in ("false", "0") for each in EVENT_VARIABLES]
    told += [options.pop(each, None) is not False for each in EVENT_OPTIONS]
    if mode == "kv" and not all(told):
        mode = WITHOUT_EVENTS
    if mode in ROUTING:
        router["options"] = {"policy": ROUTING[mode]}
    elif mode is None:
        made.remarks.append(f"{name}: no routing mode is given, which is round-robin there; ours is kv")
    else:
        made.remarks.append(f"{name}: routing mode {mode} has no policy of ours; the default kv stays")
    for key in sorted(environment):
        made.remarks.append(f"{name}: the variable {key} is not carried over")
    for key in sorted(options):
        ours = _in_our_words("router", name, {key: options[key]}, made)
        if CARRIED.issuperset(ours):
            router["options"] = {**router.get("options", {}), **ours}
        else:
            made.remarks.append(f"{name}: --{'no-' if options[key] is False else ''}{key} is not carried over")
    _remark_rest(component, unread, made)
    made.values["router"] = router


def _remark_rest(component: _Component, unread: list[str], made: Conversion) -> None:
    """Remark what is in any component's command and container and has no place in the chart."""
    name = component.name
    for word in unread:
        made.remarks.append(f"{name}: {word!r} in its arguments is not carried over")
    for command in component.other_commands():
        made.remarks.append(f"{name}: the command {command[:REMARK_CHARS_MAX]!r} of its script is not carried over")
    for variable in component.unknown_variables():
        made.remarks.append(f"{name}: the variable {variable}, whose value is not in the file, is not carried over")
    for key in sorted(set(component.container) - CONTAINER_KEYS):
        made.remarks.append(f"{name}: {key} of its container is not carried over")


def _worker(
    component: _Component, made: Conversion, engine_options: dict[str, Collection[str]], engine_file: ReadFile
) -> dict[str, Any] | None:
    name, words = component.name, component.words()
    program = next((word for word in words if word.startswith("dynamo.")), "")
    engine = ENGINES.get(program)
    if engine is None:
        if program in BESIDE:
            why = f"{BESIDE[program]} servers stay as they are, and workers run next to them: docs/engine_servers.md"
        else:
            why = f"its program {program or 'is not to be seen in its command'}; known are {', '.join(ENGINES)}"
        made.remarks.append(f"{name}: not carried over: {why}")
        return None
    given, unread = _options(words[words.index(program) + 1 :])
    options = given if engine != "trtllm" else _in_our_words("worker", name, given, made)
    engine_args = _engine_args(name, options, engine_file, made)
    mode = str(options.get("disaggregation-mode", component.raw.get("subComponentType") or "prefill_and_decode"))
    if mode not in ROLES:
        made.remarks.append(f"{name}: disaggregation mode {mode} is unknown; taken as aggregated")
    group: dict[str, Any] = {
        "name": _group_name(name),
        "role": ROLES.get(mode, "aggregated"),
        "engine": engine,
        "replicas": _number(component.raw.get("replicas", 1), component, "replicas"),
    }
    _model(component, options, made)
    kept = {key: value for key, value in options.items() if key in engine_options[engine] and key not in OWN_OPTIONS}
    if kept:
        group["options"] = kept
    if engine_args:
        group["engineArgs"] = engine_args
    for key in sorted(set(options) - set(kept) - OWN_OPTIONS):
        made.remarks.append(f"{name}: --{key} is no option of a worker with the engine {engine}")
    _remark_rest(component, unread, made)
    _resources(component, group)
    _further(component, group, made)
    return group


def _options(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of a command line by name, and the words that belong to none."""
    options: dict[str, Any] = {}
    unread: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--"):
            unread.append(word)
            continue
        key, equals, value = word[2:].partition("=")
        if equals:
            options[key] = value
        elif at < len(words) and not words[at].startswith("--"):
            options[key] = words[at]
            at += 1
        elif key.startswith("no-"):
            options[key.removeprefix("no-")] = False
        else:
            options[key] = True
    return options, unread


def _in_our_words(command: str, name: str, given: Mapping[str, Any], made: Conversion) -> dict[str, Any]:
    """Return options of Dynamo, old and newest, as ours; what is refused is remarked with the alternative."""
    ours: dict[str, Any] = {}
    for key, value in given.items():
        word = f"--no-{key}" if value is False else f"--{key}" if value is True else f"--{key}={value}"
        try:
            made_of_it = _options(in_our_words(command, [word, "--engine=trtllm"], {}))[0]
        except ValueError as error:
            made.remarks.append(f"{name}: {error}")
            continue
        if argument := made_of_it.pop(REPEATED, None):
            ours[REPEATED] = [*ours.get(REPEATED, []), argument]
        ours.update(made_of_it)
    ours.pop("engine", None)
    return ours


def _engine_args(name: str, options: dict[str, Any], engine_file: ReadFile, made: Conversion) -> dict[str, Any]:
    """Return the content of an engine file, whose path means nothing in our image."""
    path = str(options.get("extra-engine-args", ""))
    text = engine_file(path) if path else None
    try:
        content = None if text is None else yaml.safe_load(text)
    except yaml.YAMLError as error:
        made.remarks.append(f"{name}: {path} is no YAML: {error}")
        return {}
    if isinstance(content, dict):
        del options["extra-engine-args"]
        return content
    if path:
        made.remarks.append(
            f"{name}: engine file {path} is neither in the manifest's folder nor in a ConfigMap: set its content as "
            "engineArgs of the group, or make an image that has it"
        )
    return {}


def _model(component: _Component, options: dict[str, Any], made: Conversion) -> None:
    path = str(options.get("model-path", ""))
    model: dict[str, Any] = {"name": str(options.get("served-model-name", path)) or "tiny"}
    if path:
        model["path"] = path
    for mount in map(_dict, _list(component.raw.get("volumeMounts"))):
        place = str(mount.get("mountPoint", ""))
        if place and path.startswith(place.rstrip("/") + "/"):
            claim = {"persistentVolumeClaim": {"claimName": str(mount.get("name")), "readOnly": True}}
            model |= {"path": MODELS + path.removeprefix(place.rstrip("/")), "volume": claim}
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and "volume" not in model:
        model = {"name": model["name"], "cache": {"kind": "pvc", "source": path}}
    known = made.values.setdefault("model", model)
    if known["name"] != model["name"] or [known.get(key) for key in ("path", "cache")] != [
        model.get(key) for key in ("path", "cache")
    ]:
        others = f"others {known['name']}: a pool of the chart has one model"
        made.remarks.append(f"{component.name}: serves {model['name']}, {others}")


def _resources(component: _Component, group: dict[str, Any]) -> None:
    found = _dict(component.raw.get("resources")) or _dict(component.container.get("resources"))
    limits, requests = dict(_dict(found.get("limits"))), dict(_dict(found.get("requests")))
    for each in (requests, limits):
        for key in ("gpu", "nvidia.com/gpu"):
            if key in each:
                group["gpus"] = _number(each.pop(key), component, key)
    kept = {name: each for name, each in (("requests", requests), ("limits", limits)) if each}
    if kept:
        group["resources"] = kept
    shared = _dict(component.raw.get("sharedMemory")).get("size") or component.raw.get("sharedMemorySize")
    if shared:
        group["sharedMemory"] = str(shared)


def _further(component: _Component, group: dict[str, Any], made: Conversion) -> None:
    raw, name = component.raw, component.name
    nodes = _number(_dict(raw.get("multinode")).get("nodeCount", 1), component, "multinode.nodeCount")
    if nodes > 1 and group["engine"] != "trtllm":
        made.remarks.append(f"{name}: {nodes} nodes are not carried over: engines of TensorRT-LLM alone span nodes")
    elif nodes > 1:
        group["nodes"] = nodes
        made.values["security"] = {"sshSecret": SSH_SECRET}
        made.remarks.append(
            f"{name}: its {nodes} nodes start ranks on each other with the key of the secret {SSH_SECRET}, which you "
            "make: docs/kubernetes.md#engines-over-several-nodes"
        )
        if not group.get("gpus"):
            made.remarks.append(f"{name}: its GPUs are not to be seen: give gpus of each node")
    scaling = _dict(raw.get("autoscaling"))
    if scaling.get("enabled"):
        group["autoscaling"] = {
            "kind": "keda",
            "minReplicas": _number(scaling.get("minReplicas", 1), component, "autoscaling.minReplicas"),
            "maxReplicas": _number(scaling.get("maxReplicas", 8), component, "autoscaling.maxReplicas"),
        }
    pod = _pod(raw)
    for key in ("tolerations", "nodeSelector", "affinity"):
        if pod.get(key):
            group[key] = pod[key]
    environment = [{"name": key, "value": value} for key, value in component.environment().items()]
    if environment:
        group["env"] = environment
    if raw.get("envFromSecret") or component.container.get("envFrom"):
        made.remarks.append(f"{name}: variables out of a secret are not carried over")
    read = {"containers", "mainContainer", "tolerations", "nodeSelector", "affinity"}
    for key in sorted(set(pod) - read):
        made.remarks.append(f"{name}: {key} of its pod is not carried over")


def _number(value: object, component: _Component, field_name: str) -> int:
    if not str(value).isdecimal():
        raise GraphDeploymentError(f"{component.name}: {field_name} is {value!r}, must be a whole number")
    return int(str(value))


def _group_name(name: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")[:20].strip("-") or "workers"


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
