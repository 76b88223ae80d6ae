"""The arguments of `kdist run` for several nodes, and what tells it the rest."""

from __future__ import annotations

import pytest

from kdist.cli.jobs import nodes
from kdist.cli.main import make_parser
from kdist.errors import LaunchError

ALL = ["--rendezvous", "alpha:29400", "--nnodes", "2", "--node-rank", "1", "-np", "3"]
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}


def node_of(line: list[str], env: dict[str, str] | None = None, *more: str) -> nodes.Node | None:
    options = make_parser().parse_args(["run", *line, "train.py"])
    return nodes.node_of(options, ["/here/train.py", "--epochs", "2", *more], env or {})


def test_a_node_is_what_the_arguments_say() -> None:
    node = nodes.Node(1, 2, "alpha", 29400, 3, "train.py --epochs 2")
    assert node_of(ALL) == node
    assert node_of(["--rendezvous", "alpha", *ALL[2:]]) == node
    assert node_of(["--rendezvous", "alpha", "-np", "3"], STEP) == node
    assert node_of(["--rendezvous", "alpha", "-np", "3", "--nnodes", "2"], {"JOB_COMPLETION_INDEX": "1"}) == node
    assert node_of(["-np", "3"]) is None


def test_nodes_with_many_arguments_send_few_characters() -> None:
    texts = ["x" * 2_000_000, "x" * 2_000_000 + "y", "x" * 2_000_000]
    one, other, same = (node.job for text in texts if (node := node_of(ALL, None, text)) is not None)
    assert len(one) < 250
    assert one == same != other
    assert one.startswith("train.py --epochs 2 xxx")


def test_a_task_of_srun_on_each_node_is_no_rank() -> None:
    options = make_parser().parse_args(["run", *ALL, "train.py"])
    assert nodes.is_one_of_nodes(options, STEP)
    assert not nodes.is_one_of_nodes(options, {"OMPI_COMM_WORLD_RANK": "0"})


@pytest.mark.parametrize("text", ["[fd00::1]", "[fd00::1]:29400"])
def test_an_address_of_ipv6_stands_in_brackets(text: str) -> None:
    node = node_of(["--rendezvous", text, *ALL[2:]])
    assert node is not None
    assert (node.host, node.port) == ("fd00::1", 29400)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--nnodes", "2", "-np", "1"], "--nnodes has no effect without --rendezvous"),
        (["--node-rank", "1", "-np", "1"], "--node-rank has no effect without --rendezvous"),
        (["--rendezvous", "alpha", "-np", "1", "--node-rank", "0"], "--nnodes is missing"),
        (["--rendezvous", "alpha", "-np", "1", "--nnodes", "2"], "--node-rank is missing"),
        (["--rendezvous", "alpha:x", *ALL[2:]], "--rendezvous is not HOST:PORT"),
        (["--rendezvous", ":29400", *ALL[2:]], "--rendezvous is not HOST:PORT"),
        (["--rendezvous", "fd00::1", *ALL[2:]], "--rendezvous is not HOST:PORT"),
        (["--rendezvous", "alpha:70000", *ALL[2:]], "--rendezvous is not HOST:PORT"),
        ([*ALL, "--node-rank", "2"], "--node-rank is not below --nnodes"),
        (ALL[:-2], "No number of ranks given"),
        ([*ALL, "-H", "alpha:2"], "-H cannot be used with --rendezvous"),
        (["--start-timeout", "5", "-np", "1"], "--start-timeout has no effect without --rendezvous"),
        ([*ALL, "--oversubscribe"], "--oversubscribe cannot be used with --rendezvous"),
        ([*ALL, "--restarts", "1"], "--restarts cannot be used with --rendezvous"),
        ([*ALL, "--strategy", "mpi"], "--strategy mpi cannot be used with --rendezvous"),
    ],
)
def test_what_does_not_fit_is_refused(line: list[str], said: str) -> None:
    with pytest.raises(LaunchError, match=f"(?s){said}.*Received: .*Expected .*Fix: "):
        node_of(line)


@pytest.mark.parametrize("text", ["inf", "nan", "0", "soon"])
def test_a_time_without_an_end_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        node_of([*ALL, "--start-timeout", text])
    assert "expected seconds" in capsys.readouterr().err
