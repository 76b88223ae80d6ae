"""The graphs of `tf.data` pipelines: their operations, functions, seeds, options, and what they begin with."""
