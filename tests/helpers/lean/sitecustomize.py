"""On the path of what the tests start: Python runs it first, and what it names counts as not installed.

TensorFlow and Keras import these if they are there, which few tests need: half of what starting a rank costs, and
starting ranks is most of what a run of the tests costs.
"""

import sys

sys.modules.update(dict.fromkeys(("jax", "matplotlib", "pandas", "scipy", "sklearn")))  # type: ignore[arg-type]
