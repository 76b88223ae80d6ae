"""Distribution strategies for Keras 3: an unchanged script trains on N processes exactly as on one.

```python
import keras, kdist

with kdist.scope():
    model = keras.Sequential([keras.layers.Dense(10)])
    model.compile(optimizer="sgd", loss="mse")
    model.fit(x, y)
```

The words, and how they join:

- **rank**, **size**: a process's number, and how many there are, as in MPI. **local_rank**, **local_size**: the same
  among the processes of one host. **root**: the rank whose value is taken.
- **replica**: one copy of the model, as in `tf.distribute`. Here each rank holds one: `num_replicas_in_sync` is `size`,
  and a replica's id is its rank.
- **chief**: rank 0, the process that speaks and writes files. **worker**: a process that trains. **ps**: one that holds
  variables.
- **batch_size**: the rows of the user's batch. **global_batch_size**: the rows of one step over all replicas.
  **per_replica_batch_size**: the rows that one replica sees of them. **num_data_shards** is `size`, **data_shard_id**
  the rank.
"""

import importlib
from typing import TYPE_CHECKING, Any

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
    from kdist.strategies.options import TPU, AllReduce, ParameterServer

__version__ = "0.1.0"

__all__ = [
    "AllReduce",
    "ClusterInfo",
    "ParameterServer",
    "TPU",
    "barrier",
    "callbacks",
    "chief_first",
    "cluster_info",
    "errors",
    "is_chief",
    "local_rank",
    "local_size",
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
    "barrier": "kdist._process",
    "chief_first": "kdist._process",
    "cluster_info": "kdist._process",
    "is_chief": "kdist._process",
    "local_rank": "kdist._process",
    "local_size": "kdist._process",
    "rank": "kdist._process",
    "scope": "kdist._scope",
    "size": "kdist._process",
}


def __getattr__(name: str) -> Any:
    if name in ("callbacks", "errors", "testing"):
        return importlib.import_module(f"kdist.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'kdist' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
