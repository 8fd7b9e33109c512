"""Index arithmetic on every implementation, against plain loops."""

import math

import pytest
import torch

from tests.ops.conftest import complete
from vllm_kvmerge.ops import cpu, reference

SIZES = [1, 2, 15, 16, 17, 64, 100, 816]
LAST = torch.iinfo(torch.int64).max


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def largest_by_sorting(ranking, count):
    """By Python's sort: larger first, of equal ones the lower index. count: one for all rows, or a tensor."""
    mask = torch.zeros(ranking.shape, dtype=torch.bool)
    counts = count.tolist() if isinstance(count, torch.Tensor) else [count] * len(mask)
    for row, values, most in zip(mask, ranking.tolist(), counts, strict=True):
        order = sorted(range(len(values)), key=lambda i: (-values[i], i))
        row[order[: max(0, most)]] = True
    return mask


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", ["float", "few", "signs", "positions", "wide"])
def test_the_largest_are_marked(operators, n, kind):
    ranking = {
        "float": torch.randn(3, n) * 1e30,
        "few": torch.randint(-1, 3, (3, n)).float(),
        "signs": torch.randint(-1, 2, (3, n)) * torch.tensor(0.0),  # 0 and -0 are equal
        "positions": torch.randint(-1, 99, (3, n)).masked_fill(torch.arange(n) % 5 == 4, LAST),
        "wide": torch.randint(-(2**50), 2**50, (3, n)),
    }[kind]
    if kind == "few":
        ranking[torch.rand(3, n) < 0.2] = torch.inf
        ranking[torch.rand(3, n) < 0.2] = -torch.inf
    for count in {-1, 0, 1, n // 2, n - 1, n, n + 1}:
        assert torch.equal(operators.largest(ranking, count), largest_by_sorting(ranking, count))
    counts = torch.tensor([n // 3, -1, n + 1])
    assert torch.equal(operators.largest(ranking, counts), largest_by_sorting(ranking, counts))
    columns = torch.empty(n, 3, dtype=ranking.dtype).copy_(ranking.T).T  # not contiguous
    assert torch.equal(operators.largest(columns, n // 2), largest_by_sorting(ranking, n // 2))


@pytest.mark.parametrize("n", SIZES)
def test_sinks_and_newest(operators, n):
    positions = torch.rand(3, n).argsort(1) + torch.tensor([[0], [2], [2**33]])
    positions[torch.rand(3, n) < 0.3] = -1
    positions[2] = -1
    for count in (0, 1, n // 2, n, n + 1, torch.tensor([n // 3, 0, n + 1])):
        counts = count.tolist() if isinstance(count, torch.Tensor) else [count] * 3
        for num_sinks in (0, 3, n + 3):
            found = operators.newest(positions, count, num_sinks)
            for mask, row, some in zip(found.tolist(), positions.tolist(), counts, strict=True):
                chosen = set(sorted(row)[max(0, n - some) :]) | set(range(num_sinks))
                assert mask == [p >= 0 and p in chosen for p in row]


@pytest.mark.parametrize("n", SIZES)
def test_protected_and_dead_entries_are_outside_of_the_ranking(operators, n):
    ranking = torch.randn(3, n)
    for special in (torch.nan, torch.inf, -torch.inf, torch.finfo(torch.float32).max):
        ranking[torch.rand(3, n) < 0.1] = special
    protected, is_live = torch.rand(3, n) < 0.2, torch.rand(3, n) < 0.8
    limit = torch.finfo(torch.float32).max
    order = ranking.double().nan_to_num(nan=-limit, posinf=limit, neginf=-limit)
    order = order.masked_fill(protected, torch.inf).masked_fill(~is_live, -torch.inf)
    for count in (0, 1, n // 2, n - 1, n, torch.tensor([n, n // 2, 1])):
        assert torch.equal(operators.top(ranking, protected, is_live, count), largest_by_sorting(order, count))


@pytest.mark.parametrize("n", SIZES)
def test_what_is_kept_stays_in_place(operators, n):
    for count in {0, 1, n // 2, n}:
        mask = largest_by_sorting(torch.rand(4, n), count)
        index = operators.in_place(mask, count)
        for row, kept in zip(index.tolist(), mask, strict=True):
            behind = iter(kept.nonzero().flatten().tolist()[int(kept[:count].sum()) :])
            assert row == [i if kept[i] else next(behind) for i in range(count)]
    counts = torch.tensor([0, n // 2, n // 3, n])
    mask = largest_by_sorting(torch.rand(4, n), counts)
    index = operators.in_place(mask, counts, n)
    for row, alone, count in zip(index, mask, counts.tolist(), strict=True):
        assert torch.equal(row[:count], operators.in_place(alone[None], count)[0])
        assert (row[count:] == -1).all()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("largest", [1, 200, 60_000, 2**40])
def test_order_of_positions(operators, n, largest):
    positions = torch.randint(-1, largest, (3, n))
    if largest == 2**40 and operators is not cpu:
        positions %= 2**31  # a position of a sequence fits in 32 bits; the reference asks for that
    assert torch.equal(operators.by_position(positions), positions.argsort(dim=1, stable=True))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_places_of_a_mask_and_inverses(operators, n, share):
    mask = torch.rand(4, n) < share
    mask[2] = False
    rows = [row.nonzero().flatten().tolist() for row in mask]
    most = max(len(row) for row in rows)
    for width in (None, most, most + 3):
        index = operators.padded_nonzero(mask, width)
        size = most if width is None else width
        assert index.shape == (4, size) and index.tolist() == [row + [-1] * (size - len(row)) for row in rows]
    expected = [[row.index(i) if i in row else -1 for i in range(n + 2)] for row in rows]
    assert operators.inverse(index, n + 2).tolist() == expected
    assert operators.padded_nonzero(mask[:0]).shape == (0, 0)
    assert (operators.inverse(index[:, :0], 5) == -1).all()


@pytest.mark.parametrize("n", SIZES)
def test_empty_places_hold_nothing(operators, n):
    positions = torch.randint(-1, 3, (3, n))
    kept = torch.randint(-1, n, (3, n))
    kept[:, ::2] = torch.arange(n)[::2]
    planes = [kept, *torch.randn(3, 3, n)]
    before = [plane.clone() for plane in planes]
    found = operators.empty_places(positions, *planes)
    is_empty, stays = positions == -1, torch.where(kept == torch.arange(n), kept, -1)
    for plane, old, blank in zip(found, before, (stays, -torch.inf, 0.0, 0.0), strict=True):
        assert torch.equal(plane, torch.where(is_empty, blank, old))
    assert all(map(torch.equal, planes, before))


def split_by_hand(shares, total, least, most):
    """One after the other: the largest that are left go to their heads."""
    counts = [least] * len(shares)
    ranked = [sorted(row, reverse=True)[:most] for row in shares.tolist()]
    while sum(counts) < total:
        open_heads = [h for h, row in enumerate(ranked) if counts[h] < len(row)]
        best = min(open_heads, key=lambda h: (-ranked[h][counts[h]], counts[h], h))
        counts[best] += 1
    return counts


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", ["float", "few", "equal"])
def test_a_budget_is_split_over_heads(operators, n, kind):
    shares = {
        "float": torch.randn(2, 5, n) * torch.rand(2, 5, 1),
        "few": torch.randint(-1, 3, (2, 5, n)).float(),
        "equal": torch.zeros(2, 5, n),
    }[kind]
    for budget in {1, n // 3, n // 2, n - 1, n} - {0}:
        for least, most in {(0, n), (budget // 5, 2 * budget), (budget, budget), (min(1, budget), budget + 1)}:
            counts = operators.split_budget(shares, 5 * budget, least, most)
            assert counts.tolist() == [split_by_hand(layer, 5 * budget, least, most) for layer in shares]


@pytest.mark.skipif(not cpu.LIBRARY.exists(), reason="the native operators are not built")
def test_what_does_not_fit_raises():
    mask, nothing = torch.tensor([[True, False, True], [False, True, True]]), torch.full((1, 3), -1)
    one, three = torch.zeros(1, 1), torch.zeros(1, 3)
    for message, operator, *arguments in (
        ("at most 1", cpu.in_place, mask, 1),
        ("4 of 3", cpu.in_place, mask, 4),
        ("more than 1", cpu.padded_nonzero, mask, 1),
        ("not below 2", cpu.inverse, torch.tensor([[0, 2]]), 2),
        ("2 heads of 5 entries, 1 to 3 each", cpu.split_budget, torch.zeros(1, 2, 5), 7, 1, 3),
        ("does not fit", cpu.free_places, torch.tensor([[0, 1, 2]]), torch.tensor([[7, 8, 9]]), 2),
        ("does not fit", cpu.free_places, torch.tensor([[1, 1]]), torch.tensor([[7, 8]]), 2),
        ("not among 3", cpu.take, torch.tensor([[0, 3]]), [three, torch.zeros(1, 4)], [0.0, 0.0]),
        ("at most 1 take", cpu.hand_over, torch.arange(3)[None], torch.tensor([[-1, -1, 0]]), nothing < 0, three, 1),
        ("must list all of 3", cpu.hand_over, torch.tensor([[0, 1, 3]]), nothing, nothing < 0, three, 3),
        ("negative for 1 entries", cpu.line_up, nothing, nothing, three, three, 1),
        ("not among 2", cpu.list_joined, torch.tensor([[0, 2]]), mask[:1, :2], 2),
        ("not among 2", cpu.mix_in, torch.zeros(1, 3, 4), torch.tensor([[0, -1, 2]]), three, torch.zeros(1, 2, 4)),
        ("there must be a slot", cpu.join_slots, torch.zeros(1, 0, 8), torch.zeros(1, 1, 8), one, one[:, :0]),
        ("not among 3", cpu.overflowing, torch.tensor([[0, 3]]), three, None, None, torch.half),
    ):
        with pytest.raises((ValueError, IndexError, TypeError), match=message):
            operator(*arguments)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN, in Triton's interpreter
def test_a_member_joins_the_first_slot_whose_product_is_no_number(operators):
    keys, joining = torch.ones(1, 40, 16), torch.ones(1, 20, 16)
    assert operators.join_slots(keys, joining, torch.zeros(1, 20), torch.ones(1, 40))[0].eq(0).all()  # of equal ones
    keys[0, 21:23, 3] = torch.nan
    joined, weights = operators.join_slots(keys, joining, torch.ones(1, 20), torch.ones(1, 40))
    assert joined.min() >= 0 and joined.max() < 40 and weights.sum() == 60
    if operators in (reference, cpu):  # Triton's only stays inside
        assert joined.eq(21).all() and weights[0, 21] == 21.0


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("decay", [1e-5, 0.5, 0.9, 0.99, 1 - 1e-5])
def test_contributions_are_averages_without_their_bias(operators, n, decay):
    """Against float64, wherever a^t is near 0 or 1; entries that no query has scored have none."""
    log_votes, scores = (torch.randn(4, n) * 3 for _ in range(2))
    counts = torch.randint(0, 40, (4, n)).float()
    counts[1], counts[2] = counts[1] * 100, torch.arange(n) % 2
    log_votes[3, ::3] = -torch.inf
    found = operators.log_contributions(log_votes, scores, counts, decay)
    corrected = scores.double() - torch.log(-torch.expm1(counts.double() * math.log(decay)))
    expected = torch.where(counts > 0, log_votes.double() + corrected, -torch.inf)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("n", SIZES)
def test_live_entries_are_counted(operators, n):
    positions = torch.randint(-1, 9, (5, n))
    positions[0], positions[1] = -1, 1 << 40
    assert operators.num_live(positions).tolist() == [sum(one >= 0 for one in row) for row in positions.tolist()]


@pytest.mark.parametrize("n", SIZES)
def test_what_has_no_place_gets_a_free_one(operators, n):
    """Unless it is dead: then it has none, and takes none from those behind it, however few there are."""
    index = torch.rand(3, 2 * n).argsort(1)[:, :n]
    index[torch.rand(3, n) < 0.1] = -1
    positions = torch.randint(9, (3, n))
    is_dead = torch.rand(3, n) < torch.tensor([[0.0], [0.3], [1.0]])
    most = int((~is_dead).sum(1).max())
    for num_places, dead in ((n, is_dead), (n + 5, is_dead), (most, is_dead), (n, is_dead & False)):
        found = operators.free_places(index, positions.masked_fill(dead, -1), num_places)
        for row, gone, places in zip(index.tolist(), dead.tolist(), found.tolist(), strict=True):
            free = iter(sorted(set(range(num_places)) - {i for i, no in zip(row, gone, strict=True) if not no}))
            expected = [-1 if no else i if 0 <= i < num_places else next(free) for i, no in zip(row, gone, strict=True)]
            assert places == expected


@pytest.mark.parametrize("n", SIZES)
def test_changes_of_two_updates_are_those_of_both(operators, n):
    """The later one's, and of the earlier one's those in places that still hold such an entry."""
    operators = complete(operators)

    def some(size, count, missing):
        index = torch.rand(3, size).argsort(1)[:, :count]
        return index.masked_fill(torch.rand(3, count) < missing, -1)

    num_places = max(1, n // 2)
    kept, changed, earlier = some(n, num_places, 0.1), some(num_places, num_places // 3, 0.2), some(n, n // 2, 0.2)
    positions = torch.randint(-1, 4, kept.shape)
    expected = []
    for row in range(3):
        before = {e: len(changed[row]) + i for i, e in enumerate(earlier[row].tolist()) if e >= 0}
        held = {place: e for place, e in enumerate(kept[row].tolist()) if e >= 0 and positions[row, place] >= 0}
        found = {place: before[e] for place, e in held.items() if e in before}
        found |= {place: i for i, place in enumerate(changed[row].tolist()) if place >= 0}
        expected.append(sorted(found.items()))
    most = max(map(len, expected))
    for width in (None, most, num_places):
        places, rows = operators.join_changes(kept, positions, changed, earlier, n, width)
        assert places.shape == rows.shape and places.shape[1] >= most
        for mine, theirs, pairs in zip(places.tolist(), rows.tolist(), expected, strict=True):
            behind = [(-1, -1)] * (len(mine) - len(pairs))
            assert [*zip(mine, theirs, strict=True)] == pairs + behind
    sizes = changed.shape[1], earlier.shape[1]
    own, others = (torch.randn(3, size, 24) for size in sizes)
    taken = operators.take_rows(rows, own, others)
    together = torch.cat([own, others, torch.zeros(3, 1, 24)], 1)
    assert torch.equal(taken, torch.stack([part[index] for part, index in zip(together, rows, strict=True)]))


@pytest.mark.parametrize(("members", "slots"), [(0, 3), (1, 1), (5, 3), (16, 100), (17, 9), (50, 33)])
def test_members_join_the_slots_of_largest_product(operators, members, slots):
    """Against means of keys, slot by slot, in float64."""
    keys, means = torch.randn(3, members, 24), torch.randn(3, slots, 24)
    weights = torch.randint(0, 4, (3, members)).float()
    before = torch.randint(1, 9, (3, slots)).float()
    before[1, : slots // 2] = 0.0  # no such slots
    arguments = means, keys, weights, before
    copies = [tensor.clone() for tensor in arguments]
    joined, total = operators.join_slots(*arguments)
    assert all(torch.equal(one, other) for one, other in zip(arguments, copies, strict=True))
    means, expected = means.double(), before.clone()
    for head in range(3):
        for i in range(members):
            products = (means[head] @ keys[head, i].double()).masked_fill(before[head] == 0, -torch.inf)
            slot = int(products.argmax())
            assert joined[head, i] == slot
            expected[head, slot] += weights[head, i]
            means[head, slot] += weights[head, i] / expected[head, slot] * (keys[head, i] - means[head, slot])
    assert torch.equal(total, expected)


@pytest.mark.parametrize("has_others", [False, True])
def test_planes_are_taken_together(operators, has_others):
    """Single elements, and runs of elements that follow each other, which end where planes and index do, or in none.
    has_others: dtypes that CPU operators leave to the reference."""
    planes = [torch.randn(3, 50), torch.randint(-9, 9, (3, 50))]
    planes += [torch.randn(50, 3).T, *([planes[0].double()] if has_others else [])]
    blanks = [-torch.inf, -1, 0.0, 7.0][: len(planes)]
    index = torch.randint(-1, 50, (3, 70))
    for row, (first, length) in enumerate([(0, 50), (45, 5), (7, 13)]):
        index[row, 9 : 9 + length] = torch.arange(first, first + length)
        index[row, 70 - length % 50 :] = torch.arange(50 - length % 50, 50)
    index[:, 12:15] = -1
    for taken, plane, blank in zip(operators.take(index, planes, blanks), planes, blanks, strict=True):
        rows = zip(plane.tolist(), index.tolist(), strict=True)
        assert taken.tolist() == [[blank if i < 0 else row[i] for i in some] for row, some in rows]
        assert taken.dtype == plane.dtype


@pytest.mark.parametrize("n", [1, 50, 2100])
def test_planes_get_new_elements(operators, n):
    planes = [torch.randn(3, n), torch.randint(-9, 9, (3, n))]
    planes += [torch.randn(n, 3).T, planes[1] + 1, planes[0] + 1.0]
    count = max(1, n // 3)
    index = torch.rand(3, n).argsort(1)[:, :count]
    index[torch.rand(3, count) < 0.3] = -1
    new = [(torch.randn(3, count) * 9).to(plane.dtype) for plane in planes]
    copies = [plane.clone() for plane in planes]
    put = getattr(operators, "put", reference.put)
    row, place = (index >= 0).nonzero(as_tuple=True)
    for changed, plane, fresh in zip(put(index, planes, new), planes, new, strict=True):
        expected = plane.clone()
        expected[row, index[row, place]] = fresh[row, place]
        assert torch.equal(changed, expected) and changed.dtype == plane.dtype
    assert all(map(torch.equal, planes, copies))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_places_that_overflow_are_listed(operators, dtype):
    """What rounds to infinity, at the very limit of the dtype, NaN, and votes that are infinite or no number."""
    limits = torch.finfo(dtype)
    exponent = 2.0 ** torch.tensor(limits.max, dtype=torch.float64).log2().floor().item()
    halfway = torch.tensor(limits.max + limits.eps * exponent / 2, dtype=torch.float64).float()
    below = torch.nextafter(halfway, torch.tensor(0.0))
    rows = torch.randn(2, 8, 20)
    for place, number in enumerate((halfway, below, -halfway, -below, torch.nan)):
        rows[1, place, 7] = number
    rows[0, 7] = torch.inf  # at a place that is none
    assert (~rows[1].to(dtype).isfinite()).any(1).tolist() == [True, False, True, False, True, False, False, False]
    places = torch.tensor([[8, 0, 3, 4, 9, 2, 1, -1], [3, 8, 5, 0, 1, 9, -1, 2]])
    votes = torch.zeros(2, 10)
    votes[0, 4], votes[0, 5], votes[0, 9], votes[1, 9] = torch.nan, torch.nan, -torch.inf, torch.inf
    by_votes = [[-1, -1, -1, 4, -1, -1, -1, -1], [-1, -1, -1, -1, -1, 9, -1, -1]]
    by_rows = torch.tensor([by_votes[0], [3, -1, 5, -1, 1, 9, -1, -1]])
    fine = torch.zeros_like(rows)
    for some in ((rows, None), (None, rows), (rows, fine), (fine, rows)):
        assert torch.equal(operators.overflowing(places, votes, *some, dtype), by_rows)
    assert operators.overflowing(places, votes, None, fine, dtype).tolist() == by_votes
    assert operators.overflowing(places, votes, None, None, dtype).tolist() == by_votes


def handed_over(positions, stays, importance):
    """Of one head, in float64: what part of each entry's value ends in which entry, by position, and how many leave."""
    last = max((p for i, p in enumerate(positions) if stays[i]), default=-1)  # what is behind is lost
    holds = {p: {p: 1.0} for p in positions if 0 <= p <= last}
    score = {p: max(importance[i], 0.0) for i, p in enumerate(positions)}
    leaving = sorted((score[p], p) for i, p in enumerate(positions) if p in holds and not stays[i])
    for _, position in leaving:
        parts = holds.pop(position)
        right = min(p for p in holds if p > position)
        total = score[position] + score[right]
        moved, remained = (score[position] / total, score[right] / total) if total > 0 else (0.0, 1.0)
        holds[right] = {p: remained * part for p, part in holds[right].items()}
        holds[right] |= {p: moved * part for p, part in parts.items()}
    return holds, len(leaving)


@pytest.mark.parametrize("n", [*SIZES, 2100])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.95])
@pytest.mark.parametrize("kind", ["random", "few", "rising", "falling"])
def test_values_are_handed_over_to_the_right(operators, n, share, kind):
    """Against one departure after the other; with dead entries, equal scores, chains, and a head where all stay."""
    positions = torch.rand(3, n).argsort(1) * 3
    positions[:, n // 2 : n // 2 + n // 7] = -1
    importance = {
        "random": torch.randn(3, n) + 1.0,
        "few": torch.randint(0, 3, (3, n)).float(),
        "rising": positions.float(),
        "falling": (3 * n - positions).float(),
    }[kind]
    stays = torch.rand(3, n) >= share
    stays[1] = True
    kept = reference.padded_nonzero(stays)
    width = min(n, 2 * int((~stays).sum(1).max()))
    order, place, is_live = reference.by_position(positions), reference.inverse(kept, n), positions >= 0
    index, target, shares, places, count = operators.hand_over(order, place, is_live, importance, width)
    for head in range(3):
        holds, num_given = handed_over(positions[head].tolist(), stays[head].tolist(), importance[head].tolist())
        assert count[head] == num_given
        listed = index[head] >= 0
        assert (places[head, ~listed] == -1).all() and torch.equal(target[head, ~listed], torch.arange(width)[~listed])
        row = index[head, listed]
        assert (positions[head, row].diff() > 0).all()
        leaves = ~stays[head, row]
        assert torch.equal(places[head, listed], torch.where(leaves, -1, place[head, row]))
        assert num_given == leaves.sum() and all(leaves | leaves.roll(1)) and (num_given == 0 or not leaves[-1])
        for i, end in enumerate(target[head, listed].tolist()):
            parts = holds[int(positions[head, row[end]])]
            expected = torch.tensor(parts[int(positions[head, row[i]])])
            torch.testing.assert_close(shares[head, i], expected, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("n", SIZES)
def test_what_becomes_and_joins_slots_lines_up(operators, n):
    positions = torch.rand(3, n).argsort(1) + 2**33
    positions[torch.rand(3, n) < 0.2] = -1
    positions[:, -1] = positions[:, 0]  # equal ones stay as they lie
    aux = torch.randint(0, 4, (3, n)).float() / 2
    scores = torch.randn(3, n).masked_fill(positions < 0, torch.nan)
    for kept in (0, n // 2, n - 1):
        place = torch.rand(3, n).argsort(1)
        place = place.masked_fill(place >= kept, -1)
        found = operators.line_up(place, positions, aux, scores, n - kept)
        assert [plane.shape for plane in found] == [(3, n - kept)] * 4
        for head in range(3):
            live = [i for i in range(n) if place[head, i] < 0 and positions[head, i] >= 0]
            live.sort(key=lambda i: (aux[head, i].item() < 1, positions[head, i].item(), i))
            wanted = (
                torch.tensor(live).long(),
                positions[head, live],
                aux[head, live].clamp(min=1.0),
                scores[head, live],
            )
            for plane, row, blank in zip(found, wanted, (-1, -1, 0.0, 0.0), strict=True):
                assert plane[head].tolist() == row.tolist() + [blank] * (n - kept - len(live))


@pytest.mark.parametrize("num_places", [1, 7, 1100])
@pytest.mark.parametrize("num_sources", [0, 1, 5, 1030])
def test_places_that_are_joined(operators, num_places, num_sources):
    places = torch.randint(0, num_places, (3, num_sources))
    joins = torch.rand(3, num_sources) < 0.5
    joins[1] = False
    joined, row = operators.list_joined(places, joins, num_places)
    assert len(joined) == 3 and joined.shape[1] <= min(num_places, num_sources)
    for head in range(3):
        expected = places[head, joins[head]].unique().tolist()
        assert joined[head].tolist() == expected + [-1] * (joined.shape[1] - len(expected))
        pairs = zip(places[head].tolist(), joins[head].tolist(), strict=True)
        assert row[head].tolist() == [expected.index(place) if does else -1 for place, does in pairs]


@pytest.mark.parametrize(("count", "num_mixed"), [(0, 3), (1, 1), (5, 0), (40, 7), (70, 100)])
@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.parametrize("has_own", [True, False])
def test_rows_are_mixed_in(operators, count, num_mixed, size, has_own):
    """Against sums in float64; what does not join may be NaN. Without rows of its own a row is that of the joining."""
    joining, own = (torch.randn(3, n, size) for n in (count, num_mixed))
    row = torch.randint(-1, max(num_mixed, 1), (3, count))
    row = row.masked_fill(torch.tensor(num_mixed == 0), -1).clamp(max=num_mixed if has_own else count - 1)
    shares = torch.rand(3, count)
    joining[row < 0], shares[row < 0] = torch.nan, torch.nan
    before = own.double() if has_own else torch.zeros(3, count, size, dtype=torch.float64)
    expected = before.clone()
    for head in range(3):
        for i, to in enumerate(row[head].tolist()):
            if to >= 0:
                expected[head, to] += shares[head, i].double() * (joining[head, i].double() - before[head, to])
    mixed = operators.mix_in(joining.clone(), row, shares, own.clone() if has_own else None)
    torch.testing.assert_close(mixed.double(), expected, rtol=1e-5, atol=1e-5)
