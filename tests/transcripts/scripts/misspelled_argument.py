import kdist

with kdist.scope(warm_up=3):
    pass
