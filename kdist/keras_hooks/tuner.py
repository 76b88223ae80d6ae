"""KerasTuner: all ranks run each trial together, and the chief writes the files of the search."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from kdist.engines.engine import Engine
from kdist.keras_hooks.patching import patched


class JointSearches(contextlib.ExitStack):
    """A context in which KerasTuner's searches are the same on all ranks.

    Args:
        engine: `Engine`, how the ranks communicate.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._is_prepared = False

    def prepare(self) -> None:
        """Prepares KerasTuner if the script has imported it; a second call has no effect."""
        if self._is_prepared or "keras_tuner" not in sys.modules:
            return
        self._is_prepared = True
        from keras_tuner.src import backend, utils
        from keras_tuner.src.engine.base_tuner import BaseTuner

        search = BaseTuner.search

        def search_together(tuner: Any, *args: Any, **kwargs: Any) -> None:
            self._share_state(tuner.oracle)
            search(tuner, *args, **kwargs)

        self.enter_context(patched(BaseTuner, "search", search_together))
        if self._engine.rank:
            self.enter_context(patched(utils, "save_json", lambda path, state: json.dumps(state)))
            self.enter_context(patched(backend.io, "rmtree", lambda path: None))

    def _share_state(self, oracle: Any) -> None:
        """Gives all ranks rank 0's oracle: its seed, and the trials that it has read.

        From here on ranks draw the same. Rank 0, which waits for the others here, begins to write when all have read.

        Collective: every rank must call this, in the same order.
        """
        from keras_tuner.src.engine.trial import Trial

        local = {"trials": {name: trial.get_state() for name, trial in oracle.trials.items()}, **oracle.get_state()}
        state = self._engine.broadcast_object(local)
        if self._engine.rank:
            oracle.trials = {name: Trial.from_state(each) for name, each in state.pop("trials").items()}
            oracle.set_state(state)
