"""What Triton's kernels take together, and hand on to their functions.

Within a tuple Triton specialises everything, whatever a kernel says of its parameters: it compiles a kernel anew for a
number that becomes 1 or a multiple of 16, and for a tensor that is aligned otherwise. So a launcher makes tuples only
of what is the same from call to call. Other numbers, and tensors that begin anywhere, are parameters of their own, of
which kernels make ``Rows``, ``Tiling`` and ``Head``.

No tuple holds another one: Triton 3.6 loses the constants of a tuple in a tuple where there are loops.
"""

from collections import namedtuple

Cache = namedtuple("Cache", "k v log_votes scores aux k_block k_head k_dim k_slot v_block v_head v_slot m_block m_head")
"""A cache's planes, and their ``PagedKVCache.strides``. (Triton's tuples have ``values`` of their own.)"""

Codes = namedtuple("Codes", "k_block k_head k_dim k_slot first_v v_block v_head v_slot")
"""Where codes lie in coded pages (``CodedPages``), in bytes: strides, and how far the first value is behind the first
key."""

Tokens = namedtuple("Tokens", "first token head")
"""``[tokens, heads, head size]``, without gaps in the last dimension: where it begins, and its strides."""

Strides = namedtuple("Strides", "block head dim slot")
"""Those of keys or values, in elements."""

Entry = namedtuple("Entry", "layer block head offset")
"""Where an entry lies, or several do; block ids are int64."""

Rows = namedtuple(
    "Rows", "block_table query_starts query_lens seq_lens fronts tails score_modes score_decays page_tables addresses "
    "layer stride_table",
)  # fmt: skip
"""The rows of a batch (``AttentionBatch``). page_tables: addresses of the tables of rows whose fronts are in pages,
None where no row has any. addresses: of the planes of layers (see ``places``); layer: this one's number among them."""

Lengths = namedtuple("Lengths", "query_lens seq_lens fronts tails")
"""Those of ``Rows``."""

Row = namedtuple(
    "Row", "number front tail num_queries num_entries old first_token table num_paged ids layer head num_heads"
)
"""A row of a batch, as a KV head has it. num_paged: entries of its front that lie in pages, all or none. old: entries
before those of its queries. table: points at its block ids. ids: at those of its pages."""

Tiling = namedtuple("Tiling", "num_tiles tiles_per_row queries window chunked")
"""How queries are cut into tiles (see ``attention_kernels``)."""

Located = namedtuple("Located", "addresses layers blocks segments pages num_heads")
"""Where the entries of sequence layers lie. addresses: see ``places``. segments: ``[sequence layers, 3]`` int64. pages:
a table of their heads' pages; None where all fronts are ordinary ones. num_heads: of a layer."""

Head = namedtuple("Head", "front tail blocks layer head num_heads num_layers")
"""A head of a sequence layer. blocks: points at the block ids of that. num_layers: those that pages may be of."""

Changed = namedtuple("Changed", "origin row new")
"""``Changes`` of keys or values. None: what there are none of."""

Fit = namedtuple("Fit", "output residual direction solution mean numbers")
"""The state of conjugate gradients (see ``begin_solving``)."""
