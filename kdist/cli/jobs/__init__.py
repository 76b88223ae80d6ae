"""The jobs of `kdist run`: their arguments, their command, and their attempts."""
