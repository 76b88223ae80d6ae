"""WHO AM I: pure functions of an environment mapping."""
