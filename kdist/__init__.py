"""Distribution strategies for Keras 3: a script trains on N processes.

By default batch and learning rate grow with N. With `scale_batch=False` the result is that of one process, to rounding.

```python
import keras, kdist

with kdist.scope():
    model = keras.Sequential([keras.layers.Dense(10)])
    model.compile(optimizer="sgd", loss="mse")
    model.fit(x, y)
```

Glossary. Engines use the words of MPI, strategies those of `tf.distribute`, data those of Keras:

- **rank**, **size**: a process's number, and the number of processes, as in MPI. **local_rank**, **local_size**: the
  same on one host. **root**: the rank whose value a broadcast sends.
- **replica**: one copy of the model, as in `tf.distribute`. Under all-reduce each rank has one: a replica's id is its
  rank, and `num_replicas_in_sync` is `size`.
- **chief**: rank 0, which logs and writes files. **worker**: a process that trains. **ps**: a parameter server, which
  holds variables. **coordinator**: the chief in asynchronous training, which dispatches steps to workers.
- **batch_size**: the rows of the user's batch. **global batch**: the rows of one step on all replicas.
  **num_shards**: how many ranks share an input. **shard_id**: this rank's number among them.
- **engine**: an implementation of the collectives (allreduce, broadcast, barrier, ...) on MPI, Horovod or TensorFlow.
- **gradient reducer**: sums gradients over the ranks, in **buckets** (messages) and with **compression** (half
  precision, PowerSGD, top-k). **Error feedback** adds what a compression left out to the next gradient.
- **gradient accumulation**: several batches per update. **Local SGD**: steps without a reduction (`no_sync`), after
  which the ranks average their weights.
- **buffer synchronisation**: merges what a step writes beside weights (batch norm's statistics, counters), as gradients
  are summed.
- **heartbeat**: the report that each rank sends every second. The **failure detector** reads it; **membership** is the
  set of tasks that are connected in asynchronous training.
- **state_dict**, **load_state_dict**: what a checkpoint has of an object. **Resume**: to continue a training from it.
  **Fingerprint**: a summary of the data, which ranks compare.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from kdist import _unscoped_fit

if TYPE_CHECKING:
    from kdist import callbacks, errors, testing
    from kdist._process import (
        barrier,
        chief_first,
        cluster_info,
        is_chief,
        local_rank,
        local_size,
        rank,
        size,
    )
    from kdist._scope import scope
    from kdist.cluster.info import ClusterInfo
    from kdist.launchers.functions.launch import launch
    from kdist.planning.plan import plan
    from kdist.strategies.collectives import all_gather, all_reduce
    from kdist.strategies.options import TPU, AllReduce, ParameterServer

__version__ = "0.3.0"

__all__ = [
    "AllReduce",
    "ClusterInfo",
    "ParameterServer",
    "TPU",
    "all_gather",
    "all_reduce",
    "barrier",
    "callbacks",
    "chief_first",
    "cluster_info",
    "errors",
    "is_chief",
    "launch",
    "local_rank",
    "local_size",
    "plan",
    "rank",
    "scope",
    "size",
    "testing",
]

# Public names and where they live. They are looked up when first used: `import kdist` loads neither TensorFlow nor MPI.
_HOMES = {
    "AllReduce": "kdist.strategies.options",
    "ClusterInfo": "kdist.cluster.info",
    "ParameterServer": "kdist.strategies.options",
    "TPU": "kdist.strategies.options",
    "all_gather": "kdist.strategies.collectives",
    "all_reduce": "kdist.strategies.collectives",
    "barrier": "kdist._process",
    "chief_first": "kdist._process",
    "cluster_info": "kdist._process",
    "is_chief": "kdist._process",
    "launch": "kdist.launchers.functions.launch",
    "local_rank": "kdist._process",
    "local_size": "kdist._process",
    "plan": "kdist.planning.plan",
    "rank": "kdist._process",
    "scope": "kdist._scope",
    "size": "kdist._process",
}


if not TYPE_CHECKING:  # type checkers would take any name for a public one

    def __getattr__(name: str) -> Any:
        if name in ("callbacks", "errors", "testing"):
            return importlib.import_module(f"kdist.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'kdist' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


# One of several ranks must not train by itself in silence, nor print what all print. Elsewhere this does nothing.
_unscoped_fit.watch(os.environ)
