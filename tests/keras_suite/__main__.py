"""Runs Keras' own tests plainly and on several ranks in the scope, and tells what passes only plainly.

`bash tests/run --keras --ranks 2 --out FILE` downloads the source distribution of the installed Keras, which has the
tests, and calls this module. What is expected to differ, and why, is in `expected.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from tests.helpers import spmd
from tests.keras_suite.expected import reason

FOLDERS = ("trainers", "callbacks", "losses", "metrics", "models", "saving", "optimizers", "layers", "export")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if all tests that pass plainly pass on the ranks, but for those that are expected to differ."""
    parser = argparse.ArgumentParser(prog="bash tests/run --keras", description=__doc__)
    parser.add_argument("source", type=Path, help="the source distribution of the installed Keras")
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--only", nargs="+", default=FOLDERS, metavar="PATH", help="folders or files in keras/src")
    parser.add_argument("--all", action="store_true", help="run those that are expected to differ, too")
    parser.add_argument("--out", type=Path, help="where the table goes; shown as well")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds a launch may take")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="keras-suite-") as folder:
        with tarfile.open(options.source) as tar:
            tar.extractall(folder, filter="data")
        root = Path(folder, f"keras-{keras.__version__}", "keras", "src")
        lines, wrong = [], 0
        for name, group in itertools.groupby(files_of(root, options.only), key=lambda file: Path(file).parent):
            files = list(group)
            print(name, file=sys.stderr, flush=True)
            plain = run(root, files, ranks=1, timeout=options.timeout)
            passed = [test for test, result in plain.items() if result["outcome"] == "passed"]
            # Each of the others would end the job, and the rest of the folder need another one.
            todo = passed if options.all else [test for test in passed if not reason(test)]
            found = run(root, files, ranks=options.ranks, timeout=options.timeout, tests=todo) if todo else {}
            failed = {test: found[test]["why"] for test in todo if found[test]["outcome"] != "passed"}
            for file in files:
                if not any(test.startswith(f"{file}::") for test in plain) and not reason(file):
                    wrong += 1
                    print(f"--- {file}\nno test of it ran in one process", file=sys.stderr)
                of_file = [test for test in passed if test.startswith(f"{file}::")]
                equal = sum(test in todo and test not in failed for test in of_file)
                surprises = [test for test in of_file if test in failed and not reason(test)]
                wrong += len(surprises)
                why = "; ".join(sorted({reason(test) for test in of_file} - {""}))
                lines.append(f"| {file} | {len(of_file)} | {equal} | {why} |")
                for test in surprises:
                    print(f"--- {test}\n{failed[test]}", file=sys.stderr, flush=True)
            if options.out:  # so far
                options.out.write_text(_text(lines, options.ranks))
    print(_text(lines, options.ranks))
    return 1 if wrong else 0


def _text(lines: Sequence[str], ranks: int) -> str:
    head = ["| file | pass plainly | pass on the ranks | why others differ |", "|---|---:|---:|---|"]
    return "\n".join([f"# Keras {keras.__version__}'s own tests on {ranks} ranks", "", *head, *lines, ""])


def files_of(root: Path, only: Sequence[str]) -> list[str]:
    """Returns the files of tests, as paths in `keras/src`."""
    found = {
        path for name in only for path in ([root / name] if name.endswith(".py") else (root / name).rglob("*_test.py"))
    }
    return sorted(str(path.relative_to(root)) for path in found)


def run(
    root: Path,
    files: Sequence[str],
    *,
    ranks: int,
    timeout: float,
    tests: Sequence[str] | None = None,
    packages: Mapping[str, str] = spmd.EVERY_PACKAGE,
) -> dict[str, dict[str, Any]]:
    """Runs tests, in one process plainly or on ranks in the scope; a test that ends the job has failed.

    Returns:
        The result of each test by its name: `outcome`, and `why` if that is not `"passed"`.
    """
    results: dict[str, dict[str, Any]] = {}
    todo = None if tests is None else list(tests)
    while todo is None or todo:
        with tempfile.TemporaryDirectory(prefix="keras-suite-") as folder:
            request = Path(folder, "request.json")
            out = Path(folder, "{rank}.jsonl")
            request.write_text(json.dumps({"tests": todo, "ranks": ranks, "out": str(out)}))
            options = "-p tests.keras_suite.plugin -p no:cacheprovider -p no:randomly --import-mode=importlib"
            options += f" --rootdir {root} -c /dev/null -W ignore -q --color=no --continue-on-collection-errors"
            command = [sys.executable, "-m", "pytest", *options.split(), *(str(root / file) for file in files)]
            path = os.pathsep.join(filter(None, (str(spmd.ROOT), packages["PYTHONPATH"])))
            env = {**packages, "PYTHONPATH": path, "KERAS_SUITE": str(request)}
            if ranks == 1:
                done = spmd.execute(command, env={**spmd.RANK_ENVIRONMENT, **env}, timeout=timeout)
            else:
                done = spmd.launch(command, ranks, env=env, timeout=timeout)
            found = [_lines(Path(str(out).replace("{rank}", str(rank)))) for rank in range(ranks)]
        last = ""  # that has begun
        for lines in found:
            for line in lines:
                last = last if line["when"] == "collected" else line["test"]
                if "outcome" in line:
                    before = results.get(line["test"], {"outcome": "passed"})
                    results[line["test"]] = line if before["outcome"] == "passed" else before
        if ranks == 1:
            break
        if todo is None:
            todo = list(dict.fromkeys(line["test"] for lines in found for line in lines))
        why = f"the job ended with {done.returncode}\n{done.output[-1500:]}"
        if not last:
            return {**results, **{test: {"outcome": "failed", "why": f"before its first test {why}"} for test in todo}}
        ended = set.intersection(*({line["test"] for line in lines if line["when"] == "ends"} for lines in found))
        todo = [test for test in todo if test not in ended]
        if todo and (not ended or last in todo):  # the job has ended within a test
            blamed = last if last in todo else todo[0]
            if results.get(blamed, {"outcome": "passed"})["outcome"] == "passed":
                results[blamed] = {"outcome": "failed", "why": why}
            todo.remove(blamed)
    return results


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


if __name__ == "__main__":
    sys.exit(main())
