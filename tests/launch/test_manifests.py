# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Kubernetes manifests: valid against the published schemas, with arguments that exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_leangrpo.config_reader import read_config, read_recipe

FOLDER = Path(__file__).parents[2] / "launch" / "kubernetes"
RECIPE = "flux_dev_dancegrpo"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def jobset_spec(name: str) -> dict[str, Any]:
    """The part of a manifest that JobSet defines."""
    first = documents(name)[0]["spec"]
    return first["template"]["spec"] if "template" in first else first


def job_of(name: str) -> dict[str, Any]:
    """The plain Job that is made for the nodes."""
    (replicated,) = jobset_spec(name)["replicatedJobs"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "node", **replicated["template"].get("metadata", {})},
        "spec": replicated["template"]["spec"],
    }


def container(name: str) -> dict[str, Any]:
    (found,) = job_of(name)["spec"]["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_jobs_are_valid_against_the_published_schema(name):
    validator = pytest.importorskip(
        "kubernetes_validate", reason="needs kubernetes-validate (pip install kubernetes-validate)"
    )
    validator.validate(job_of(name), validator.latest_version(), strict=True)


def test_the_schema_finds_what_is_wrong():
    validator = pytest.importorskip("kubernetes_validate")
    job = job_of("jobset.yaml")
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = ["bash"]
    with pytest.raises(validator.ValidationError):
        validator.validate(job, validator.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_pods_run_without_root_are_replaced_when_stopped_and_not_after_bad_input(name):
    job = job_of(name)
    pod = job["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 600
    environment = {item["name"]: item.get("value") for item in container(name)["env"]}
    assert environment["LEANGRPO_STOPPED_STATUS"] == "75"
    fails = job["spec"]["podFailurePolicy"]["rules"][0]
    assert fails["action"] == "FailJob" and fails["onExitCodes"]["values"] == [2]
    assert fails["onExitCodes"]["containerName"] == container(name)["name"]
    assert jobset_spec(name)["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    # Whose registry it is in is the cluster's business.
    assert container(name)["image"] == "megatron-leangrpo:0.1.0"


def test_every_node_knows_the_first_one_and_its_own_number():
    job, environment = job_of("jobset.yaml"), container("jobset.yaml")["env"]
    values = {item["name"]: item.get("value") for item in environment}
    spec, metadata = job["spec"], documents("jobset.yaml")[0]["metadata"]
    assert spec["completionMode"] == "Indexed"
    assert int(values["NNODES"]) == spec["completions"] == spec["parallelism"]
    assert values["MASTER_ADDR"] == f"{metadata['name']}-node-0-0.{metadata['name']}"
    (rank,) = [item for item in environment if item["name"] == "NODE_RANK"]
    path = rank["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    gpus = container("jobset.yaml")["resources"]["limits"]["nvidia.com/gpu"]
    assert values["GPUS_PER_NODE"] == gpus


def test_the_train_job_uses_the_runtime_beside_it():
    runtime, job = documents("trainjob.yaml")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer = job["spec"]["trainer"]
    assert str(trainer["numProcPerNode"]) == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_the_arguments_are_a_recipe_and_settings_that_exist(name):
    command = container(name)["command"]
    assert command == ["bash", "/opt/megatron_leangrpo/launch/torchrun.sh"]
    arguments = container(name).get("args") or documents(name)[1]["spec"]["trainer"]["args"]
    assert arguments[0] == RECIPE
    config = read_config(read_recipe(arguments[0]), arguments[1:])
    assert config.checkpoint.interval > 0 and config.output.startswith("/runs/")
