"""WHO STILL LIVES: what each rank is doing, told to the others beside the collectives, and what follows from it."""
