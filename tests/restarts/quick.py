"""Ranks that fail at once, without TensorFlow: `quick.py WAY FOLDER`. They say that they are in a scope."""

import os
import signal
import sys
import time
from pathlib import Path

from kdist.cluster import detect
from kdist.restarts.events import own_reports

way, folder = sys.argv[1:]
info = detect(os.environ)
Path(folder, f"pid{info.rank}").write_text(str(os.getpid()))
if way == "import":
    import no_such_module  # noqa: F401
own_reports.reached_scope()
if info.rank == 0 and way == "lose":
    while not Path(folder, "pid1").exists():
        time.sleep(0.05)
    for rank in range(info.size):  # of ranks on other hosts `kdist run` sees no files
        Path(str(own_reports.running), str(rank)).unlink(missing_ok=True)
    for process in (os.getppid(), os.getpid()):  # mpirun's daemon on this host, and what it has started
        os.kill(process, signal.SIGKILL)
if info.rank == 1 and way == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
