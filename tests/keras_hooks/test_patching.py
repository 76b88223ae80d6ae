"""What is patched is put back; only what the table names is patched; ARCHITECTURE.md shows the table."""

import textwrap
from pathlib import Path

import keras
import pytest

from kdist.errors import KDistError
from kdist.keras_hooks.patching import METHODS, PATCHES, WRITING, patch, patched

ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"
BEGIN, END = "<!-- patches -->\n", "<!-- /patches -->"


def table() -> str:
    """Returns the table as ARCHITECTURE.md shows it: a paragraph for each time that patches last."""
    by_time: dict[str, dict[str, list[str]]] = {}
    for row in PATCHES:
        has_all_methods = set(METHODS) <= set(row.names)
        names = [f"`{name}`" for name in row.names if not has_all_methods or name not in METHODS]
        if has_all_methods:
            names.append("`fit` etc.")
        elif len(names) > 10 or row.names == WRITING:
            names = ["what it writes with"]
        owner = row.owner.rpartition(".")[2]
        kind = "" if row.place == "instance" else f" ({row.place})"
        texts = by_time.setdefault(row.until, {}).setdefault(f"`{owner}`{kind}", [])
        texts.append(f"{', '.join(names)}, to {row.why}")
    listed = {
        until: [f"{owner}: {'; also '.join(texts)}" for owner, texts in owners.items()]
        for until, owners in by_time.items()
    }
    several = [f"**{until}**. {'; '.join(rows)}." for until, rows in listed.items() if len(rows) > 1]
    single = " ".join(f"**{until}**. {rows[0]}." for until, rows in listed.items() if len(rows) == 1)
    return "".join(
        textwrap.fill(f"- {text}", 120, subsequent_indent="  ", break_on_hyphens=False) + "\n"
        for text in (*several, single)
    )


def test_architecture_shows_the_table():
    shown = ARCHITECTURE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown == table()


def test_a_method_of_the_class_comes_back():
    optimizer = keras.optimizers.SGD()
    with patched(optimizer, "apply", lambda: "mine"):
        assert optimizer.apply() == "mine"
    assert "apply" not in vars(optimizer)


def test_an_override_of_the_users_comes_back():
    optimizer, own = keras.optimizers.SGD(), lambda *_: "own"
    vars(optimizer)["apply"] = own
    with pytest.raises(RuntimeError), patched(optimizer, "apply", lambda: "mine"):
        raise RuntimeError
    assert vars(optimizer)["apply"] is own


def test_a_class_comes_back():
    before = keras.metrics.Mean.update_state
    with patched(keras.metrics.Mean, "update_state", print):
        assert keras.metrics.Mean.update_state is print
    assert keras.metrics.Mean.update_state is before


def test_an_object_takes_another_class_for_its_life():
    class Part(keras.Variable):
        pass

    variable = keras.Variable([1.0])
    patch(variable, "__class__", Part)
    assert type(variable) is Part


def test_what_lasts_for_a_time_is_not_replaced_for_a_life():
    with pytest.raises(KDistError, match="(?s)for its life.*Expected a row"):
        patch(keras.optimizers.SGD(), "update_step", print)
    assert all(row.place == "instance" for row in PATCHES if row.is_for_life)


def test_what_lasts_for_a_life_is_not_replaced_for_a_time():
    optimizer = keras.optimizers.SGD()
    with pytest.raises(KDistError, match="(?s)for a time.*Expected a row"), patched(optimizer, "built", print):
        pass
    row = next(row for row in PATCHES if row.names == ("save", "save_weights", "export"))
    assert row.is_for_life
    with pytest.raises(KDistError, match="for a time"), patched(keras.Sequential(), "export", print):
        pass


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (keras.optimizers.SGD(), "get_config"),
        (keras.optimizers.SGD, "apply"),
        (object(), "apply"),
        (keras, "Model"),
        (keras.optimizers.Optimizer, "update_step"),
    ],
)
def test_what_the_table_does_not_name_is_refused(owner, name):
    with pytest.raises(KDistError, match=r"(?s)Received.*Expected a row.*Fix"), patched(owner, name, None):
        pass
