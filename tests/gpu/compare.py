"""What requests generated, and how close two such results are."""

from collections.abc import Sequence
from dataclasses import dataclass

NUM_CANDIDATES = 5
"""Most likely tokens whose log-probabilities are compared at each step."""


differences: list[str] = []
"""How far what was compared is from what was expected, a line each; shown at the end, to set tolerances by."""


@dataclass(frozen=True)
class Tolerance:
    """Largest difference of log-probabilities, and the largest mean of a request's differences."""

    most: float
    mean: float


@dataclass(frozen=True)
class Generated:
    """A request's tokens, and at each of its steps the candidates' log-probabilities by token."""

    tokens: list[int]
    candidates: list[dict[int, float]]

    @classmethod
    def of(cls, output) -> "Generated":
        """Of one of vLLM's completions."""
        candidates = [{int(t): float(p.logprob) for t, p in step.items()} for step in output.logprobs]
        return cls(list(output.token_ids), candidates)

    @classmethod
    def parse(cls, fields: dict) -> "Generated":
        """From JSON, whose objects have no numbers as keys."""
        return cls(fields["tokens"], [{int(t): p for t, p in step.items()} for step in fields["candidates"]])


def assert_close(found: Generated, expected: Generated, tolerance: Tolerance, name: str) -> float:
    """Equal tokens and close log-probabilities, up to the first token that differs, which must be as good as tied.

    Returns the share of the steps that could be compared.
    """
    assert len(found.tokens) == len(expected.tokens), f"{name}: {len(found.tokens)} tokens, not {len(expected.tokens)}"
    gaps: list[float] = []
    lead = 0.0
    for position, (token, wanted) in enumerate(zip(found.tokens, expected.tokens, strict=True)):
        ours, theirs = found.candidates[position], expected.candidates[position]
        gaps.append(max((abs(ours[one] - theirs[one]) for one in ours.keys() & theirs.keys()), default=float("inf")))
        if token != wanted:
            lead = theirs[wanted] - theirs.get(token, -float("inf"))
            break
    most, mean = max(gaps), sum(gaps) / len(gaps)
    differences.append(f"{name}: {most:.3g}, {mean:.3g} on average, {len(gaps)} of {len(found.tokens)} tokens")
    first = next((position for position, gap in enumerate(gaps) if gap > tolerance.most), None)
    assert first is None, (
        f"{name}: log-probabilities differ by {gaps[first]:.3g} at token {first}, {most:.3g} at most, "
        f"{mean:.3g} on average of {len(gaps)}"
    )
    # Both sides may be off, in opposite directions.
    assert lead <= 2 * tolerance.most, f"{name}: token {len(gaps) - 1} differs, by {lead:.3g}"
    assert mean <= tolerance.mean, f"{name}: log-probabilities differ by {mean:.3g} on average"
    return len(gaps) / len(found.tokens)


def assert_all_close(
    found: Sequence[Generated], expected: Sequence[Generated], tolerance: Tolerance, name: str, least_share: float = 0.5
) -> None:
    """Each is close, and at least ``least_share`` of all steps could be compared. Tells of all that are not close."""
    shares, wrong = [], []
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        try:
            shares.append(assert_close(ours, theirs, tolerance, f"{name}, request {index}"))
        except AssertionError as error:
            wrong.append(str(error).partition("\n")[0])
    assert not wrong, f"{len(wrong)} of {len(found)} requests:\n" + "\n".join(wrong)
    assert sum(shares) / len(shares) >= least_share, f"{name}: only {sum(shares) / len(shares):.0%} were compared"
