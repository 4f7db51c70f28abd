"""What docker/ ships for a cluster names things that there are: settings, the function that Serve imports, flags, volumes."""

import importlib
import re
from typing import Any

import pytest
import typer
import yaml
from serving import ROOT

from server.cluster import BARE
from server.settings import Settings

MANIFEST = list(yaml.safe_load_all((ROOT / "docker" / "kuberay.yaml").read_text()))
SETTINGS = {f"HEARTH_{name.upper()}" for name in Settings.model_fields}


def pods() -> list[dict[str, Any]]:
    cluster = MANIFEST[-1]["spec"]["rayClusterConfig"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_the_manifest_is_a_rayservice_with_what_its_pods_mount():
    assert [(one["apiVersion"], one["kind"]) for one in MANIFEST] == [
        ("v1", "ConfigMap"),
        ("v1", "Secret"),
        ("ray.io/v1", "RayService"),
    ]
    config, secret, _ = MANIFEST
    for pod in pods():
        volumes = {one["name"]: one for one in pod["volumes"]}
        assert volumes["models"]["configMap"]["name"] == config["metadata"]["name"]
        for container in pod["containers"]:
            assert {one["name"] for one in container["volumeMounts"]} == {*volumes}
            assert container["envFrom"][0]["secretRef"]["name"] == secret["metadata"]["name"]


def test_the_manifest_sets_what_there_is_and_all_that_a_cluster_needs():
    given = {*MANIFEST[1]["stringData"]}
    for pod in pods():
        for container in pod["containers"]:
            assert {one["name"]: one["value"] for one in container["env"]}.items() >= BARE.items()
            given |= {one["name"] for one in container["env"] if one["name"].startswith("HEARTH_")}
    assert given <= SETTINGS
    assert {"HEARTH_DATABASE_URL", "HEARTH_FILES_URL"} <= given


def test_serve_takes_the_manifests_configuration_and_finds_the_application():
    schema = pytest.importorskip("ray.serve.schema", reason="Ray is not installed (./scripts/setup --ray)")
    import ray

    spec = MANIFEST[-1]["spec"]
    found = schema.ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"]))
    (application,) = found.applications
    module, _, name = application.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    mounts = [one["mountPath"] for one in pods()[0]["containers"][0]["volumeMounts"]]
    assert any(application.args["models"].startswith(f"{path}/") for path in mounts)
    assert spec["rayClusterConfig"]["rayVersion"] == ray.__version__


@pytest.mark.parametrize("flags", ["--head", "--address 10.0.0.1:6379 --node-ip-address=10.0.0.2"])
def test_the_unit_calls_the_command_with_flags_that_it_has(flags: str):
    scripts = pytest.importorskip("ray.scripts.scripts", reason="Ray is not installed (./scripts/setup --ray)")
    from server.cli.cluster import _START, app

    unit = (ROOT / "docker" / "hearth-cluster.service").read_text()
    found = re.search(r"^ExecStart=\S+/hearth cluster (.+)$", unit, re.MULTILINE)
    assert found is not None
    name, *arguments = found[1].replace("$CLUSTER_FLAGS", flags).split()
    command = typer.main.get_group(app).commands[name]  # type: ignore[attr-defined]
    passed_on = command.make_context(name, [*arguments]).args
    assert passed_on == arguments
    start = scripts.cli.commands["start"].make_context("start", [*_START, *passed_on])
    assert start.params["block"] is True
    assert start.params["max_worker_port"] == 6699
