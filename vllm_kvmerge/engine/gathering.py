"""Compressions that wait a few steps for others, so that all of them are one batch from then on.

A batch costs a millisecond or two beside what its entries cost, and requests that generate are compressed every
``interval`` tokens: those that come a few steps apart once do so for ever. Waiting changes nothing but when a request's
next token comes, because a request computes nothing while its compression is due.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

MAX_STEPS = 4
"""Steps that a compression waits at most, and at most a quarter of its interval."""


@dataclass(frozen=True)
class NextCompression:
    """A compression of a request that generates. batch: equal for those that can be one batch. steps: until it is due;
    0: it is. waited: steps since. most: that it may wait."""

    batch: Hashable
    steps: int
    waited: int
    most: int


def held_back(compressions: Mapping[str, NextCompression]) -> set[str]:
    """Requests whose compression is due and waits for others: all of a batch, until the first has waited too long."""
    held = set[str]()
    for batch in {one.batch for one in compressions.values()}:
        steps = {request_id: one for request_id, one in compressions.items() if one.batch == batch}
        due = {request_id: one for request_id, one in steps.items() if one.steps == 0}
        patience = min((one.most - one.waited for one in due.values()), default=0)
        if any(0 < one.steps <= patience for one in steps.values()):
            held |= due.keys()
    return held
