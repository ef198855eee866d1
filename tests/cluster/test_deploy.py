"""What deploy/ ships is accepted by those who will read it: our own configuration, and Ray's schema."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from baton.cluster.config import load_config, parse_config

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_configuration_is_valid(path: Path) -> None:
    config = load_config(path, {})
    assert config.worker_specs()


@pytest.mark.parametrize("path", sorted((DEPLOY / "ray").glob("*.yaml")), ids=lambda path: path.stem)
def test_rays_own_schema_accepts_a_cluster(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    validate_config(prepare_config(copy.deepcopy(config)))
    with pytest.raises(Exception, match="provider"):
        validate_config({**config, "provider": None})


def test_ray_starts_small_object_stores() -> None:
    """No token and no KV goes through it, and it would take a third of the memory."""
    for path in (DEPLOY / "ray").glob("*.yaml"):
        config: dict[str, Any] = yaml.safe_load(path.read_text())
        for key in ("head_start_ray_commands", "worker_start_ray_commands"):
            assert "--object-store-memory=100000000" in config[key][-1]


def test_the_configuration_in_kubernetes_is_valid() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "kuberay.yaml").read_text()))
    kinds = {document["kind"]: document for document in documents}
    assert kinds.keys() == {"ConfigMap", "RayCluster", "Service"}
    config = parse_config(yaml.safe_load(kinds["ConfigMap"]["data"]["config.yaml"]), {}, source="kuberay")
    ports = {port["port"] for port in kinds["Service"]["spec"]["ports"]}
    assert ports == {config.router.port, config.controller.port}
