"""The one file that imports `tensorflow.python`: what a `tf.distribute.Strategy` is made of.

TensorFlow has no public base classes for strategies. These are the ones that its own strategies use; they have
kept their names since TensorFlow 2.4.
"""

from tensorflow.python.distribute.distribute_lib import ReplicaContext, Strategy, StrategyExtendedV1

__all__ = ["ReplicaContext", "Strategy", "StrategyExtendedV1"]
