"""The manifests that are rendered from the chart say what poolgrid really does: options, probes, times, metrics.

``make kubernetes`` renders them anew and holds them against Kubernetes' own schemas.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from poolgrid.plugins.kubernetes.slices import decode_slices, seen_in
from poolgrid.plugins.trtllm.arguments.engine_arguments import Layer, resolve
from poolgrid.plugins.trtllm.settings import TrtllmSettings
from poolgrid.server.cli.main import app
from poolgrid.server.discovery.registry import Registry
from poolgrid.server.frontend.access.gate import OPEN_PATHS
from poolgrid.server.global_router.document.reader import load_document
from poolgrid.server.workers.adapters.http_api import HttpApi
from poolgrid.server.workers.engines.registry import engine_definition
from tests.discovery.slices import endpoint, endpoint_slice
from tests.exported_metrics import exported
from tests.kubernetes.chart import CHART, DIGEST_LINE, EXAMPLES, MANIFESTS, ROOT, digest

Resource = dict[str, Any]
EXAMPLE_IDS = [path.stem for path in EXAMPLES]
HAND_OVER_S = 5
"""What a worker needs beyond its drain, at most."""


@cache
def resources(name: str) -> tuple[Resource, ...]:
    """Return what a file of manifests has, in order."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(yaml.load_all((MANIFESTS / f"{name}.yaml").read_text(), loader))


def of_kind(name: str, *kinds: str) -> Iterator[Resource]:
    return (each for each in resources(name) if each["kind"] in kinds)


SPANNING = "LeaderWorkerSet"


def template_of(workload: Resource) -> Resource:
    """Return the template of a workload's pods; of an engine that spans nodes, that of its first pod."""
    spec: Resource = workload["spec"]
    template: Resource = spec.get("leaderWorkerTemplate", {}).get("leaderTemplate") or spec["template"]
    return template


def pods() -> list[tuple[str, Resource]]:
    """Return the template of each kind of pod, with a name for it."""
    return [
        (f"{path.stem}/{each['metadata']['name']}", template_of(each))
        for path in EXAMPLES
        for each in of_kind(path.stem, "Deployment", "StatefulSet", SPANNING)
    ]


every_pod = pytest.mark.parametrize("pod", [pod for _, pod in pods()], ids=[name for name, _ in pods()])
every_example = pytest.mark.parametrize("name", EXAMPLE_IDS)


def container_of(pod: Resource) -> Resource:
    (container,) = pod["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def option(container: Resource, name: str) -> str:
    (value,) = [each.partition("=")[2] for each in container["args"] if each.startswith(f"--{name}=")]
    return str(value)


def serving_endpoints(container: Resource) -> list[str]:
    return [each for each in container.get("args", ()) if each.startswith("--serving-endpoint=")]


def role_of(container: Resource) -> str:
    """Return a worker's role, which TensorRT-LLM's workers are told in its words."""
    if "--engine=trtllm" not in container["args"]:
        return option(container, "role")
    mode = option(container, "disaggregation-mode")
    return "aggregated" if mode == "prefill_and_decode" else mode


def selected(labels: Resource, wanted: Resource) -> bool:
    return wanted.items() <= labels.items()


@pytest.mark.parametrize("example", EXAMPLES, ids=EXAMPLE_IDS)
def test_the_manifests_are_those_of_the_chart(example: Path) -> None:
    head = (MANIFESTS / example.name).read_text().splitlines()[1]

    assert head == f"{DIGEST_LINE}{digest(example)}.", "run: make kubernetes WRITE=--write"


def test_the_values_that_the_quickstart_prints_are_taken_by_the_chart() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    printed = re.search(r"<!-- values of the chart -->\n```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert printed is not None
    values = yaml.safe_load(printed[1])
    schema = json.loads((ROOT / "deploy" / "kubernetes" / "poolgrid" / "values.schema.json").read_text())

    jsonschema_rs.validate(schema, values)
    options = {str(name) for parameter in app.commands["worker"].params for name in parameter.opts}
    for group in values["workers"]:
        assert engine_definition(group["engine"]).server_kind is not None
        assert {f"--{name}" for name in group["options"]} <= options


@every_pod
def test_a_container_starts_a_command_that_takes_its_arguments(pod: Resource) -> None:
    container = container_of(pod)
    name, *arguments = [
        each.replace("$(POD_IP)", "10.0.0.1").replace("$(POD_NAME)", "pod-0")
        for each in container["args"]
        if each != "poolgrid"  # of an engine that spans nodes, whose script starts it
    ]

    context = app.commands[name].make_context(name, arguments)  # raises when an option or a value is wrong

    if name == "worker":
        # The command has the options of all engines; each takes its own only.
        given = {
            each: value
            for each, value in context.params.items()
            if (source := context.get_parameter_source(each)) is not None and source.name == "COMMANDLINE"
        }
        settings = engine_definition(given.pop("engine")).settings
        of_command = {"log_level", "log_format"}
        settings.model_validate({each: value for each, value in given.items() if each not in of_command})
    assert not [each for each in container["env"] if each["name"].startswith("POOLGRID_")]
    assert pod["spec"]["enableServiceLinks"] is False, "a service called poolgrid would be read as options"


@every_pod
def test_a_pod_has_no_rights_and_only_what_it_writes_to(pod: Resource) -> None:
    spec, container = pod["spec"], container_of(pod)
    reads_names = "--names=kubernetes" in container["args"]

    assert spec["automountServiceAccountToken"] is reads_names
    assert ("serviceAccountName" in spec) is reads_names
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"]
    volumes = {each["name"] for each in spec["volumes"]}
    claimed = {"journal"} if "--data-dir=/data" in container["args"] else set()
    assert {each["name"] for each in container["volumeMounts"]} == volumes | claimed


@every_pod
def test_probes_ask_for_paths_that_are_answered_without_a_key(pod: Resource) -> None:
    container = container_of(pod)
    known = set(HttpApi.paths) if container["name"] in ("worker", "consolidator") else OPEN_PATHS
    ports = {each["name"] for each in container["ports"]}
    paths = {}
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[kind]["httpGet"]
        paths[kind] = asked["path"]
        assert asked["path"].partition("?")[0] in known
        assert asked["port"] in ports
        assert (asked["scheme"] == "HTTPS") is any(each.startswith("--tls-key") for each in container["args"])

    for kind in ("startupProbe", "livenessProbe"):
        # Whether it is ready depends on others, on a disk or on NATS: a restart mends none of them.
        assert not paths[kind].startswith("/ready")
    if container["name"] == "worker":
        assert paths["startupProbe"] == "/started"
        assert paths["readinessProbe"] == f"/ready?role={role_of(container)}"
        loading_s = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
        assert loading_s >= 1800, "a large model takes minutes to load"


@every_pod
def test_a_pod_is_given_the_time_that_its_end_takes(pod: Resource) -> None:
    container = container_of(pod)
    grace_s = pod["spec"]["terminationGracePeriodSeconds"]
    before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])

    if container["name"] == "worker":
        program, name, *arguments = before
        given = app.commands[name].make_context(name, arguments).params
        assert (program, name) == ("poolgrid", "drain")
        assert given["worker_url"].endswith(f"://127.0.0.1:{option(container, 'http-port')}")
        drain_s = int(option(container, "shutdown-timeout-ms")) / 1000
        assert given["timeout_s"] == drain_s
        assert grace_s >= given["wait_s"] + HAND_OVER_S, "the hook, and a second look at SIGTERM"
    elif container["name"] != "consolidator":
        assert before[0] == "sleep"
        assert grace_s >= int(before[1]) + int(option(container, "shutdown-timeout-ms")) / 1000 + HAND_OVER_S


@every_example
def test_everything_that_selects_pods_finds_some_and_ports_have_names_there(name: str) -> None:
    templates = [template_of(each) for each in of_kind(name, "Deployment", "StatefulSet", SPANNING)]
    nodes = [each["spec"]["leaderWorkerTemplate"]["workerTemplate"] for each in of_kind(name, SPANNING)]
    templates += nodes

    def found(wanted: Resource) -> list[Resource]:
        return [each for each in templates if selected(each["metadata"]["labels"], wanted)]

    for service in of_kind(name, "Service"):
        behind = found(service["spec"]["selector"])
        assert behind, service["metadata"]["name"]
        names = {port["name"] for pod in behind for port in container_of(pod)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    for each in of_kind(name, "PodDisruptionBudget"):
        assert len(found(each["spec"]["selector"]["matchLabels"])) == 1
    for workload in of_kind(name, "Deployment", "StatefulSet"):
        assert len(found(workload["spec"]["selector"]["matchLabels"])) == 1, "no other's pods are taken for its own"
    for policy in of_kind(name, "NetworkPolicy"):
        behind = found(policy["spec"]["podSelector"]["matchLabels"])
        open_ports: set[str | int] = {port["name"] for pod in behind for port in container_of(pod)["ports"]}
        # An engine's own server is no part of ours: its port is a number.
        open_ports |= {int(each.rpartition(":")[2]) for pod in behind for each in serving_endpoints(container_of(pod))}
        assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])} <= open_ports
    for scaled in of_kind(name, "ScaledObject"):
        assert scaled["spec"]["scaleTargetRef"]["name"] in {
            each["metadata"]["name"] for each in of_kind(name, "Deployment")
        }


def test_an_engine_over_several_nodes_is_one_worker_with_the_same_files_on_each_node() -> None:
    sets = list(of_kind("spanning", SPANNING))
    configs = {each["metadata"]["name"]: each["data"] for each in of_kind("spanning", "ConfigMap")}
    assert [each["spec"]["leaderWorkerTemplate"]["size"] for each in sets] == [2, 2]
    for each in sets:
        group = each["spec"]["leaderWorkerTemplate"]
        first, other = template_of(each)["spec"], group["workerTemplate"]["spec"]
        assert group["restartPolicy"] == "RecreateGroupOnPodRestart", "no rank can come back to its engine"
        worker, node = container_of(template_of(each)), container_of(group["workerTemplate"])
        assert worker["command"] == node["command"] == ["/bin/bash", "/etc/poolgrid/engine/node.sh", "8", "60"]
        assert "args" not in node
        assert first["volumes"] == other["volumes"]
        assert worker["volumeMounts"] == node["volumeMounts"]
        assert worker["resources"]["limits"] == node["resources"]["limits"] == {"nvidia.com/gpu": 8}
        files = configs[f"{each['metadata']['name']}-engine"]
        for name in ("node.sh", "rank.sh"):
            assert files[name].strip() == (CHART / "files" / name).read_text().strip()
        options = [given for given in worker["args"] if " " in given]
        assert not options, "the launcher divides its words at spaces"
        settings = TrtllmSettings.model_validate({"model_path": "m", "disaggregation_mode": role_of(worker)})
        arguments = resolve(settings, Layer("engine.yaml", yaml.safe_load(files["engine.yaml"])))
        assert arguments.values["tensor_parallel_size"] == group["size"] * 8
        policies = {
            each["metadata"]["name"]: each["spec"]["podSelector"]["matchLabels"]
            for each in of_kind("spanning", "NetworkPolicy")
        }
        labels = group["workerTemplate"]["metadata"]["labels"]
        assert [name for name, wanted in policies.items() if selected(labels, wanted)] == ["spanning-worker-node"]


STAND_INS = {
    "ssh-keygen": "echo ssh-ed25519 KEY",
    "sshd": 'echo sshd "$@"',
    "ssh": 'echo "$3" >>"$KEYS/asked"; [ -e "$KEYS/up" ] || { touch "$KEYS/up"; exit 255; }',
    "mpirun": 'echo mpirun "$@"',
    "sleep": "exit 0",
    "hostname": "echo decode-0",
}


@pytest.mark.parametrize("index", [0, 2])
def test_nodes_of_an_engine_start_ranks_on_each_other(tmp_path: Path, index: int) -> None:
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    secret = tmp_path / "secret"
    secret.write_text("SECRET")
    keys = tmp_path / "keys"
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "KEYS": str(keys),
        "SSH_SECRET": str(secret),
        "LWS_WORKER_INDEX": str(index),
        "LWS_GROUP_SIZE": "3",
        "LWS_LEADER_ADDRESS": "decode-0.decode.llm",
        "A": "b c",
    }
    command = [str(CHART / "files" / "node.sh"), "8", "60", "poolgrid", "worker", "--engine=trtllm"]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=20, check=True)

    program, *words = done.stdout.split()
    assert (keys / "key").stat().st_mode & 0o777 == 0o600
    assert (keys / "authorized").read_text() == "ssh-ed25519 KEY\n"
    if index:
        assert (program, words[words.index("-p") + 1], words[words.index("-h") + 1]) == ("sshd", "2222", f"{keys}/key")
        return
    assert (keys / "known").read_text() == "* ssh-ed25519 KEY\n", "a node is who has the key"
    assert (keys / "asked").read_text().split() == [f"decode-0-{at}.decode.llm" for at in (1, 1, 2)], "until it serves"
    assert program == "mpirun"
    assert words[words.index("-np") + 1] == "24"
    assert words[words.index("orte_keep_fqdn_hostnames") + 1] == "1", "Open MPI cuts names otherwise"
    assert words[words.index("--host") + 1] == "decode-0:8,decode-0-1.decode.llm:8,decode-0-2.decode.llm:8"
    handed_on = {words[at + 1] for at, word in enumerate(words) if word == "-x"}
    assert {"A", "PATH"} <= handed_on
    assert not {name for name in handed_on if name.startswith("LWS_") or name == "HOSTNAME"}
    assert words[-4:] == [str(CHART / "files" / "rank.sh"), "poolgrid", "worker", "--engine=trtllm"]


def test_endpoints_in_arguments_are_services_and_ports_of_the_chart() -> None:
    for name in EXAMPLE_IDS:
        ports = {
            (each["metadata"]["name"], port["port"])
            for each in of_kind(name, "Service")
            for port in each["spec"]["ports"]
        }
        for workload in of_kind(name, "Deployment"):
            for argument in container_of(workload["spec"]["template"])["args"]:
                found = re.search(r"=tcp://([\w.-]+):(\d+)$", argument)
                assert found is None or (found[1], int(found[2])) in ports, argument


def test_gpus_are_limits_and_a_scaled_group_has_no_number_of_its_own() -> None:
    groups = {each["metadata"]["name"]: each for each in of_kind("disaggregated", "Deployment")}
    gpus = {
        name: container_of(each["spec"]["template"])["resources"].get("limits", {}).get("nvidia.com/gpu")
        for name, each in groups.items()
    }
    assert gpus == {"disaggregated-decode": 4, "disaggregated-prefill": 2, "disaggregated-router": None}
    (scaled,) = [
        each for each in of_kind("aggregated", "Deployment") if each["metadata"]["name"] == "aggregated-aggregated"
    ]
    assert "replicas" not in scaled["spec"]


def test_it_scales_by_metrics_and_rules_that_exist() -> None:
    known = {each.name for each in exported()}
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules/recording.yml").read_text())
    known |= {rule["record"] for group in rules["groups"] for rule in group["rules"]}
    (scaled,) = of_kind("aggregated", "ScaledObject")
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]

    assert len(queries) == 2
    for query in queries:
        assert set(re.findall(r"\bpoolgrid[:_][\w:]+", query)) <= known
        assert 'namespace="llm"' in query


def test_prometheus_rules_are_those_of_deploy_prometheus() -> None:
    found = {
        each["metadata"]["name"].rpartition("-")[2]: each["spec"] for each in of_kind("aggregated", "PrometheusRule")
    }

    for name in ("alerts", "recording"):
        assert found[name] == yaml.safe_load((ROOT / f"deploy/prometheus/rules/{name}.yml").read_text())


def test_the_document_of_the_global_router_is_sound_and_names_services_of_pools() -> None:
    (config,) = of_kind("global", "ConfigMap")

    loaded = load_document(config["data"]["pools.json"])

    assert not loaded.warnings
    urls = {pool.url for stage in loaded.document.stages.values() for pool in stage.pools}
    assert urls == {"http://short-router:8000", "http://long-router:8000"}


def test_who_reads_names_of_the_cluster_may_list_slices_where_it_looks_and_nothing_else() -> None:
    name = "named"
    (account,) = of_kind(name, "ServiceAccount")
    roles = {each["metadata"]["namespace"]: each for each in of_kind(name, "Role")}
    bindings = {each["metadata"]["namespace"]: each for each in of_kind(name, "RoleBinding")}
    readers = [
        each["spec"]["template"]["spec"]
        for each in of_kind(name, "Deployment")
        if each["spec"]["template"]["spec"].get("serviceAccountName") == account["metadata"]["name"]
    ]

    assert sorted(spec["containers"][0]["name"] for spec in readers) == ["global-router", "router"]
    looked_at = {
        each.partition("=")[2]
        for spec in readers
        for each in spec["containers"][0]["args"]
        if each.startswith("--kubernetes-namespace=")
    }
    assert set(roles) == set(bindings) == looked_at == {"llm", "other"}
    for role in roles.values():
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]}
        ]
    for binding in bindings.values():
        assert binding["roleRef"]["name"] == roles["llm"]["metadata"]["name"]
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "llm"}
        ]


def test_the_cluster_says_of_each_part_what_it_would_register_itself() -> None:
    name, said = "named", {}
    for service in of_kind(name, "Service"):
        labels = service["metadata"]["labels"]
        if "poolgrid/component" not in labels:
            continue
        (pod,) = [
            container_of(each["spec"]["template"])
            for each in of_kind(name, "Deployment", "StatefulSet")
            if selected(each["spec"]["template"]["metadata"]["labels"], service["spec"]["selector"])
        ]
        containers = {port["name"]: port["containerPort"] for port in pod["ports"]}
        ports = [
            {"name": each["name"], "port": containers[each["targetPort"]], "appProtocol": each.get("appProtocol")}
            for each in service["spec"]["ports"]
        ]
        row = endpoint_slice(f"{service['metadata']['name']}-x7k2p", [endpoint(1)], ports=ports)
        row["metadata"]["labels"] |= labels
        page = decode_slices(json.dumps({"metadata": {}, "items": [row]}).encode())
        registry = Registry()
        registry.look(seen_in(page.items or (), 1), 0)
        (found,) = registry.instances()
        said[found.namespace, found.component] = found.endpoints

    assert said == {
        ("blue", "router"): {"http": "https://10.1.0.1:8000", "select": "tcp://10.1.0.1:8001"},
        ("blue", "consolidator"): {
            "http": "https://10.1.0.1:5560",
            "ingest": "tcp://10.1.0.1:5557",
            "feed": "tcp://10.1.0.1:5558",
            "query": "tcp://10.1.0.1:5559",
        },
        ("blue", "worker"): {"http": "https://10.1.0.1:9000", "generate": "tcp://10.1.0.1:9001"},
        ("blue", "global-router"): {"http": "https://10.1.0.1:8000"},
    }
    (config,) = of_kind(name, "ConfigMap")
    document = load_document(config["data"]["pools.json"]).document
    assert [(pool.name, pool.url) for stage in document.stages.values() for pool in stage.pools] == [("blue", None)]


def test_a_pool_on_nats_has_two_consolidators_no_volume_and_no_addresses_of_its_own() -> None:
    name = "nats"
    deployments = {container_of(each["spec"]["template"])["name"]: each for each in of_kind(name, "Deployment")}

    assert deployments["consolidator"]["spec"]["replicas"] == 2
    assert not list(of_kind(name, "StatefulSet"))
    for each in deployments.values():
        arguments = container_of(each["spec"]["template"])["args"]
        assert not [given for given in arguments if "tcp://" in given or given.startswith("--data-dir")]
        assert "--event-plane=nats" in arguments
        assert len([given for given in arguments if given.startswith("--nats-url=tls://")]) == 3
        mounted = {mount["mountPath"] for mount in container_of(each["spec"]["template"])["volumeMounts"]}
        for option_name in ("nats-credentials", "nats-tls-ca"):
            assert option(container_of(each["spec"]["template"]), option_name).rpartition("/")[0] in mounted


def test_an_inference_pool_has_the_engines_and_asks_the_router() -> None:
    (pool,) = of_kind("gateway", "InferencePool")
    (router,) = (each for each in of_kind("gateway", "Service") if each["metadata"]["name"].endswith("-router"))
    templates = [each["spec"]["template"] for each in of_kind("gateway", "Deployment")]
    asked = pool["spec"]["endpointPickerRef"]
    assert asked["name"] == router["metadata"]["name"]
    (port,) = [each for each in router["spec"]["ports"] if each["port"] == asked["port"]["number"]]
    (template,) = [each for each in templates if selected(each["metadata"]["labels"], router["spec"]["selector"])]
    (container_port,) = [each for each in container_of(template)["ports"] if each["name"] == port["targetPort"]]
    assert option(container_of(template), "ext-proc-port") == str(container_port["containerPort"])

    (engines,) = [
        each for each in templates if selected(each["metadata"]["labels"], pool["spec"]["selector"]["matchLabels"])
    ]
    served = option(container_of(engines), "serving-endpoint").rpartition(":")[2]
    assert [each["number"] for each in pool["spec"]["targetPorts"]] == [int(served)]
    assert option(container_of(engines), "engine-port") == served


def test_a_model_is_fetched_onto_a_volume_that_pods_read_and_before_they_do() -> None:
    name = "disaggregated"
    (claim,) = [each for each in of_kind(name, "PersistentVolumeClaim") if each["metadata"]["name"].endswith("-models")]
    (job,) = of_kind(name, "Job")
    prefetch = container_of(job["spec"]["template"])
    program, fetch = prefetch["command"]
    known = subprocess.run(
        [Path(sys.executable).with_name(program), fetch, "--help"], capture_output=True, check=True, text=True
    ).stdout
    _, *options = prefetch["args"]
    given = dict(each.split("=", 1) for each in options)
    assert all(name in known for name in given), "as the installed huggingface_hub has them"
    fetched = given["--local-dir"]
    readers = [each["spec"]["template"]["spec"] for each in of_kind(name, "Deployment")]
    assert len(readers) == 3, "routers and two groups of workers"
    for spec in readers:
        (waiting,) = spec["initContainers"]
        assert waiting == prefetch, "it fetches too, or waits: a Job may come late"
        (volume,) = [each for each in spec["volumes"] if each["name"] == "models"]
        assert volume["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
        (container,) = spec["containers"]
        assert option(container, "model-path") == fetched
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in container["volumeMounts"]
