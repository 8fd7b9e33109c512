"""Budgets of heads rounded to pages, so that all of a request's heads fit exactly into the blocks of its front."""

from collections.abc import Sequence

import numpy as np

from vllm_kvmerge.policies.base import Allocator


def fitted_budgets(
    allocator: Allocator, budgets: Sequence[int], num_heads: int, num_blocks: int, page_size: int, least: int, most: int
) -> list[int]:
    """Entries of each head of a request, ``least`` to ``most``, that fit into ``num_blocks`` blocks.

    budgets: the allocator's for each head, layer by layer, of ``num_heads`` each. Raises ValueError as ``paged_shares``
    does.
    """
    shares = np.asarray(budgets, dtype=np.int64)
    if allocator.pools_layers or not allocator.fills_budget:  # all heads share all pages
        groups, repeats = shares[None], 1
    elif allocator.splits_heads:  # a layer's heads share its pages
        groups, repeats = shares.reshape(-1, num_heads), 1
    else:  # layers share all pages
        groups, repeats = shares[None, ::num_heads], num_heads
    fitted = paged_shares(groups, num_blocks * groups.shape[1], page_size, least, most)
    return [int(share) for share in fitted.flatten().repeat(repeats).tolist()]


def paged_shares(shares: np.ndarray, num_pages: int, page_size: int, least: int, most: int) -> np.ndarray:
    """Entries of each head, ``least`` to ``most``, near its share, that take at most ``num_pages`` pages in each group.

    shares, and the result: ``[groups, heads]`` int64. A group whose shares fit keeps them. Others are rounded to pages
    by largest remainder; each head's last page holds as many entries as it would if all heads had the same share. So no
    head loses more than a page, unless others need one to keep their least, and together they hold as many entries as
    their shares, or up to one a head less.

    Raises:
        ValueError: there are too few pages for every head's least.
    """
    shares = np.clip(shares, least, most)
    fits = _pages(shares, page_size).sum(1) <= num_pages
    if fits.all():
        return shares
    count = shares.shape[1]
    room = num_pages * page_size
    unused = np.minimum(page_size - 1, _pages(np.maximum(0, room - shares.sum(1)), count))
    least_pages = _pages(least + unused, page_size)
    is_tight = num_pages < count * least_pages  # then all get the same
    unused[is_tight], least_pages[is_tight] = 0, _pages(least, page_size)
    left = num_pages - count * least_pages
    if (left < 0).any():
        raise ValueError(f"{num_pages} pages of {page_size} cannot hold {least} entries of {count} heads")
    excess = np.maximum(0, shares + (unused - least_pages * page_size)[:, None])
    # Whole numbers, so that every worker comes to the same.
    total = excess.sum(1)
    weight, unit = np.minimum(total, left * page_size), np.maximum(1, total) * page_size
    pages, remainders = np.divmod(excess * weight[:, None], unit[:, None])
    by_remainder = np.argsort(-remainders, axis=1, kind="stable")
    gets_more = np.arange(count) < (left - pages.sum(1))[:, None]
    gets_more &= np.take_along_axis(remainders, by_remainder, 1) > 0
    more = np.zeros_like(pages)
    np.put_along_axis(more, by_remainder, gets_more, 1)
    rounded = np.minimum((least_pages[:, None] + pages + more) * page_size - unused[:, None], most)
    return np.where(fits[:, None], shares, rounded)


def _pages(entries: np.ndarray | int, size: int) -> np.ndarray:
    """Pages of ``size`` that hold as many entries."""
    return -(-np.asarray(entries) // size)
