"""Tasks of a cluster that are killed, missing or misconfigured: exit codes, within seconds, and nothing hangs."""

import re
import socket

import pytest

from tests.helpers.tasks import Tasks

LIMIT = 200  # seconds; a generous guard, for a machine that is busy with other things

SCRIPT = """
import os, sys, time
import keras, numpy as np
import kdist
directory, epochs = sys.argv[1], int(sys.argv[2])
x = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
class Slow(keras.layers.Layer):
    # So that a task is killed while steps are made.
    def call(self, x):
        return x + 0 * keras.ops.sum(keras.ops.matmul(keras.ops.ones((700, 700)), keras.ops.ones((700, 700)))) * 1e-30
class Seen(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="seen")
        self.rows = self.add_weight(name="rows", initializer="zeros")
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign_add(keras.ops.sum(keras.ops.ones_like(y_true)))
    def result(self):
        return self.rows + 0
def note(epoch, logs):
    with open(f"{directory}/epochs", "a") as file:
        file.write(f"{epoch} {logs['seen']}\\n")
    model.stop_training = os.path.exists(f"{directory}/enough")
with kdist.scope(kdist.ParameterServer(timeout=float(sys.argv[3]))):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), Slow(), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[Seen()])
    resume = keras.callbacks.BackupAndRestore(directory + "/backup")
    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=note), resume]
    # For an evaluator; the chief does not validate.
    validation = {"validation_data": (x, x[:, :1]), "validation_freq": 10**6}
    model.fit(x, x[:, :1], batch_size=4, epochs=epochs, verbose=0, callbacks=callbacks, **validation)
print("TRAINED", int(model.optimizer.iterations), flush=True)
"""


def epochs(directory):
    """Returns the rows that were counted in each epoch that has ended."""
    path = directory / "epochs"
    return [float(line.split()[1]) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def tasks(tmp_path):
    made = []

    def make(num_epochs=400, timeout=120, **kwargs):
        (tmp_path / "script.py").write_text(SCRIPT)
        arguments = [str(tmp_path / "script.py"), str(tmp_path), str(num_epochs), str(timeout)]
        made.append(Tasks(tmp_path, arguments, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.fixture
def trained(tmp_path):
    """Waits until a number of epochs have been trained."""
    return lambda job, count: job.wait_until(lambda: len(epochs(tmp_path)) >= count, LIMIT)


@pytest.mark.timeout(2 * LIMIT)
def test_late_and_killed_workers_join_and_an_evaluator_ends_with_the_chief(tasks, trained, tmp_path):
    job = tasks(num_epochs=10**6, ps=2, evaluators=1, without=["worker 1"])
    job.wait_until(lambda: job.listens("chief 0"), LIMIT)
    job.start("worker 1")  # the chief has waited for it, and for no evaluator
    trained(job, 3)
    job.kill("worker 1")
    at = len(epochs(tmp_path))
    trained(job, at + 5)
    assert "worker 1" in job.said("chief 0")
    job.start("worker 1")
    job.wait_until(lambda: "worker 1 has joined again" in job.said("chief 0"), LIMIT)
    (tmp_path / "enough").touch()
    assert job.codes(limit=LIMIT) == [0, 0, 0, 0, 0, 0], job.everything_said()
    ((one, other),) = re.findall(r"bytes of variables on each ps: ([\d,]+), ([\d,]+)\n", job.said("chief 0"))
    assert int(one.replace(",", "")) > 0 < int(other.replace(",", ""))
    # What a step counted is taken once, also where a worker was lost in the middle of it.
    counted = epochs(tmp_path)
    assert counted == [64.0] * len(counted)
    # TensorFlow may write to the same file afterwards, about functions of the lost worker.
    updates = int(re.findall(r"^TRAINED (\d+)$", job.said("chief 0"), re.MULTILINE)[0])
    assert 16 * len(counted) <= updates <= 16 * len(counted) + 1
    assert "TRAINED" not in job.said("evaluator 0")


@pytest.mark.timeout(2 * LIMIT)
def test_a_stopped_worker_is_named_after_the_time_limit(tasks, trained):
    job = tasks(timeout=25)
    trained(job, 2)
    job.stop("worker 1")
    assert job.codes("chief 0", "worker 0", "ps 0", limit=120) == [1, 1, 1], job.everything_said()
    # The failure detector reports it where the chief's main thread waits inside of TensorFlow.
    reports = r"The workers do not respond\..*; steps in flight: worker 1\.|no heartbeat from worker 1 for 25 s"
    assert re.search(reports, job.said("chief 0")), job.everything_said()


@pytest.mark.timeout(2 * LIMIT)
def test_a_lost_ps_ends_the_job_and_the_next_start_resumes(tasks, trained, tmp_path):
    job = tasks(workers=1)
    trained(job, 3)
    job.kill("ps 0")
    assert job.codes("chief 0", "worker 0", limit=60) == [1, 1], job.everything_said()
    assert "A ps is lost" in job.said("chief 0")
    done = len(epochs(tmp_path))
    again = tasks(workers=1, num_epochs=done + 3)
    assert again.codes(limit=LIMIT) == [0, 0, 0], again.everything_said()
    assert done + 3 <= len(epochs(tmp_path)) <= done + 4  # the epochs before are not trained again


@pytest.mark.timeout(2 * LIMIT)
def test_a_killed_chief_ends_the_others(tasks, trained):
    job = tasks(workers=1)
    job.start("evaluator 0")  # the cluster does not list it
    trained(job, 2)
    job.wait_until(lambda: "backup/latest.weights.h5: loss " in job.said("evaluator 0"), LIMIT)
    job.kill("chief 0")
    assert job.codes("worker 0", "ps 0", "evaluator 0", limit=30) == [1, 1, 1], job.everything_said()
    for name in ("worker 0", "ps 0", "evaluator 0"):
        assert "The chief is lost" in job.said(name)


@pytest.mark.timeout(2 * LIMIT)
def test_a_task_that_never_appears_is_named(tasks):
    job = tasks(workers=2, timeout=10, without=["worker 1"])
    codes = job.codes(limit=LIMIT)
    assert all(codes), job.everything_said()
    assert f"no connection from worker 1 ({job.cluster['worker'][1]})" in job.said("chief 0")


@pytest.mark.timeout(2 * LIMIT)
def test_a_port_in_use_is_named_by_the_task_that_needs_it(tasks):
    job = tasks(workers=1, timeout=20, without=["ps 0", "worker 0", "chief 0"])
    with socket.socket() as one, socket.socket() as other:
        for taken, job_name in ((one, "worker"), (other, "chief")):
            taken.bind(("127.0.0.1", int(job.cluster[job_name][0].split(":")[1])))
            taken.listen()
        job.start("worker 0")
        job.start("chief 0")
        assert job.codes(limit=LIMIT) == [1, 1], job.everything_said()
    for name in ("worker 0", "chief 0"):
        assert f"for {name} at {job.cluster[name.split()[0]][0]}" in job.said(name)
