"""Ranks that fail at once, without TensorFlow: `quick.py WAY FOLDER`. They say that they are in a scope."""

import os
import signal
import sys
import time
from pathlib import Path

from kdist.cluster import detect
from kdist.restarts.report import own_reports

way, folder = sys.argv[1:]
info = detect(os.environ)
Path(folder, f"pid{info.rank}").write_text(str(os.getpid()))
if way == "import":
    import no_such_module  # noqa: F401
own_reports.reached_scope()
if info.rank == 1 and way == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
