"""How many examples hypothesis tries of a property."""

from hypothesis import settings

share = 1
"""One of how many of them are tried: ``-m "not engine"`` tries a quarter, to answer soon."""


def examples(number: int) -> settings:
    """For a property that takes ``number`` examples when all tests are run."""
    return settings(max_examples=max(1, number // share))
