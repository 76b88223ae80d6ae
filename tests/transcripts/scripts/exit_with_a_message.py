import sys

sys.exit("--epochs must be given")
