"""Mirrored, TPU and the user's own strategy: entered as they are, with batch and learning rate scaled."""

from __future__ import annotations

import sys

from tests.helpers import spmd


def run(call: str, **env: str) -> spmd.Finished:
    code = f"from tests.tf_strategies.passed_through_cases import *; {call}; print('passed')"
    finished = spmd.execute([sys.executable, "-c", code], env={**spmd.RANK_ENVIRONMENT, **env}, timeout=180)
    assert finished.output.strip().endswith("passed"), finished.output
    return finished


def test_mirrored_equals_one_process() -> None:
    assert "2 replicas train in this process by TensorFlow's MirroredStrategy" in run("mirrored()").output


def test_the_users_own_strategy() -> None:
    run("the_users_own()")


def test_a_tpu_is_connected_to_and_initialised_once() -> None:
    run("tpu_calls()", TPU_NAME="my-tpu")


def test_no_tpu_is_an_error_in_time() -> None:
    nobody = r"(?s)while connecting to grpc://127.0.0.1:9: ConnectionRefusedError.*TPU named 'grpc://127.0.0.1:9'.*Fix"
    local = r"(?s)while initialising the TPU system: NotFoundError.*TPU named 'local'"
    name = r"while looking up the TPU 'no-such-tpu': "
    calls = [("no-such-tpu", name), ("local", local), ("grpc://127.0.0.1:9", nobody)]
    finished = run("; ".join(f"no_tpu(*{call!r})" for call in calls))
    assert finished.seconds < 120
