// Where the tiles of a sequence lie. Included into each level's own namespace: see kernels.h about inline functions.

inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

inline Page page_of_block(const PagedKVCache& p, int64_t block, int64_t head) {
  const int64_t region = block * p.num_heads + head;
  return Page{p.base + region * p.region_stride, reinterpret_cast<float*>(p.metadata + region * p.metadata_stride)};
}

// The page of a head that slots [index * block_size, ...) of a segment lie in.
inline Page page_of(const PagedKVCache& p, const Segments& s, int64_t head, int64_t index, bool front) {
  return front && s.pages ? s.pages[index] : page_of_block(p, s.blocks[index], head);
}

enum Plane : int { kLogVotes, kScores, kAux, kPositions };

inline float* plane(const PagedKVCache& p, Page page, Plane which) { return page.metadata + which * p.block_size; }

struct Tile {
  Page page;
  int64_t slot;   // logical slot of lane 0
  int64_t entry;  // entry index of lane 0; negative where lo > 0
  int32_t offset; // of lane 0 within the page
  int32_t lo, hi; // live lanes
  bool front;
};

// Index of the tile that holds a slot.
inline int64_t tile_of(int64_t slot, int64_t block_size) {
  return slot / block_size * ((block_size + kTile - 1) / kTile) + slot % block_size / kTile;
}

// The tiles of one head of a sequence.
struct Tiles {
  const PagedKVCache& cache;
  Segments segments;
  int64_t head, per_block, num_front, tail_first, count;

  Tiles(const PagedKVCache& p, const Segments& s, int64_t h)
      : cache(p),
        segments(s),
        head(h),
        per_block((p.block_size + kTile - 1) / kTile),
        num_front(s.front > 0 ? tile_of(s.front - 1, p.block_size) + 1 : 0),
        tail_first(tile_of(s.tail, p.block_size)),
        count(num_front + (s.seq_len > s.tail ? tile_of(s.seq_len - 1, p.block_size) + 1 - tail_first : 0)) {}

  int64_t num_entries() const { return segments.front + segments.seq_len - segments.tail; }

  // How many of the tiles hold the first `entries`, at least one.
  int64_t up_to(int64_t entries) const {
    if (entries <= segments.front) return tile_of(entries - 1, cache.block_size) + 1;
    return num_front + tile_of(segments.tail + entries - segments.front - 1, cache.block_size) + 1 - tail_first;
  }

  Tile operator[](int64_t i) const {
    const bool front = i < num_front;
    const int64_t index = front ? i : tail_first + i - num_front;
    const int64_t start = front ? 0 : segments.tail, stop = front ? segments.front : segments.seq_len;
    Tile t;
    t.offset = static_cast<int32_t>(index % per_block * kTile);
    t.slot = index / per_block * cache.block_size + t.offset;
    t.page = page_of(cache, segments, head, index / per_block, front);
    t.entry = front ? t.slot : segments.front + t.slot - segments.tail;
    t.lo = static_cast<int32_t>(max64(0, start - t.slot));
    t.hi = static_cast<int32_t>(min64(min64(kTile, cache.block_size - t.offset), stop - t.slot));
    t.front = front;
    return t;
  }
};
