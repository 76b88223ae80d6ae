import kdist

with kdist.scope(kdist.AllReduce(compression="fp8")):
    pass
