"""Hold the Helm chart against Kubernetes, and write or check the plain manifests that are rendered from it.

    python -m tests.kubernetes             check: chart, values that must be refused, schemas, committed manifests
    python -m tests.kubernetes --write     write the manifests in deploy/kubernetes/manifests too

The chart is rendered by Helm's own library in an environment of its own (``.venv-kubernetes``, 360 MB), which is made
from ``requirements.txt`` beside this file when it is missing or that file has changed. No cluster is asked.
The exit status is 0 when all is well, 1 when something is not, 2 when it could not be run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.discovery import slices
from tests.kubernetes.chart import CHART, EXAMPLES, MANIFESTS, NAMESPACE, ROOT, manifest_text

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
ENVIRONMENT = Path(os.environ.get("POOLGRID_KUBERNETES", ROOT / ".venv-kubernetes"))
MADE_FROM = ENVIRONMENT / "requirements.txt"
VERSIONS = ["1.31", "1.34", "1.37"]
"""Of Kubernetes: the newest that there are schemas of, and two of those that clusters are kept at for long."""

TIMEOUT_S = 300

Values = dict[str, Any]

ALL_ON: Values = {
    "bindAddress": "::",
    "image": {"pullSecrets": [{"name": "registry"}]},
    "model": {"name": "m", "path": "/models/m", "volume": {"hostPath": {"path": "/srv/models"}}},
    "router": {
        "options": {"max-queue-requests": 4194304, "fleet-page": False, "access-log": True},
        "env": [{"name": "A", "value": "b"}],
        "podAnnotations": {"a": "b"},
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "nodeSelector": {"a": "b"},
    },
    "consolidator": {"storage": {"className": "fast"}, "env": [{"name": "A", "value": "b"}]},
    "workers": [
        {"name": "a", "engine": "trtllm", "gpus": 8, "sharedMemory": "64Gi", "runtimeClassName": "nvidia"},
        {
            "name": "b",
            "engine": "vllm",
            "image": {"repository": "own"},
            "options": {"engine-url": "http://127.0.0.1:1"},
        },
        {"name": "c", "autoscaling": {"kind": "hpa"}, "maxUnavailable": 1, "maxSurge": "25%"},
        {"name": "d", "role": "encode", "autoscaling": {"kind": "keda", "backlogOfGlobalRouter": True}},
    ],
    "globalRouter": {"enabled": True, "document": {"version": 1}, "poolApiKeySecret": "pool-key"},
    "gateway": {"enabled": True, "selector": {"app": "vllm"}, "targetPorts": [8000, 8001], "failureMode": "FailOpen"},
    "security": {"tlsSecret": "tls", "curveSecret": "curve", "apiKeysSecret": "keys"},
    "networkPolicy": {"clients": [{"podSelector": {}}], "monitoring": [{"podSelector": {}}]},
    "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
}
VARIATIONS: dict[str, Values] = {
    "engine-arguments-and-scaled-spanning": {
        "model": {"path": "/models/m"},
        "security": {"sshSecret": "ranks"},
        "workers": [
            {"name": "a", "engine": "trtllm", "engineArgs": {"max_batch_size": 8}, "podAnnotations": {"a": "b"}},
            {"name": "b", "engine": "trtllm", "gpus": 8, "nodes": 4, "autoscaling": {"kind": "hpa"}},
        ],
    },
    "model-fetched": {
        "model": {
            "cache": {
                "kind": "pvc",
                "source": "org/model",
                "exclude": ["original/*"],
                "hubEndpoint": "https://hub.example",
                "className": "shared",
                "nodeSelector": {"a": "b"},
                "tolerations": [{"operator": "Exists"}],
            }
        },
        "globalRouter": {"enabled": True, "document": {"version": 1}},
    },
    "model-of-fluid": {"model": {"path": "/models/m", "cache": {"kind": "fluid", "source": "s3://bucket/models"}}},
    "all-on": ALL_ON,
    "nothing-kept": {"consolidator": {"storage": {"enabled": False}}, "networkPolicy": {"enabled": False}},
    "one-router": {"router": {"replicas": 1}},
    "named-by-nats": {
        "names": {"kind": "nats", "namespace": "blue"},
        "nats": {"urls": ["nats://n:4222"], "replicas": 1},
        "globalRouter": {"enabled": True, "document": {"version": 1}},
    },
    "journal-on-nats-named-by-the-cluster": {
        "eventPlane": "nats",
        "names": {"kind": "kubernetes"},
        "nats": {"urls": ["nats://n:4222"], "consolidators": 1},
        "workers": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}],
    },
}
REFUSED: dict[str, tuple[Values, str]] = {
    "no-document": ({"pool": {"enabled": False}, "globalRouter": {"enabled": True}}, "document is empty"),
    "no-model": ({"workers": [{"name": "a", "engine": "trtllm"}]}, "workers a have the engine trtllm: give model.path"),
    "two-volumes": (
        {"model": {"volume": {"emptyDir": {}}, "cache": {"kind": "pvc", "source": "org/m"}}},
        "leave model.volume empty",
    ),
    "nothing-to-fetch": ({"model": {"cache": {"kind": "pvc"}}}, "give model.cache.source"),
    "fluid-without-path": (
        {"model": {"cache": {"kind": "fluid", "source": "s3://b"}}},
        "model.path, the directory in it",
    ),
    "unknown-cache": ({"model": {"cache": {"kind": "nfs"}}}, "kind"),
    "unknown-key": ({"router": {"replica": 2}}, "replica"),
    "spanning-without-a-key": (
        {"model": {"path": "/m"}, "workers": [{"name": "a", "engine": "trtllm", "gpus": 8, "nodes": 2}]},
        "workers a span nodes: that needs the engine trtllm, gpus of each node, and security.sshSecret",
    ),
    "spanning-of-another-engine": (
        {"security": {"sshSecret": "s"}, "workers": [{"name": "a", "gpus": 8, "nodes": 2}]},
        "workers a span nodes",
    ),
    "unknown-role": ({"workers": [{"name": "a", "role": "both"}]}, "role"),
    "no-group": ({"workers": []}, "workers"),
    "group-without-name": ({"workers": [{"role": "prefill"}]}, "name"),
    "group-called-as-a-part": ({"workers": [{"name": "router"}]}, "name"),
    "negative": ({"workerDefaults": {"gpus": -1}}, "gpus"),
    "option-with-dashes": ({"router": {"options": {"--max-queue-requests": 1}}}, "--max-queue-requests"),
    "unknown-scaler": ({"workerDefaults": {"autoscaling": {"kind": "cluster"}}}, "kind"),
    "percent": ({"workerDefaults": {"maxUnavailable": "most"}}, "maxUnavailable"),
    "more-ranks-than-a-pool-has": ({"gateway": {"enabled": True, "targetPorts": list(range(1, 10))}}, "targetPorts"),
    "unknown-failure-mode": ({"gateway": {"failureMode": "FailFast"}}, "failureMode"),
    "address": ({"bindAddress": "localhost"}, "bindAddress"),
    "no-servers": ({"eventPlane": "nats"}, "give nats.urls"),
    "servers-for-nothing": ({"nats": {"urls": ["nats://n:4222"]}}, "nothing is kept on NATS"),
    "server-with-a-password": ({"nats": {"urls": ["nats://u:p@n:4222"]}}, "urls"),
    "unknown-names": ({"names": {"kind": "etcd"}}, "kind"),
    "no-name": ({"pool": {"name": "a.b"}, "names": {"kind": "kubernetes"}}, "give names.namespace"),
}
"""Values that a user may well give, and what the refusal must name."""


def environment() -> Path:
    """Return the interpreter of the environment, which is made if it has to be."""
    interpreter = ENVIRONMENT / "bin" / "python"
    if interpreter.exists() and ("POOLGRID_KUBERNETES" in os.environ or _is_current()):
        return interpreter
    venv.create(ENVIRONMENT, with_pip=True, clear=True)
    install = [str(interpreter), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", str(REQUIREMENTS)]
    subprocess.run(install, check=True)
    MADE_FROM.write_bytes(REQUIREMENTS.read_bytes())
    return interpreter


def _is_current() -> bool:
    return MADE_FROM.exists() and MADE_FROM.read_bytes() == REQUIREMENTS.read_bytes()


def judged(interpreter: Path, cases: dict[str, Values]) -> dict[str, Any]:
    """Have the cases rendered and judged, in the other environment."""
    asked = {
        "chart": str(CHART),
        "namespace": NAMESPACE,
        "versions": VERSIONS,
        "cases": {name: {"values": values} for name, values in cases.items()},
        # What the tests of names take for a cluster's word is held against the schemas too.
        "documents": slices.EXAMPLES,
    }
    done = subprocess.run(
        [str(interpreter), str(HERE / "rendering.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"rendering.py ended with {done.returncode}: {done.stderr[-1500:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def printed_values() -> Values:
    """Return the values that docs/quickstart.md prints."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    text = page.partition("<!-- values of the chart -->\n```yaml\n")[2].partition("```")[0]
    values: Values = yaml.safe_load(text)
    return values


def main(arguments: Sequence[str]) -> int:
    """Check all, or write the manifests; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.kubernetes", description="The chart against Kubernetes.")
    parser.add_argument("--write", action="store_true", help="write the manifests that are committed")
    options = parser.parse_args(arguments)
    good = {path.stem: yaml.safe_load(path.read_text()) for path in EXAMPLES}
    VARIATIONS["quickstart"] = printed_values()
    cases = {**good, **VARIATIONS, **{name: values for name, (values, _) in REFUSED.items()}}
    try:
        answer = judged(environment(), cases)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        sys.stderr.write(f"the chart cannot be rendered here: {error}\n")
        return 2
    found = answer["cases"]
    problems = [
        f"lint: {message['path']}: {message['error']}"
        for message in answer["lint"]["messages"]
        if message["severity"] > 1
    ]
    problems += [f"tests/discovery/slices.py: {each}" for each in answer["documents"]]
    kinds: set[str] = set()
    for name in (*good, *VARIATIONS):
        if "refused" in found[name]:
            problems.append(f"{name}: refused: {found[name]['refused']}")
        else:
            problems += [f"{name}: {each}" for each in found[name]["problems"]]
            kinds.update(found[name]["checked"])
    for name, (_, named) in REFUSED.items():
        if named not in found[name].get("refused", ""):
            problems.append(
                f"{name}: must be refused, naming {named!r}; it was {found[name].get('refused', 'taken')!r}"
            )
    if not problems:
        for example in EXAMPLES:
            path = MANIFESTS / example.name
            text = manifest_text(example, found[example.stem]["rendered"])
            if options.write:
                path.write_text(text)
            elif not path.exists() or path.read_text() != text:
                problems.append(f"{path.relative_to(ROOT)} is not what the chart says: make kubernetes WRITE=--write")
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write(
        f"{len(good) + len(VARIATIONS)} sets of values against Kubernetes {', '.join(VERSIONS)} ({len(kinds)} kinds), "
        f"{len(REFUSED)} that must be refused: {len(problems) or 'no'} problems\n"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
