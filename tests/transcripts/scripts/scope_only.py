import kdist

with kdist.scope():
    pass
