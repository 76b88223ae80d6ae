"""The GPU and the threads of a process: the numbers, and TensorFlow's settings in a fresh process."""

import json
import os
import sys

import pytest
import tensorflow as tf

from kdist.parameter_server import server
from kdist.strategies.devices import (
    configure_devices,
    cpus_of_process,
    device_of,
    equal_threads,
    own_threads,
    shares_gpus,
    threads_per_rank,
)
from tests.helpers import spmd


@pytest.mark.parametrize(
    ("num_gpus", "local_ranks", "taken"), [(4, 4, [0, 1, 2, 3]), (2, 4, [0, 1, 0, 1]), (1, 2, [0, 0]), (4, 2, [0, 1])]
)
def test_gpus_are_assigned_round_robin(num_gpus, local_ranks, taken):
    assert [device_of(range(num_gpus), rank) for rank in range(local_ranks)] == taken


def test_only_visible_gpus_are_shared():
    assert device_of(["gpu:2", "gpu:3"], 0) == "gpu:2"


@pytest.mark.parametrize(
    ("affinity", "num_cpus", "local_size", "threads"),
    [
        (8, 8, 2, 4),  # all ranks device_of all cores
        (4, 8, 2, 4),  # each rank is bound to its own half
        (4, 8, 4, 2),  # two ranks to each half
        (1, 8, 8, 1),  # each is bound to a core
        (2, 2, 3, 1),  # more ranks than cores
        (1, 1, 4, 1),
        (12, 12, 5, 2),
    ],
)
def test_ranks_share_the_cores(affinity, num_cpus, local_size, threads):
    assert threads_per_rank(affinity, num_cpus, local_size) == threads


PROGRAM = """
import json, os, sys
import tensorflow as tf
from kdist.strategies.devices import configure_devices
exec(sys.argv[1])
configure_devices(1, 2, {})
tf.constant(1.0) + 1
threading = tf.config.threading
print(json.dumps([threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads()]))
"""


def settings_after(user_code):
    finished = spmd.execute([sys.executable, "-c", PROGRAM, user_code], env={"CUDA_VISIBLE_DEVICES": "-1"}, timeout=60)
    assert finished.returncode == 0, finished.output
    return json.loads(finished.output.splitlines()[-1])


def test_a_process_gets_its_share_of_the_threads():
    threads = threads_per_rank(len(os.sched_getaffinity(0)), os.cpu_count(), 2)
    assert settings_after("") == [threads, threads + 1 if threads > 1 else 1]


def test_thread_pools_of_the_user_are_kept():
    assert settings_after("tf.config.threading.set_intra_op_parallelism_threads(7)")[0] == 7


def test_tensorflow_used_before_keeps_its_thread_pools():
    assert settings_after("tf.constant(1.0)") == [0, 0]


@pytest.mark.parametrize(
    ("visible", "asked"),
    [
        (["gpu:0", "gpu:1"], [("visible", ["gpu:1"]), ("growth", "gpu:1")]),
        (["gpu:1"], [("growth", "gpu:1")]),  # the launcher narrowed them, or the user did: taken as it is
        ([], []),
    ],
)
def test_calls_to_tensorflow_for_a_gpu(visible, asked, monkeypatch):
    """Calls to TensorFlow, because there are no GPUs. Their order matters: growth is set on visible devices."""
    found = []
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: visible)
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda devices, kind: found.append(("visible", devices)))
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, on: found.append(("growth", gpu)))
    configure_devices(1, 2, {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"})
    assert found == asked


@pytest.mark.parametrize(
    ("num_gpus", "env", "shared"),
    [
        (1, {}, True),
        (2, {}, False),
        (0, {}, False),
        (1, {"CUDA_VISIBLE_DEVICES": "0"}, False),  # `srun --gpus-per-task=1`: each has one of its own, called 0
    ],
)
def test_ranks_that_share_a_gpu_say_so(num_gpus, env, shared, monkeypatch, caplog):
    gpus = [f"gpu:{number}" for number in range(num_gpus)]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda devices, kind: None)
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, on: None)
    assert shares_gpus(2, env) == shared
    configure_devices(1, 2, {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", **env})
    assert ("2 ranks share 1 GPU(s) of this host" in caplog.text) == shared


def test_a_workers_server_gets_its_gpu_by_the_number_on_the_host(monkeypatch):
    def gpus(*numbers):
        devices = [tf.config.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU") for number in numbers]
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: devices)
        return server._config({"worker": ["a:1", "a:2"]}, "worker", 1, 2).gpu_options.visible_device_list

    assert gpus(0, 1, 2) == "1"
    assert gpus(2) == "2"  # chosen before


@pytest.mark.parametrize(
    ("of_ranks", "threads"),
    [
        ([("a", range(12), 1)], 12),
        ([("a", range(12), 3)] * 3, 4),  # ranks in a container share its affinity mask, smaller than the host
        ([("a", range(6), 2), ("a", range(6, 12), 2)], 6),  # ranks that are bound have their own
        ([("a", range(8), 2)] * 2 + [("b", range(8), 1)], 4),  # a host with fewer ranks
        ([("a", range(2), 2), ("a", range(2, 8), 2)], 2),
        ([("a", range(4), 1)] * 2, 4),  # two hosts of one name
        ([("a", range(1), 3)] * 3, 1),
    ],
)
def test_all_ranks_compute_with_as_many_threads(of_ranks, threads):
    """The norm of a gradient is added up in as many pieces as there are threads."""
    cpus = [json.dumps([host, list(mask), local_size]) for host, mask, local_size in of_ranks]
    assert equal_threads(cpus) == threads
    assert json.loads(cpus_of_process(2)) == [os.uname().nodename, sorted(os.sched_getaffinity(0)), 2]


@pytest.mark.parametrize("local_size", [1, 2])
def test_a_rank_computes_with_as_many_threads_as_those_of_other_hosts(local_size, monkeypatch):
    found = []
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setattr(tf.config.threading, "get_intra_op_parallelism_threads", lambda: 0)
    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", found.append)
    configure_devices(0, local_size, {"TF_NUM_INTEROP_THREADS": "2"}, 3)
    assert found == [3]
    assert own_threads({}) == 12
    assert own_threads({"TF_NUM_INTRAOP_THREADS": "5"}) == 5


# No GPU is needed to find the line: TensorFlow's refusal is put in its place.
TOO_LATE = """
import tensorflow as tf
from kdist.strategies.devices import hide_gpus, configure_devices

def refuse(*devices):
    raise RuntimeError("Visible devices cannot be modified after being initialized")

tf.config.get_visible_devices = lambda kind: ["gpu:0", "gpu:1"]
tf.config.set_visible_devices = refuse
layer = tf.constant(1.0)
"""


@pytest.mark.parametrize(
    ("call", "purpose"),
    [
        ("configure_devices(1, 2, {})", "choose a GPU for local rank 1"),
        ("hide_gpus()", "leave the GPUs to the workers"),
    ],
)
def test_tensorflow_used_too_early_for_a_gpu_names_the_line_to_move(call, purpose, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"{TOO_LATE}{call}\n")
    finished = spmd.execute([sys.executable, str(script)], timeout=60)
    assert finished.returncode == 1
    assert f"before kdist.scope() could {purpose}." in finished.output
    assert f"the first call of kdist, in {script.name}:{len(TOO_LATE.splitlines()) + 1}. Fix" in finished.output
    assert "Fix: move that line up" in finished.output
