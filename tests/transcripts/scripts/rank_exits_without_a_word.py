import os
import time

import kdist

if kdist.rank() == 1:
    os._exit(5)
time.sleep(300)
