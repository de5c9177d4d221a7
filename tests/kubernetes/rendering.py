"""Renders the chart with values and judges the result; run in the environment that has libhelm and the schemas.

Reads one JSON object from standard input (``chart``, ``namespace``, ``versions``, ``cases`` by name with ``values``,
and ``documents``, resources to judge as they are), and writes one: for each case its ``rendered`` templates or
``refused`` with the reason, and its ``problems``; those of the ``documents`` are one list.
"""

import json
import sys
from typing import Any

import helm_python as helm
import kubernetes_validate
import yaml

OF_OPERATORS = (
    "monitoring.coreos.com/v1",
    "keda.sh/v1alpha1",
    "inference.networking.k8s.io/v1",
    "data.fluid.io/v1alpha1",
    "leaderworkerset.x-k8s.io/v1",
)
"""Kinds that operators add to a cluster, whose schemas are with them; tests/deploy looks at these by itself."""


def problems_of(document: dict[str, Any], versions: list[str], found: set[str]) -> list[str]:
    """Return what the schemas of some versions say against a resource; ``found`` gets the kinds that have one."""
    name = f"{document['kind']} {document['metadata']['name']}"
    problems = []
    for version in versions:
        try:
            kubernetes_validate.validate(document, version, strict=True)
            found.add(document["kind"])
        except kubernetes_validate.SchemaNotFoundError:
            if document["apiVersion"] not in OF_OPERATORS:
                problems.append(f"{name}: {document['apiVersion']} is not in Kubernetes {version}")
        except kubernetes_validate.ValidationError as error:
            problems.append(f"{name}: Kubernetes {version}: {error.message}"[:500])
    return problems


def judge(case: dict[str, Any], name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Render one case and return what became of it."""
    with helm.Chart.load(asked["chart"]) as chart:
        try:
            rendered = chart.render(case["values"], name=name, namespace=asked["namespace"])
        except helm.HelmError as error:
            return {"refused": str(error)}
    problems: list[str] = []
    checked: set[str] = set()
    for text in rendered.values():
        for document in yaml.safe_load_all(text):
            if document:
                problems += problems_of(document, asked["versions"], checked)
    return {"rendered": rendered, "problems": problems, "checked": sorted(checked)}


asked = json.load(sys.stdin)
answer = {name: judge(case, name, asked) for name, case in asked["cases"].items()}
lint = helm.lint(asked["chart"], strict=True)
others = [each for document in asked["documents"] for each in problems_of(document, asked["versions"], set())]
json.dump({"cases": answer, "lint": lint, "documents": others}, sys.stdout)
