// Where the tiles of a sequence lie. Included into each level's own namespace: see kernels.h about inline functions.

struct Tile {
  int64_t block;  // id in the cache
  int64_t slot;   // logical slot of lane 0
  int64_t entry;  // entry index of lane 0; negative where lo > 0
  int32_t offset; // of lane 0 within the block
  int32_t lo, hi; // live lanes
  bool front;
};

inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// Index of the tile that holds a slot.
inline int64_t tile_of(int64_t slot, int64_t block_size) {
  return slot / block_size * ((block_size + kTile - 1) / kTile) + slot % block_size / kTile;
}

struct Tiles {
  Segments segments;
  int64_t block_size, per_block, num_front, tail_first, count;

  Tiles(const Segments& s, int64_t bs)
      : segments(s),
        block_size(bs),
        per_block((bs + kTile - 1) / kTile),
        num_front(s.front > 0 ? tile_of(s.front - 1, bs) + 1 : 0),
        tail_first(tile_of(s.tail, bs)),
        count(num_front + (s.seq_len > s.tail ? tile_of(s.seq_len - 1, bs) + 1 - tail_first : 0)) {}

  int64_t num_entries() const { return segments.front + segments.seq_len - segments.tail; }

  Tile operator[](int64_t i) const {
    const bool front = i < num_front;
    const int64_t index = front ? i : tail_first + i - num_front;
    const int64_t start = front ? 0 : segments.tail, stop = front ? segments.front : segments.seq_len;
    Tile t;
    t.offset = static_cast<int32_t>(index % per_block * kTile);
    t.slot = index / per_block * block_size + t.offset;
    t.block = segments.blocks[index / per_block];
    t.entry = front ? t.slot : segments.front + t.slot - segments.tail;
    t.lo = static_cast<int32_t>(max64(0, start - t.slot));
    t.hi = static_cast<int32_t>(min64(min64(kTile, block_size - t.offset), stop - t.slot));
    t.front = front;
    return t;
  }
};

inline char* region(const PagedKVCache& p, int64_t block, int64_t head) {
  return p.base + block * p.block_stride + head * p.head_stride;
}

enum Plane : int { kLogVotes, kScores, kAux, kPositions };

inline float* plane(const PagedKVCache& p, int64_t block, int64_t head, Plane which) {
  return reinterpret_cast<float*>(p.metadata) + ((block * p.num_heads + head) * 4 + which) * p.block_size;
}
