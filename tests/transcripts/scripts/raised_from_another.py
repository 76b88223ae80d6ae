raise RuntimeError("boom") from ValueError("cause")
