"""Keras callbacks for training on several ranks; `kdist.callbacks`."""

from kdist.callbacks.chief_only import ChiefOnly
from kdist.callbacks.learning_rate_schedule import LearningRateSchedule
from kdist.callbacks.learning_rate_warmup import LearningRateWarmup
from kdist.callbacks.metric_average import MetricAverage
from kdist.callbacks.nan_policy import NaNPolicy
from kdist.callbacks.replica_check import ReplicaCheck
from kdist.callbacks.throughput import Throughput
from kdist.checkpoint.backup_and_restore import BackupAndRestore
from kdist.checkpoint.preemption import Preemption

__all__ = [
    "BackupAndRestore",
    "ChiefOnly",
    "LearningRateSchedule",
    "LearningRateWarmup",
    "MetricAverage",
    "NaNPolicy",
    "Preemption",
    "ReplicaCheck",
    "Throughput",
]
