import time

import kdist

if kdist.rank() > 0:
    raise FileNotFoundError("no such file: train.csv")
time.sleep(300)
