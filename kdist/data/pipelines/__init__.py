"""Pipelines of `tf.data` made again: in one order on all ranks, and with what follows for own samples only."""
