"""docs/reference/training-options.md says what the docstrings of the options say."""

from __future__ import annotations

from demo import options_page


def test_the_page_of_the_options_is_that_of_their_docstrings() -> None:
    assert options_page.PAGE.read_text() == options_page.text(), "run python -m demo.options_page"
