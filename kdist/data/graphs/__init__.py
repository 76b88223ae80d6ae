"""The graphs of `tf.data` pipelines: their order, their random operations, their steps."""
