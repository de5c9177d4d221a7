"""Dynamo's graph deployments become values that the chart takes, and what is left out is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from click.testing import CliRunner

from poolgrid.kernel.pool_grids.grid import Grid, GridRequest
from poolgrid.kernel.pool_grids.request_hints import read_hints
from poolgrid.server.cli.graph_deployment import GraphDeploymentError, convert_graph
from poolgrid.server.cli.main import app
from poolgrid.server.global_router.document.reader import load_document
from tests.global_router.pool_selector import SELECTOR as POOL_SELECTOR
from tests.kubernetes.chart import CHART

TRTLLM = {"model-path", "served-model-name", "disaggregation-mode", "extra-engine-args", "kv-block-size"}

FIRST_FORM = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: graph}
spec:
  services:
    Frontend:
      componentType: frontend
      replicas: 3
      envs: [{name: DYN_ROUTER_MODE, value: round-robin}, {name: OTHER, value: x}]
    PrefillWorker:
      componentType: worker
      replicas: 2
      envFromSecret: token
      volumeMounts: [{name: weights, mountPoint: /cache}]
      resources: {limits: {gpu: "2"}, requests: {cpu: "4", gpu: "2"}}
      extraPodSpec:
        tolerations: [{key: gpu, operator: Exists}]
        volumes: []
        mainContainer:
          image: somebody/else:1
          command: [python3, -m, dynamo.trtllm]
          args: [--model-path, /cache/m, --served-model-name, m, --disaggregation-mode, prefill, --kv-block-size=64,
                 --their-own, "1", stray]
    decode:
      componentType: worker
      multinode: {nodeCount: 2}
      autoscaling: {enabled: true, minReplicas: 1, maxReplicas: 4}
      sharedMemory: {size: 8Gi}
      volumeMounts: [{name: weights, mountPoint: /cache}]
      extraPodSpec:
        mainContainer:
          command: [/bin/sh, -c]
          args: ["python3 -m dynamo.trtllm --model-path /cache/m --served-model-name m --disaggregation-mode decode"]
    Planner: {componentType: planner}
"""
SECOND_FORM = """
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: graph}
spec:
  components:
    - {name: Frontend, type: frontend, podTemplate: {spec: {containers: [{name: main, image: x}]}}}
    - name: agg
      type: worker
      replicas: 4
      podTemplate:
        spec:
          containers:
            - {name: sidecar, image: y}
            - name: main
              command: [python3, -m, dynamo.trtllm]
              args: [--model-path, Org/Model, --extra-engine-args, /conf/agg.yaml]
              resources: {limits: {nvidia.com/gpu: "1"}}
"""


def checked(values: dict[str, Any]) -> dict[str, Any]:
    """Return values that the chart's own schema takes."""
    jsonschema_rs.Draft7Validator(json.loads((CHART / "values.schema.json").read_text())).validate(values)
    return values


def test_roles_models_gpus_and_replicas_are_carried_over() -> None:
    made = convert_graph(FIRST_FORM, TRTLLM, ())

    assert checked(made.values) == {
        "security": {"sshSecret": "ranks"},
        "router": {"replicas": 3, "options": {"policy": "round-robin"}},
        "model": {
            "name": "m",
            "path": "/models/m",
            "volume": {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}},
        },
        "workers": [
            {
                "name": "prefill-worker",
                "role": "prefill",
                "engine": "trtllm",
                "replicas": 2,
                "options": {"kv-block-size": "64"},
                "gpus": 2,
                "resources": {"requests": {"cpu": "4"}},
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
            },
            {
                "name": "decode",
                "role": "decode",
                "engine": "trtllm",
                "replicas": 1,
                "nodes": 2,
                "sharedMemory": "8Gi",
                "autoscaling": {"kind": "keda", "minReplicas": 1, "maxReplicas": 4},
            },
        ],
    }
    assert [yaml.safe_load(each) for each in made.texts().values()] == [made.values]
    for named in (
        "OTHER",
        "--their-own",
        "'stray'",
        "out of a secret",
        "volumes",
        "its 2 nodes",
        "its GPUs are not",
        "planner",
    ):
        assert sum(named in remark for remark in made.remarks) == 1, named


def test_the_second_form_is_read_alike() -> None:
    made = convert_graph(SECOND_FORM, TRTLLM, ())

    assert checked(made.values)["workers"] == [
        {
            "name": "agg",
            "role": "aggregated",
            "engine": "trtllm",
            "replicas": 4,
            "options": {"extra-engine-args": "/conf/agg.yaml"},
            "gpus": 1,
        }
    ]
    assert made.values["model"] == {"name": "Org/Model", "cache": {"kind": "pvc", "source": "Org/Model"}}
    assert [remark for remark in made.remarks if "engine file /conf/agg.yaml" in remark]


ENGINE_FILE = {"max_batch_size": 8, "kv_cache_config": {"dtype": "fp8"}}
CONFIG_MAP = f"""
---
kind: ConfigMap
apiVersion: v1
metadata: {{name: engines}}
data:
  agg.yaml: '{json.dumps(ENGINE_FILE)}'
"""


@pytest.mark.parametrize("override", [None, {"max_batch_size": 9}])
@pytest.mark.parametrize("place", ["ConfigMap", "beside"])
def test_an_engine_file_is_carried_over_with_its_content(place: str, override: dict[str, Any] | None) -> None:
    text = SECOND_FORM + CONFIG_MAP if place == "ConfigMap" else SECOND_FORM
    if override is not None:
        text = text.replace("/conf/agg.yaml]", f"/conf/agg.yaml, --override-engine-args, '{json.dumps(override)}']")
    beside = {"/conf/agg.yaml": json.dumps(ENGINE_FILE)} if place == "beside" else {}

    made = convert_graph(text, {*TRTLLM, "override-engine-args"}, (), beside.get)

    (group,) = checked(made.values)["workers"]
    assert group["engineArgs"] == ENGINE_FILE
    assert group.get("options", {}) == ({} if override is None else {"override-engine-args": json.dumps(override)})
    assert not [remark for remark in made.remarks if "engine file" in remark]


def test_the_newest_options_become_ours_and_those_without_are_remarked() -> None:
    newest = "[--model, Org/Model, --disaggregation-mode, agg, --dyn-tool-call-parser, harmony, --store-kv, etcd]"
    made = convert_graph(re.sub(r"args: .*", f"args: {newest}", SECOND_FORM), {*TRTLLM, "tool-call-parser"}, ())

    assert made.values["model"]["cache"]["source"] == "Org/Model"
    group = made.values["workers"][0]
    assert (group["role"], group["options"]) == ("aggregated", {"tool-call-parser": "harmony"})
    assert [remark for remark in made.remarks if "--store-kv" in remark]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: DynamoGraphDeployment\nspec: {}", "neither services"),
        ("kind: Deployment", "no document of the kind"),
        ("kind: [", "is no YAML"),
        (SECOND_FORM.replace("dynamo.trtllm", "dynamo.vllm"), "vLLM servers stay as they are"),
        (SECOND_FORM.replace("replicas: 4", "replicas: many"), "agg: replicas is 'many', must be a whole number"),
        (SECOND_FORM.replace("dynamo.trtllm", "own.program"), "is not to be seen"),
    ],
)
def test_what_cannot_be_carried_over_at_all_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(GraphDeploymentError, match=said):
        convert_graph(text, TRTLLM, ())


def test_the_command_knows_the_form_by_itself_and_the_options_by_the_workers(tmp_path: Path) -> None:
    graph, out = tmp_path / "graph.yaml", tmp_path / "values.yaml"
    graph.write_text(FIRST_FORM)

    found = CliRunner().invoke(app, ["config", "convert", str(graph), "--out", str(out)])

    assert found.exit_code == 0, found.output
    assert checked(yaml.safe_load(out.read_text()))["workers"][0]["options"] == {"kv-block-size": "64"}
    assert "--their-own is no option" in found.stderr


def scripted(
    script: str, kind: str = "worker", frontend: str = "--router-mode kv", environment: str = "[]", container: str = ""
) -> Any:
    """Return the conversion of a worker that a shell starts."""
    indented = "\n".join(f"            {line}" for line in script.splitlines())
    return convert_graph(
        f"""
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {{name: graph}}
spec:
  services:
    Frontend:
      componentType: frontend
      extraPodSpec: {{mainContainer: {{command: [python3, -m, dynamo.frontend], args: {json.dumps(frontend.split())}}}}}
    Worker:
      componentType: {kind}
      extraPodSpec:
        mainContainer:
          env: {environment}
          {container}
          command: [/bin/bash, -c]
          args:
          - |
{indented}
""",
        TRTLLM,
        set(),
    )


@pytest.mark.parametrize(
    "script",
    [
        "python3 -m dynamo.trtllm \\\n  --model-path ${MODEL} \\\n  --kv-block-size $SIZE",
        'exec python3 -m dynamo.trtllm --model-path "$MODEL" --kv-block-size=${SIZE} 2>&1',
        "set -e\nexport A=1; python3 -m dynamo.trtllm --model-path $MODEL --kv-block-size $SIZE | tee log && echo done",
        "python3 -m dynamo.trtllm --model-path $(MODEL) --kv-block-size $(SIZE)",
    ],
)
@pytest.mark.parametrize("kind", ["worker", "main"])
def test_command_in_a_script_is_read_with_its_variables_and_continued_lines(script: str, kind: str) -> None:
    environment = '[{name: MODEL, value: /models/m}, {name: SIZE, value: "64"}]'
    made = scripted(script, kind, environment=environment)

    [group] = made.values["workers"]
    assert made.values["model"]["path"] == "/models/m"
    assert group["options"] == {"kv-block-size": "64"}
    assert "\\n" not in "".join(made.remarks)
    for command in ("set -e", "export A=1", "tee log", "echo done"):
        assert any(command in remark for remark in made.remarks) is (command in script)


def test_flag_before_a_continued_line_has_no_value() -> None:
    made = scripted("python3 -m dynamo.trtllm --model-path /m --kv-block-size \\\n  --served-model-name m")
    assert made.values["workers"][0]["options"] == {"kv-block-size": True}


def test_variables_from_fields_options_of_the_frontend_and_fields_of_the_container_are_named() -> None:
    made = scripted(
        "python3 -m dynamo.trtllm --model-path $MODEL",
        frontend="--router-mode kv --router-temperature 0.5 --http-port 9000 --no-router-track-blocks",
        environment="[{name: MODEL, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}]",
        container="workingDir: /workspace",
    )
    text = "\n".join(made.remarks)
    for word in ("--router-temperature", "--http-port", "--no-router-track-blocks", "variable MODEL", "workingDir"):
        assert word in text
    assert made.values["model"]["path"] == "$MODEL"


@pytest.mark.parametrize(
    ("frontend", "policy"),
    [
        ("--router-mode kv", "kv"),
        ("--router-mode=kv --no-kv-events", "approximate"),
        ("--no-kv-events --router-mode kv", "approximate"),
        ("--router-mode kv --no-router-kv-events", "approximate"),
        ("--router-mode round-robin --no-kv-events", "round-robin"),
        ("--router-mode least-loaded", "least-loaded"),
        ("--router-mode round-robin", "round-robin"),
    ],
)
def test_routing_mode_becomes_the_policy_that_it_is(frontend: str, policy: str) -> None:
    made = scripted("python3 -m dynamo.trtllm --model-path /m", frontend=frontend)
    assert made.values["router"]["options"] == {"policy": policy}
    assert not [remark for remark in made.remarks if "Frontend" in remark]


@pytest.mark.parametrize(
    ("variables", "policy"),
    [
        ({"DYN_ROUTER_MODE": "least-loaded"}, "least-loaded"),
        ({"DYN_ROUTER_MODE": "kv", "DYN_ROUTER_USE_KV_EVENTS": "false"}, "approximate"),
        ({"DYN_ROUTER_MODE": "kv", "DYN_ROUTER_USE_KV_EVENTS": "true"}, "kv"),
    ],
)
def test_variables_of_the_frontend_choose_the_policy(variables: dict[str, str], policy: str) -> None:
    listed = ", ".join(f'{{name: {name}, value: "{value}"}}' for name, value in variables.items())
    made = convert_graph(re.sub(r"envs: .*", f"envs: [{listed}]", FIRST_FORM), TRTLLM, ())
    assert made.values["router"]["options"] == {"policy": policy}
    assert not [remark for remark in made.remarks if "Frontend" in remark]


def test_options_of_the_frontend_are_carried_over_or_answered_with_ours() -> None:
    made = scripted(
        "python3 -m dynamo.trtllm --model-path /m",
        frontend="--router-mode kv --migration-limit 3 --router-kv-overlap-score-credit 0.5 --router-replica-sync",
    )
    assert made.values["router"]["options"] == {"policy": "kv", "migration-limit": "3"}
    assert [each for each in made.remarks if "Frontend" in each] == [
        "Frontend: --router-kv-overlap-score-credit: Costs are milliseconds, which have no weights."
    ]


@pytest.mark.parametrize(
    ("frontend", "said"),
    [("", "no routing mode is given, which is round-robin there"), ("--router-mode direct", "routing mode direct")],
)
def test_routing_that_changes_is_remarked(frontend: str, said: str) -> None:
    made = scripted("python3 -m dynamo.trtllm --model-path /m", frontend=frontend)
    assert "options" not in made.values["router"]
    assert [remark for remark in made.remarks if said in remark]


SELECTOR: dict[str, Any] = {
    **POOL_SELECTOR,
    "priorityOverrides": [{"minPriority": 10, "maxPriority": 20, "targetPool": 2}],
}


def behind_a_picker(selector: dict[str, Any], programs: dict[str, str], config_map: bool = False) -> str:
    """Return a graph with an endpoint picker and a worker in each pool."""
    config = {"plugins": [{"type": "max-score-picker"}, {"type": "pool-selector", "parameters": selector}]}
    services: dict[str, Any] = {
        "Epp": {
            "componentType": "epp",
            "eppConfig": {"configMapRef": {"name": "picker", "key": "epp.yaml"}} if config_map else {"config": config},
        }
    }
    for pool, program in programs.items():
        main = {"command": ["python3", "-m", program], "args": ["--model-path", "/m", "--tensor-parallel-size", "2"]}
        services[f"Worker{pool}"] = {
            "componentType": "worker",
            "subComponentType": "decode",
            "extraPodMetadata": {"labels": {"example.com/pool": pool}},
            "extraPodSpec": {"mainContainer": main},
        }
    documents: list[dict[str, Any]] = [{"kind": "DynamoGraphDeployment", "spec": {"services": services}}]
    if config_map:
        documents.append({"kind": "ConfigMap", "data": {"epp.yaml": yaml.safe_dump(config)}})
    return yaml.safe_dump_all(documents)


@pytest.mark.parametrize("config_map", [False, True])
def test_grid_of_the_gateway_becomes_a_global_router_and_a_release_for_each_pool(config_map: bool) -> None:
    programs = dict.fromkeys(("tp1", "tp2"), "dynamo.trtllm") | {"tp4": "dynamo.vllm"}

    made = convert_graph(behind_a_picker(SELECTOR, programs, config_map), {"tensor-parallel-size"}, ())

    checked(made.values)
    document = load_document(json.dumps(made.values["globalRouter"]["document"])).document
    assert made.values["pool"] == {"enabled": False}
    assert document.aggregated is not None
    assert [pool.url for pool in document.aggregated.pools] == [f"http://tp{n}-router:8000" for n in (1, 2, 4)]
    grid = Grid(document)
    for row, cells in enumerate(SELECTOR["mapping"]):
        for column, pool in enumerate(cells):
            hints = read_hints({"router": {"ttft_target": column * 100 + 50}})
            asked = GridRequest(row * 1000 + 500, hints)
            assert grid.select("aggregated", asked).pool == SELECTOR["poolLabels"][pool]
    high = GridRequest(500, read_hints({"agent_hints": {"priority": 15}}))
    assert grid.select("aggregated", high).pool == "tp4"
    assert set(made.pools) == {"tp1", "tp2"}
    for values in made.pools.values():
        [group] = checked(values)["workers"]
        assert (group["role"], group["options"]) == ("aggregated", {"tensor-parallel-size": "2"})
    assert [remark for remark in made.remarks if "pool tp4" in remark]
    assert not [remark for remark in made.remarks if "epp" in remark]


def test_releases_of_a_gateways_graph_are_written_next_to_each_other(tmp_path: Path) -> None:
    graph, out = tmp_path / "graph.yaml", tmp_path / "values.yaml"
    graph.write_text(behind_a_picker(SELECTOR, dict.fromkeys(("tp1", "tp2", "tp4"), "dynamo.trtllm")))

    found = CliRunner().invoke(app, ["config", "convert", str(graph), "--out", str(out)])

    assert found.exit_code == 0, found.output
    assert {each.name for each in tmp_path.iterdir()} == {
        "graph.yaml",
        "values.yaml",
        *(f"values.tp{n}.yaml" for n in (1, 2, 4)),
    }


def test_faulty_grid_of_a_gateway_is_refused_with_the_place() -> None:
    faulty = behind_a_picker({**SELECTOR, "mapping": [[9, 0, 0], [2, 1, 0], [2, 2, 1]]}, {"tp1": "dynamo.trtllm"})
    with pytest.raises(
        GraphDeploymentError, match=r"pool-selector: \$\.mapping\[0\]\[0\].*: is 9, pools of this stage"
    ):
        convert_graph(faulty, TRTLLM, ())
