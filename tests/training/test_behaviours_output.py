"""What a user sees: one progress bar, one log, the right number of steps, no warning that plain Keras does not give."""

import re
import sys

import pytest

from tests.helpers import spmd

SCRIPT = """
import sys
import keras, numpy as np, tensorflow as tf
import kdist

keras.utils.set_random_seed(1)
batch = int(sys.argv[1])
x = np.random.normal(size=(100, 3))
y = x @ np.ones((3, 1))
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
with kdist.scope(scale_lr=None):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(x, y, batch_size=batch, epochs=2, validation_split=0.2, shuffle=False, verbose=1)
    model.fit(dataset, epochs=2, validation_data=dataset.take(64 // batch), verbose=1)
    model.fit(dataset, epochs=2, validation_data=dataset.take(64 // batch), verbose=2)
    model.fit(dataset.filter(lambda x, y: True), epochs=2, verbose=1)
    for verbose in (1, 2):
        model.evaluate(x, y, batch_size=batch, verbose=verbose)
        model.predict(x, batch_size=batch, verbose=verbose)
    if kdist.is_chief():
        print("the script's own words")
"""

TIMES = re.compile(r"\d+(m?s|us|min|h)(/step|/epoch)?|\d+:\d+|\x08|\r|\x1b\[\d*m")
WARNED = re.compile(r"^\S+\.py:\d+: ")
FINISHED = re.compile(r"^\s*(\d+)/\1\s|^(?!\s*\d+/)")  # 7/7, and lines that are no progress
NOISE = re.compile(r"^([IWE]\d{4} |WARNING: All log messages before absl|To enable the following instructions)")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("output") / "script.py"
    path.write_text(SCRIPT)
    return path


def said(command, script, *arguments):
    """Returns `(shown, warnings, log)`: of a progress bar its last state without times, of a warning its words."""
    env = {**spmd.RANK_ENVIRONMENT, "PYTHONWARNINGS": "default", "TF_CPP_MIN_LOG_LEVEL": "3"}
    errors = script.with_suffix(".err")
    split = ["bash", "-c", '"$@" 2> "$0"', str(errors), *command, str(script), *arguments]
    done = spmd.execute(split, env=env, timeout=120)
    assert done.returncode == 0, done.output + errors.read_text()
    # A progress line that ends in backspaces is about to be overwritten.
    printed = [TIMES.sub("", line) for line in done.output.splitlines() if line.strip() and not line.endswith("\b")]
    shown = [" ".join(line.split()) for line in printed if FINISHED.match(line)]
    lines = [line for line in errors.read_text().splitlines() if line.strip() and not NOISE.match(line)]
    log = [line for line in lines if line.startswith("[kdist")]
    warnings = [WARNED.sub("", line) for line in lines if not line.startswith(("[kdist", "  "))]
    return without_last_digits(shown), warnings, log


def without_last_digits(lines):
    """Rounding may differ in the last digit that is shown."""
    return [re.sub(r"(\d+\.\d{2})\d*(e-?\d+)?", r"\1", line) for line in lines]


def test_the_output_is_plain_keras(script):
    plain, warned, _ = said([sys.executable], script, "16")
    ours, also_warned, log = said([sys.executable, "-m", "kdist.cli.main", "run", "-np", "2"], script, "8")
    assert any("7/7" in line for line in plain)
    assert ours == plain
    assert also_warned == warned
    assert [line for line in log if "2 ranks train together" in line]
    assert len(log) == len(set(log)), log
