"""The state that is the same on all ranks: broadcast when a call begins, and compared while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from kdist.engines.engine import Engine
from kdist.keras_hooks.layers.embedding import table_of
from kdist.keras_hooks.optimizers import innermost, optimizers_of, stored_learning_rate
from kdist.keras_hooks.trainer import initial_epoch, set_initial_epoch
from kdist.keras_hooks.variables import is_declared_of_one_rank, is_of_one_rank, is_seed, key_of
from kdist.learning_rate.effective_rates import EffectiveRates
from kdist.sharding.embedding import warn_of_whole_tables
from kdist.sharding.slot_files import loads
from kdist.sharding.table import table_loads
from kdist.state.broadcast import broadcast_differing, broadcast_state, checksums_of, gathered_checksums
from kdist.state.comparison import check_equal, describe_model, gather_values, refuse_differences, whole_weights
from kdist.state.part import Placement, StatePart
from kdist.state.written import FIX, WrittenState

_SAME_STATE = f"Expected steps and callbacks that write the same on all of them. {FIX}"
_SAME_WEIGHTS = (
    "Expected callbacks that write the same weights on all of them. Fix: write them on every rank; or on some, by "
    "`model.set_weights` or `model.load_weights`, after which the others get them"
)


class CommonState:
    """The state of a model that several ranks train, which is rank 0's on all of them.

    Args:
        model: `keras.Model`.
        engine: `Engine`, how the ranks communicate.
        parts: callable that returns the parts of the state.
        rates: `EffectiveRates` of the model.
        written: `WrittenState`, what steps write beside weights.
        shard_embeddings: float or `None`, see `kdist.AllReduce`.
    """

    def __init__(
        self,
        model: keras.Model,
        engine: Engine,
        parts: Callable[[], list[StatePart]],
        rates: EffectiveRates,
        written: WrittenState,
        shard_embeddings: float | None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._parts = parts
        self._rates = rates
        self._written = written
        self._shard_embeddings = shard_embeddings

    def begin(
        self,
        method: str,
        learning_rates: Mapping[str, float] | None = None,
        *,
        has_loaded: bool = False,
        has_loaded_state: bool = False,
    ) -> None:
        """Compares the model over the ranks, and broadcasts rank 0's state at the beginning of a call.

        Weights are those of the first rank that has loaded some since the last call, or rank 0's if none has; so is the
        optimizer's state, if it was loaded, too.

        Collective: every rank must call this, in the same order.

        Args:
            method: str, the method.
            learning_rates: mapping of names to the rates that `fit` was given, or `None`.
            has_loaded: bool, whether this rank has loaded weights.
            has_loaded_state: bool, whether it has loaded the optimizer's state with them.
        """
        what, epoch = f"the model given to {method}", initial_epoch(self._model) if method == "fit" else None
        described = {**describe_model(self._model), **self.loads()}
        state = self._variables()
        if method == "fit":
            state += [variable for rate in self._rates.all() for variable in rate.anchors()]
        sums = checksums_of(state if self._engine.size > 1 else [])
        local = [described, epoch, learning_rates or {}, sums, has_loaded, has_loaded_state]
        models, epochs, rates, checksums, *loaded = zip(*gather_values(self._engine, what, local), strict=True)
        refuse_differences(what, models)
        refuse_differences(f"the optimizer given to {method}", rates)
        if self._engine.rank == 0:
            warn_of_whole_tables(self._model, self._engine.size, self._shard_embeddings)
        by_rank = np.array(checksums, np.int64).reshape(self._engine.size, -1)
        weights = {id(variable) for variable in self._model.weights}
        # Ranks that have only set weights may follow rank 0, and have an optimizer that knows of no step.
        for is_weight, by in zip((True, False), loaded, strict=True):
            root = by.index(True) if any(by) else 0
            places = [place for place, each in enumerate(state) if (id(each) in weights) == is_weight]
            if places and by_rank.size:
                broadcast_differing(self._engine, [state[place] for place in places], by_rank[:, places], root)
        if method == "fit":
            set_initial_epoch(self._model, epochs[0])

    def loads(self) -> dict[str, Any]:
        """Returns what was loaded into parts that cannot be broadcast, to compare it."""
        return {**loads(optimizers_of(self._model)), **table_loads(self._model)}

    def pending_variables(self) -> list[Any]:
        """Returns the learning rates, which a callback may have changed on some ranks."""
        return [stored_learning_rate(innermost(optimizer)) for optimizer in optimizers_of(self._model)]

    def broadcast(self, root: int) -> None:
        """Broadcasts a rank's state, learning rates too.

        Collective: every rank must call this, in the same order.
        """
        broadcast_state(self._engine, self._variables(), root=root)

    def check_first_step(self) -> None:
        """Raises if the first step has left other weights on a rank, and does what `make_buffers_equal` does.

        Collective: every rank must call this, in the same order.
        """
        kept = self._buffers()
        self._set_equal(kept, check_equal(self._engine, whole_weights(self._model), kept), _SAME_STATE)

    def make_buffers_equal(self) -> None:
        """Sets what is no weight to rank 0's values where the ranks differ, with a warning.

        Collective: every rank must call this, in the same order.
        """
        self._make_equal(self._buffers(), _SAME_STATE)

    def make_weights_equal(self) -> None:
        """Sets weights to rank 0's values where the ranks differ, with a warning: a callback has written them.

        Collective: every rank must call this, in the same order.
        """
        weights = [each for each in self._model.trainable_variables if table_of(each) is None]
        kept = [each for each in weights if not is_of_one_rank(self._model, each)]
        if self._make_equal(kept, _SAME_WEIGHTS):
            # Moving averages and optimizer slots, too: those of rank 0 were computed with its weights.
            broadcast_state(self._engine, self._comparable())

    def make_loaded_equal(self) -> None:
        """Sets all to rank 0's values where the ranks differ, with a warning: all ranks have loaded weights.

        Collective: every rank must call this, in the same order.
        """
        self._make_equal(self._comparable(), _SAME_WEIGHTS)

    def _make_equal(self, variables: list[Any], expected: str) -> list[Any]:
        if not variables or self._engine.size == 1:
            return []
        return self._set_equal(variables, gathered_checksums(self._engine, variables), expected)

    def _set_equal(self, variables: list[Any], checksums: np.ndarray, expected: str) -> list[Any]:
        found = broadcast_differing(self._engine, variables, checksums)
        for variable in found:
            message = f"%r differs between the ranks, and is rank 0's on all of them now. {expected}"
            self._written.warn_once(variable, message)
        return found

    def _buffers(self) -> list[Any]:
        """Returns what is no weight of the optimizer or of metrics, and is to be the same on all ranks."""
        model = self._model
        others = {key_of(each) for each in [*model.trainable_variables, *model.metrics_variables]}
        state = {key_of(each): each for each in model.non_trainable_variables} | self._written.variables
        return [
            each
            for key, each in state.items()
            if key not in others and not is_seed(each) and not is_of_one_rank(model, each) and table_of(each) is None
        ]

    def _comparable(self) -> list[Any]:
        """Returns the state that is the same on all ranks, but for learning rates that callbacks have changed."""
        pending = {id(each) for each in self.pending_variables()}
        state = [each for each in self._variables() if id(each) not in pending]
        return [each for each in state if not is_of_one_rank(self._model, each)]

    def _variables(self) -> list[Any]:
        whole = [part for part in self._parts() if part.placement is Placement.WHOLE]
        return [each for part in whole for each in part.variables() if not is_declared_of_one_rank(each)]
