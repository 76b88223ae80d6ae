"""The one file that imports `tensorflow.python`: what a `tf.distribute.Strategy` is made of.

TensorFlow has no public base classes for strategies. These are the ones that its own strategies use; they have
kept their names since TensorFlow 2.4.
"""

from tensorflow.python.data.experimental.ops.distribute import _AutoShardDataset as AutoShardDataset
from tensorflow.python.distribute.distribute_lib import ReplicaContext, StrategyExtendedV1
from tensorflow.python.distribute.distribute_lib import Strategy as Strategy
from tensorflow.python.eager.context import context as eager_context
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.framework.random_seed import get_seed

__all__ = [
    "AutoShardDataset",
    "ReplicaContext",
    "Strategy",
    "StrategyExtendedV1",
    "eager_context",
    "get_seed",
    "is_op_determinism_enabled",
]
