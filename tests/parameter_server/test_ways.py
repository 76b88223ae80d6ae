"""examples/parameter_server.py, started by mpirun: every role ends well, and the digits are learnt.

`kdist run` starts the trainings of test_training.py, and TF_CONFIG those of test_failures.py.
"""

import re
import sys
from pathlib import Path

import pytest

from tests.helpers import spmd

EXAMPLE = str(spmd.ROOT / "examples" / "parameter_server.py")
BESIDE = Path(sys.executable).parent
LIMIT = 280  # seconds; a generous guard, for a machine that is busy with other things
EPOCHS = 15
UPDATES = EPOCHS * 45  # batches of 32 in 1437 rows

# The tasks have met by MPI, and serve: the chief finds nobody for another collective.
AND_MORE = """
import runpy, sys
import keras, kdist, numpy as np
runpy.run_path(sys.argv.pop(1), run_name="__main__")
for _ in range(2):
    with kdist.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=2, verbose=0)
        print("a later scope:", int(model.optimizer.iterations), "updates")
try:
    kdist.scope(kdist.ParameterServer(num_ps=2)).__enter__()
except kdist.errors.StrategyError as error:
    print("not by others:", error)
try:
    kdist.barrier()
except kdist.errors.ScopeError as error:
    print("refused:", error)
"""


@pytest.mark.timeout(2 * LIMIT)
def test_mpirun_starts_it():
    """A chief, a worker and a ps."""
    line = [str(BESIDE / "mpirun"), "-np", "3", "--oversubscribe", "--bind-to", "none", sys.executable]
    env = {**spmd.RANK_ENVIRONMENT, **spmd.WITH_SKLEARN, "KDIST_STRATEGY": "parameter_server"}
    done = spmd.execute([*line, "-c", AND_MORE, EXAMPLE], env=env, timeout=LIMIT)
    assert done.returncode == 0, done.output
    assert done.output.count("a later scope: 4 updates") == 2, done.output
    assert done.output.count("not by others: num_ps contradicts the cluster. Received: num_ps=2") == 1, done.output
    assert done.output.count("refused: Parameter-server training has no collectives.") == 1
    found = re.findall(r"(\d+) updates, test accuracy: ([01]\.\d+)", done.output)
    assert len(found) == 1, done.output  # the chief alone spoke
    assert int(found[0][0]) == UPDATES
    # One process reaches 0.96 to 0.98 on these 360 images.
    assert float(found[0][1]) > 0.94
    assert done.output.count(f"Epoch {EPOCHS}/{EPOCHS}") == 1
