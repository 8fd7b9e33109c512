"""Budgets of heads rounded to pages, so that all of a request's heads fit exactly into the blocks of its front."""

from collections.abc import Sequence

from vllm_kvmerge.policies.base import Allocator


def fitted_budgets(
    allocator: Allocator, budgets: Sequence[int], num_heads: int, num_blocks: int, page_size: int, least: int, most: int
) -> list[int]:
    """Entries of each head of a request, ``least`` to ``most``, that fit into ``num_blocks`` blocks.

    budgets: the allocator's for each head, layer by layer, of ``num_heads`` each. Raises ValueError as ``paged_shares``
    does.
    """

    def fitted(shares: Sequence[int]) -> list[int]:
        return paged_shares(shares, num_blocks * len(shares), page_size, least, most)

    if not allocator.fills_budget:  # all heads share all pages
        return fitted(budgets)
    if allocator.splits_heads:  # a layer's heads share its pages
        starts = range(0, len(budgets), num_heads)
        return [share for start in starts for share in fitted(budgets[start : start + num_heads])]
    by_layer = fitted(budgets[::num_heads])  # layers share all pages
    return [share for share in by_layer for _ in range(num_heads)]


def paged_shares(shares: Sequence[int], num_pages: int, page_size: int, least: int, most: int) -> list[int]:
    """Entries of each head, ``least`` to ``most``, near its share, that take at most ``num_pages`` pages together.

    Shares that fit are returned as they are. Others are rounded to pages by largest remainder; each head's last page
    holds as many entries as it would if all heads had the same share. So no head loses more than a page, unless others
    need one to keep their least, and together they hold as many entries as their shares, or up to one a head less.

    Raises:
        ValueError: there are too few pages for every head's least.
    """
    shares = [min(max(share, least), most) for share in shares]
    if sum(-(-share // page_size) for share in shares) <= num_pages:
        return shares
    count, total = len(shares), min(sum(shares), num_pages * page_size)
    unused = min(page_size - 1, -(-(num_pages * page_size - total) // count))
    least_pages = -(-(least + unused) // page_size)
    if num_pages < count * least_pages:  # then all get the same
        unused, least_pages = 0, -(-least // page_size)
    left = num_pages - count * least_pages
    if left < 0:
        raise ValueError(f"{num_pages} pages of {page_size} cannot hold {least} entries of {count} heads")
    excess = [max(0, share + unused - least_pages * page_size) for share in shares]
    # Whole numbers, so that every worker comes to the same.
    weight, unit = min(sum(excess), left * page_size), max(1, sum(excess)) * page_size
    pages = [one * weight // unit for one in excess]
    by_remainder = sorted(range(count), key=lambda i: -(excess[i] * weight % unit))
    for i in by_remainder[: left - sum(pages)]:
        pages[i] += excess[i] * weight % unit > 0
    return [min((least_pages + some) * page_size - unused, most) for some in pages]
