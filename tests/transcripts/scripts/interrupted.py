import os
import signal
import time

import kdist

if kdist.is_chief():
    print("1/16 - loss: 0.5", end="", flush=True)
    os.kill(int(os.environ["LAUNCHER"]), signal.SIGINT)  # as Ctrl-C in its terminal
time.sleep(300)
