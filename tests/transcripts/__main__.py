"""Writes what is expected, `python -m tests.transcripts NAME...`, of all mistakes without a name. Read what changed."""

import sys

from tests.transcripts.mistakes import EXPECTED, MISTAKES, transcript

for name in sys.argv[1:] or MISTAKES:
    text = transcript(name)
    (EXPECTED / f"{name}.txt").write_text(text)
    print(f"--- {name}\n{text}", flush=True)
