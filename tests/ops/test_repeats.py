"""The newest repeat of each key, on every implementation, against loops in float64."""

import itertools

import pytest
import torch
from torch.nn.functional import normalize

from vllm_kvmerge.ops import cpu

THRESHOLDS = [0.0, 0.3, 0.5, 0.9, 1.0]

KINDS = ["random", "clusters", "half", "equal", "near"]


def drawn(kind, heads, n, d, threshold, seed, num_dead=0):
    """Keys of length 1, or 0 at first, of which few or many repeat each other; ``near``: none by much, or all but."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(heads, n, d, generator=generator)
    centres = torch.randn(heads, 7, d, generator=generator)
    of = torch.randint(0, 7, (heads, n), generator=generator).unsqueeze(-1).expand(-1, -1, d)
    if kind == "equal":
        keys = centres[:, :1].expand(-1, n, -1).clone()
    elif kind == "near":  # the product of any two is the share of what they have in common
        own = torch.linalg.qr(torch.randn(heads, max(n, d) + 1, max(n, d) + 1, generator=generator)).Q
        keys = own[:, :1] * threshold**0.5 + own[:, 1 : n + 1] * (1.0 - threshold) ** 0.5
    elif kind != "random":
        near = torch.rand(heads, n, 1, generator=generator) < (1.0 if kind == "clusters" else 0.5)
        keys = torch.where(near, centres.gather(1, of) + 0.4 * keys, keys)
    keys[:, :num_dead] = 0.0
    return normalize(keys, dim=-1)


def search(operators, keys, threshold, rows):
    """``newest_repeats`` for so many entries at a time."""
    heads, n, _ = keys.shape
    found = torch.full((heads, n), -1)
    products = torch.full((heads, n), torch.nan)
    for stop in range(n, 0, -rows):
        start = max(0, stop - rows)
        products[:, start:stop] = operators.newest_repeats(keys, threshold, found, start, stop)
    return found, products


def check(keys, threshold, found, products):
    """That what was found is the newest, but for entries whose products rounding may lift or lower."""
    exact = keys.double() @ keys.double().transpose(1, 2)
    slack = 1e-6
    heads, n, _ = keys.shape
    for head in range(heads):
        for i, j in enumerate(found[head].tolist()):
            others = exact[head, i].clone()
            others[i] = -1.0
            if j >= 0:
                assert j != i and others[j] > threshold - slack
                assert abs(others[j] - products[head, i]) < slack
            else:
                assert products[head, i] == 0.0
            assert not (others[j + 1 :] > threshold + slack).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize(
    ("n", "d", "rows"),
    [(300, 64, 300), (300, 64, 67), (1300, 64, 200), (129, 24, 128), (65, 33, 9), (64, 130, 64), (7, 3, 2), (1, 5, 1)],
)
def test_newest_repeats(operators, kind, threshold, n, d, rows):
    keys = drawn(kind, 2, n, d, threshold, seed=n + d, num_dead=n // 8)
    check(keys, threshold, *search(operators, keys, threshold, rows))


def test_products_at_the_threshold_are_no_repeats(operators):
    """Of keys whose products are exact: one that equals the threshold, and the next number above it."""
    keys = torch.zeros(1, 4, 8)
    keys[0, 0, 0] = keys[0, 1, 0] = keys[0, 2, 1] = 1.0
    keys[0, 3, 0] = 0.5
    keys[0, 3, 1] = 0.5 + 2**-24
    found, products = search(operators, keys, 0.5, 4)
    assert found.tolist() == [[1, 0, 3, 2]] and products.tolist() == [[1.0, 1.0, 0.5 + 2**-24, 0.5 + 2**-24]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_keys_that_are_no_numbers(operators, value):
    """They repeat nothing, unless they are merely large, and spoil no others."""
    keys = drawn("clusters", 2, 150, 48, 0.5, seed=4)
    expected = search(operators, keys[:, torch.arange(150) != 140], 0.5, 149)[0]
    keys[:, 140] = torch.nan if value == torch.inf else value
    found, _ = search(operators, keys, 0.5, 60)
    assert found.min() >= -1 and found.max() < 150
    if value == 1e30:
        return
    assert (found[:, 140] == -1).all() and not (found == 140).any()
    others = found[:, torch.arange(150) != 140]
    assert torch.equal(others - (others > 140).long(), expected)


def test_heads_and_threads_do_not_change_what_is_found(operators):
    keys = drawn("half", 4, 400, 64, 0.5, seed=2)
    before = torch.get_num_threads()
    whole = search(operators, keys, 0.5, 400)
    try:
        torch.set_num_threads(3)
        for part, rows in itertools.product((slice(0, 4), slice(1, 2), slice(2, 4)), (400, 130)):
            for one, other in zip(search(operators, keys[part], 0.5, rows), whole, strict=True):
                assert torch.equal(one, other[part])
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not cpu.LIBRARY.exists(), reason="the native operators are not built")
def test_what_would_lie_elsewhere_is_refused():
    keys, found = torch.randn(2, 9, 8), torch.full((2, 9), -1)
    good = {"threshold": 0.5, "found": found, "start": 0, "stop": 9}
    for wrong in (
        *({"start": start, "stop": stop} for start, stop in ((-1, 5), (5, 4), (3, 10))),
        *({"found": other} for other in (found[:1], found.int(), found.T, found + 10, found - 1)),
        *({"threshold": threshold} for threshold in (-0.1, float("nan"))),
    ):
        with pytest.raises((ValueError, TypeError, IndexError, RuntimeError)):
            cpu.newest_repeats(keys, **good | wrong)
