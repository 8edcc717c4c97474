"""The KServe manifest: fields of the InferenceService, its pod against Kubernetes' schemas, its flags against ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from twofold.api.config import ServerConfig
from twofold.api.settings import from_namespace
from twofold.tools.cli.main import build_parser

MANIFEST = Path(__file__).resolve().parents[2] / "deploy/kserve/inference-service.yaml"
EXTENSION = {"minReplicas": int, "maxReplicas": int, "scaleMetric": str, "scaleTarget": int, "timeout": int}
"""KServe's ComponentExtensionSpec, as far as the manifest uses it; everything else of a predictor is a PodSpec."""


@pytest.fixture
def service() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())
    return found


def test_it_is_an_inference_service(service: dict[str, Any]) -> None:
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    assert list(service["spec"]) == ["predictor"]
    predictor = service["spec"]["predictor"]
    assert {name: type(predictor[name]) for name in EXTENSION} == EXTENSION
    assert predictor["minReplicas"] <= predictor["maxReplicas"]
    # KServe adds its own settings to the container of this name.
    assert [each["name"] for each in predictor["containers"]] == ["kserve-container"]


def test_its_arguments_are_flags_of_serve_and_its_ports_agree(service: dict[str, Any]) -> None:
    predictor = service["spec"]["predictor"]
    (container,) = predictor["containers"]
    config = from_namespace(ServerConfig, build_parser("serve").parse_args(container["args"]))
    assert config.port == container["ports"][0]["containerPort"]
    assert {container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe")} == {
        config.port
    }
    assert service["metadata"]["annotations"]["prometheus.io/port"] == str(config.port)
    assert predictor["terminationGracePeriodSeconds"] > config.drain_timeout_s


def test_its_pod_matches_the_schema_of_kubernetes(service: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    spec = {name: value for name, value in service["spec"]["predictor"].items() if name not in EXTENSION}
    pod = tmp_path / "pod.yaml"
    pod.write_text(json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}))
    check = [Path(sys.executable).with_name("kubernetes-validate"), "-k", "1.33", "--strict", pod]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
