"""What is patched is put back; only what the table names is patched; ARCHITECTURE.md shows the table."""

import textwrap
from pathlib import Path

import keras
import pytest

from kdist.errors import KDistError
from kdist.keras_hooks.patching import PATCHES, VERBS, patched

ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"
BEGIN, END = "<!-- patches -->\n", "<!-- /patches -->"


def table() -> str:
    """Returns the table as ARCHITECTURE.md shows it: a paragraph for each time that patches last."""
    by_time: dict[str, dict[str, list[str]]] = {}
    for patch in PATCHES:
        has_all_verbs = set(VERBS) <= set(patch.names)
        names = [f"`{name}`" for name in patch.names if not has_all_verbs or name not in VERBS]
        if has_all_verbs:
            names.append("the verbs")
        elif len(names) > 10 or not names:
            names = ["what it writes with"]
        owner = patch.owner.rpartition(".")[2]
        texts = by_time.setdefault(patch.until, {}).setdefault(f"`{owner}` ({patch.place})", [])
        texts.append(f"{', '.join(names)}, to {patch.why}")
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
