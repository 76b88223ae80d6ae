"""What a campaign leaves: its table so far, after each check."""

from pathlib import Path

from tests.helpers.campaign import Campaign


def fails() -> None:
    raise AssertionError("why it failed")


def test_the_table_grows_with_each_check(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "table.md")
    campaign.attempt("part", "first", "2 ranks", lambda: None)
    assert "1 passed, 0 failed" in (tmp_path / "table.md").read_text()
    campaign.attempt("part", "first", "3 ranks", fails)
    table = (tmp_path / "table.md").read_text()
    assert "1 passed, 1 failed" in table
    assert "| part | first | passed | failed |" in table
    assert "why it failed" in table
    assert campaign.text() == table
    assert len(campaign.errors) == 1
