"""The Helm chart: linted and rendered by helm, its manifests checked against Kubernetes' schemas, where both exist."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHART = Path(__file__).resolve().parents[2] / "deploy/helm/twofold"
HELM = shutil.which("helm")
GIVEN = ["--set", "image.repository=example/twofold", "--set", "model=org/repo"]
EVERYTHING = ["--set", "secret=keys,models=claim,replicas=3,resources.limits.nvidia\\.com/gpu=1"]


@pytest.mark.skipif(HELM is None, reason="needs helm")
def test_the_chart_is_linted() -> None:
    assert HELM is not None
    done = subprocess.run([HELM, "lint", "--strict", CHART, *GIVEN], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(HELM is None, reason="needs helm")
@pytest.mark.parametrize("flags", [[], EVERYTHING])
def test_its_manifests_match_the_schemas_of_kubernetes(tmp_path: Path, flags: list[str]) -> None:
    pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    assert HELM is not None
    command = [HELM, "template", "release", CHART, *GIVEN, *flags]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    manifests = tmp_path / "manifests.yaml"
    manifests.write_text(rendered)
    check = [Path(sys.executable).with_name("kubernetes-validate"), "-k", "1.33", "--strict", manifests]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("passed for resource") + done.stdout.count("passed for resource") == 4


@pytest.mark.skipif(HELM is None, reason="needs helm")
def test_a_missing_or_misspelt_value_is_named() -> None:
    assert HELM is not None

    def refused(*flags: str) -> str:
        done = subprocess.run([HELM, "template", "r", CHART, *flags], capture_output=True, text=True)
        assert done.returncode != 0
        return done.stderr

    assert "model: a name on a hub" in refused("--set", "image.repository=x")
    assert "replica" in refused(*GIVEN, "--set", "replica=2")
