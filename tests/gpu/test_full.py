"""The suite for GPUs: what it runs on which machine, and a part of it on CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from tests.gpu import full
from tests.gpu.parts import TARGET, Part, parts
from tests.helpers import spmd


def columns(found: list[Part]) -> list[tuple[str, str, str]]:
    return [
        (part.title, part.column, part.env["CUDA_VISIBLE_DEVICES"]) for part in found if "resumed" not in part.title
    ]


def test_without_a_gpu_all_is_on_cpus_and_nothing_asks_for_one() -> None:
    found = parts([], has_horovod=False)
    assert columns(found) == [
        ("one rank on CPUs", "one rank", "-1"),
        ("ranks share CPUs", "mpi, 2 ranks", "-1"),
        ("ranks share CPUs", "collective, 2 ranks", "-1"),
    ]
    assert not [name for part in found for name in part.names if "gpu" in name]


def test_one_gpu_is_shared() -> None:
    found = parts(["3"])
    assert {shown for _, _, shown in columns(found)} == {"3"}
    assert [column for title, column, _ in columns(found) if title == "ranks share a GPU"] == [
        "mpi, 2 ranks",
        "collective, 2 ranks",
        "horovod over gloo, 2 ranks",
    ]
    assert all("memory_grows" in part.names for part in found if part.title == "ranks share a GPU")


@pytest.mark.parametrize(
    ("has_nccl", "engines"), [(False, ["collective"]), (True, ["collective", "horovod over gloo"])]
)
def test_several_gpus_have_a_rank_each_over_nccl(has_nccl: bool, engines: list[str]) -> None:
    found = parts(["0", "1", "2"], horovod_has_nccl=has_nccl)
    each = [part for part in found if part.title == "a GPU each"]
    assert [part.column for part in each] == [f"{engine}, 3 ranks" for engine in engines]
    assert all(part.on.ranks == 3 and part.env["CUDA_VISIBLE_DEVICES"] == "0,1,2" for part in each)
    assert all("nccl_carries_gradients" in part.names for part in each)
    assert {shown for title, _, shown in columns(found) if title != "a GPU each"} == {"0"}


def test_each_case_exists() -> None:
    known = spmd.names(TARGET)
    assert not [name for part in parts(["0", "1"]) for name in part.names if name not in known]


def test_gpus_are_called_as_the_environment_does() -> None:
    assert full.visible_names(2, None) == ["0", "1"]
    assert full.visible_names(2, "3,GPU-5ebe,-1,6") == ["3", "GPU-5ebe"]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    assert full.main([]) == 2
    said = capsys.readouterr().err
    assert "No GPU to run on. Received: " in said
    assert "Fix: pip install 'tensorflow[and-cuda]'" in said
    assert "--device cpu" in said


def test_a_part_of_it_on_cpus(tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    cases = ["float32_as", "weights_and_slots", "case_broadcast_keeps", "mixed_precision", "steps_take"]
    assert full.main(["--device", "cpu", "--engines", "mpi", "--cases", *cases, "--out", str(out)]) == 0, (
        out.read_text()
    )
    table = out.read_text()
    assert "on no GPU: " in table
    assert "4 passed, 0 failed" in table
    assert "| ranks share CPUs | mixed_precision_scales_as_one | passed |" in table
