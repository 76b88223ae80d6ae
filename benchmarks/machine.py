"""What a benchmark was run on: the line that stands above its numbers."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine(*packages: str) -> str:
    """Returns one line on the machine, Python and the packages that are installed.

    Args:
        packages: str each, names of packages.
    """
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}, {versions(*packages)}"


def gpu() -> str:
    """Returns what NVIDIA's driver calls the machine's first GPU, and its own version."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return "a GPU"
    return "{}, driver {}".format(*lines[0].split(", "))


def versions(*packages: str) -> str:
    """Returns the names and versions of those packages that are installed."""
    found = []
    for name in packages:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
