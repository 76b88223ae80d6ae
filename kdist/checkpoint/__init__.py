"""Save, resume and preempt: the callbacks, and the state of callbacks and data that they save."""
