"""One training, test or predict step: the update pipeline, losses, metrics, buffers, local SGD."""
