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


def test_what_a_check_says_stands_beside_its_outcome() -> None:
    campaign = Campaign()
    campaign.attempt("part", "first", "2 ranks", lambda: "after 3 s")
    assert "1 passed, 0 failed" in campaign.text()
    assert "| part | first | passed, after 3 s |" in campaign.text()
