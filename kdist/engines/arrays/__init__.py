"""The half of the engines that needs NumPy and the standard library only: messages of arrays."""
