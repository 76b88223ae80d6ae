for _ in range(3):
    breakpoint()
