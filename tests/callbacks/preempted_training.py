"""A training whose last rank is told to go: `python -m tests.callbacks.preempted_training FOLDER`."""

from __future__ import annotations

import os
import signal
import sys

import keras

import kdist
from tests.callbacks.cases_resume import inputs, network


def main() -> None:
    def tell(batch: int, logs: object) -> None:
        if batch == 2 and kdist.rank() == kdist.size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    with kdist.scope():
        model = network()
        model.compile("adam", "mse")
        model.fit(
            **inputs("arrays"),
            epochs=3,
            verbose=0,
            callbacks=[
                keras.callbacks.LambdaCallback(on_train_batch_end=tell),
                kdist.callbacks.BackupAndRestore(sys.argv[1]),
                kdist.callbacks.Preemption(),
            ],
        )
    print("came to its end", flush=True)


if __name__ == "__main__":
    main()
