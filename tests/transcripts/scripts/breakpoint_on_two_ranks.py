x = 41
breakpoint()
