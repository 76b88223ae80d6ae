"""Each feature of Keras' training once, N ranks against one process: a file a topic, found by being here."""

import importlib
import pkgutil

from tests.training.features.registry import FEATURES

for _topic in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_topic.name)

__all__ = ["FEATURES"]
