#include "entries.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "parallel.h"

namespace kvmerge {
namespace {

#include "simd.h"
#include "tiles.h"

constexpr int64_t kEntriesPerTask = 256;
constexpr int64_t kMinParallelEntries = 512;  // below, waking threads costs more than it gains

inline int threads_for(const SequenceLayers& units, int64_t count) {
  const int64_t entries = static_cast<int64_t>(units.size()) * units[0].pages.num_heads * count;
  return entries < kMinParallelEntries ? 1 : max_threads();
}

// Calls task(unit, head, row, first, last) for ranges of `count` items of every head; row: unit * heads + head.
template <class F>
void for_ranges(const SequenceLayers& units, int64_t count, int64_t per_task, const F& task) {
  if (units.empty()) return;
  const int64_t ranges = (count + per_task - 1) / per_task, heads = units[0].pages.num_heads;
  parallel_for(static_cast<int64_t>(units.size()) * heads * ranges, threads_for(units, count), [&](int64_t i) {
    const int64_t row = i / ranges, first = i % ranges * per_task;
    task(units[row / heads], row % heads, row, first, std::min(count, first + per_task));
  });
}

// Calls f with a null pointer to the cache's element type.
template <class F>
auto with_type(DType dtype, const F& f) {
  if (dtype == DType::f32) return f(static_cast<float*>(nullptr));
  if (dtype == DType::bf16) return f(static_cast<BF16*>(nullptr));
  return f(static_cast<F16*>(nullptr));
}

struct Place {
  int64_t block;
  int64_t offset;
  bool operator==(const Place& other) const { return block == other.block && offset == other.offset; }
};

inline Place place_of_slot(const PagedKVCache& pages, const int32_t* blocks, int64_t slot) {
  return {blocks[slot / pages.block_size], slot % pages.block_size};
}

inline Place place_of_entry(const PagedKVCache& pages, const Segments& s, int64_t entry) {
  return place_of_slot(pages, s.blocks, entry < s.front ? entry : s.tail + entry - s.front);
}

// The key at a place: elements block_size apart.
template <class T>
inline T* key_at(const PagedKVCache& pages, int64_t head, Place at) {
  return reinterpret_cast<T*>(region(pages, at.block, head)) + at.offset;
}

template <class T>
inline T* value_at(const PagedKVCache& pages, int64_t head, Place at) {
  return reinterpret_cast<T*>(region(pages, at.block, head)) +
         (static_cast<int64_t>(pages.block_size) + at.offset) * pages.head_size;
}

template <class T>
inline void read_key(const PagedKVCache& pages, int64_t head, Place at, float* out) {
  const T* key = key_at<T>(pages, head, at);
  for (int64_t e = 0; e < pages.head_size; ++e) out[e] = to_float(key[e * pages.block_size]);
}

template <class T>
inline void read_value(const PagedKVCache& pages, int64_t head, Place at, float* out) {
  const T* value = value_at<T>(pages, head, at);
  for (int64_t e = 0; e < pages.head_size; ++e) out[e] = to_float(value[e]);
}

inline int64_t num_entries(const Segments& s) { return s.front + s.seq_len - s.tail; }

// Calls f(block, offset, count, entry) for the pieces of the entries [first, last) that lie in one block each.
template <class F>
void for_pieces(const Unit& unit, int64_t first, int64_t last, const F& f) {
  const Segments& s = unit.segments;
  const int64_t bs = unit.pages.block_size;
  for (int64_t i = first; i < last;) {
    const int64_t slot = i < s.front ? i : s.tail + i - s.front, offset = slot % bs;
    const int64_t count = std::min({bs - offset, last - i, i < s.front ? s.front - i : last - i});
    f(s.blocks[slot / bs], offset, count, i);
    i += count;
  }
}

}  // namespace

void gather_metadata(const SequenceLayers& units, float* log_votes, float* scores, float* aux, int64_t* positions) {
  if (units.empty()) return;
  const int64_t n = num_entries(units[0].segments);
  for_ranges(units, n, kEntriesPerTask, [&](const Unit& unit, int64_t head, int64_t row, int64_t first, int64_t last) {
    const Segments& s = unit.segments;
    for_pieces(unit, first, last, [&](int64_t block, int64_t offset, int64_t count, int64_t entry) {
      const int64_t to = row * n + entry;
      const auto copy = [&](float* out, Plane which) {
        std::memcpy(out + to, plane(unit.pages, block, head, which) + offset, count * sizeof(float));
      };
      copy(scores, kScores);
      copy(aux, kAux);
      if (entry < s.front) {
        copy(log_votes, kLogVotes);
        const int32_t* from = reinterpret_cast<int32_t*>(plane(unit.pages, block, head, kPositions)) + offset;
        for (int64_t k = 0; k < count; ++k) positions[to + k] = from[k];
      } else {
        std::fill_n(log_votes + to, count, 0.0f);
        for (int64_t k = 0; k < count; ++k) positions[to + k] = s.tail + entry - s.front + k;
      }
    });
  });
}

namespace {

// Keys of the entries at index, [count, head_size]. Where many lie in one block one after the other they are read together:
// an element's neighbours share its cache line.
template <class T>
void gather_keys(const Unit& unit, int64_t head, const int64_t* index, int64_t count, float* rows) {
  const int64_t d = unit.pages.head_size, bs = unit.pages.block_size;
  constexpr int64_t kMany = 8;
  for (int64_t first = 0; first < count;) {
    if (index[first] < 0) {
      std::fill_n(rows + first++ * d, d, 0.0f);
      continue;
    }
    const Place start = place_of_entry(unit.pages, unit.segments, index[first]);
    int64_t some = 1;
    while (first + some < count && index[first + some] == index[first] + some &&
           place_of_entry(unit.pages, unit.segments, index[first + some]) == Place{start.block, start.offset + some})
      ++some;
    const T* keys = key_at<T>(unit.pages, head, start);
    float* out = rows + first * d;
    if (some < kMany) {
      for (int64_t i = 0; i < some; ++i)
        for (int64_t e = 0; e < d; ++e) out[i * d + e] = to_float(keys[e * bs + i]);
    } else {
      for (int64_t e = 0; e < d; ++e)
        for (int64_t i = 0; i < some; ++i) out[i * d + e] = to_float(keys[e * bs + i]);
    }
    first += some;
  }
}

}  // namespace

void gather_rows(const SequenceLayers& units, bool keys, const int64_t* index, int64_t count, float* rows) {
  if (units.empty()) return;
  with_type(units[0].pages.dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    for_ranges(units, count, kEntriesPerTask,
               [&](const Unit& unit, int64_t head, int64_t row, int64_t first, int64_t last) {
                 const int64_t d = unit.pages.head_size;
                 const int64_t* entries = index + row * count;
                 float* out = rows + row * count * d;
                 if (keys) return gather_keys<T>(unit, head, entries + first, last - first, out + first * d);
                 for (int64_t i = first; i < last; ++i) {
                   if (entries[i] < 0) std::fill_n(out + i * d, d, 0.0f);
                   else
                     read_value<T>(unit.pages, head, place_of_entry(unit.pages, unit.segments, entries[i]), out + i * d);
                 }
               });
  });
}

void gather_all(const SequenceLayers& units, float* keys, float* values) {
  if (units.empty()) return;
  const int64_t n = num_entries(units[0].segments), d = units[0].pages.head_size;
  with_type(units[0].pages.dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    for_ranges(units, n, kEntriesPerTask, [&](const Unit& unit, int64_t head, int64_t row, int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const Place at = place_of_entry(unit.pages, unit.segments, i);
        read_key<T>(unit.pages, head, at, keys + (row * n + i) * d);
        read_value<T>(unit.pages, head, at, values + (row * n + i) * d);
      }
    });
  });
}

namespace {

inline float inverse_length(float squares) { return 1.0f / std::max(std::sqrt(squares), 1e-12f); }

// keys: [count, head_size], those of the entries, and one over the length of each.
template <class T, class Q>
void read_members(const Unit& unit, int64_t head, const int64_t* entries, int64_t count, Q* keys, float* lengths) {
  const int64_t d = unit.pages.head_size;
  for (int64_t r = 0; r < count; ++r) {
    const T* key = key_at<T>(unit.pages, head, place_of_entry(unit.pages, unit.segments, entries[r]));
    typename SumOfSquares<T>::type squares = 0;
    for (int64_t e = 0; e < d; ++e) {
      const float x = to_float(key[e * unit.pages.block_size]);
      squares += static_cast<decltype(squares)>(x) * x;
      keys[r * d + e] = from_float<Q>(x);
    }
    lengths[r] = inverse_length(static_cast<float>(squares));
  }
}

// Members and carriers of all heads, as the kernel multiplies them.
template <class T, class Q>
void find_most_similar(const Kernels& kernels, const SequenceLayers& units, const int64_t* members, int64_t num_members,
                       const int64_t* carriers, int64_t num_carriers, const uint8_t* usable, float* similarity,
                       int64_t* best) {
  const int64_t d = units[0].pages.head_size, heads = static_cast<int64_t>(units.size()) * units[0].pages.num_heads;
  const int64_t num_tiles = (num_carriers + kTile - 1) / kTile;
  // Usable carriers side by side: tiles [d, kTile], the length of each, which carrier it is.
  std::vector<Q> packed(heads * num_tiles * kTile * d);
  std::vector<float> inverse(heads * num_tiles * kTile);
  std::vector<int32_t> names(heads * num_tiles * kTile), counts(heads);
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < num_carriers; ++i)
      if (usable[h * num_carriers + i]) names[h * num_tiles * kTile + counts[h]++] = static_cast<int32_t>(i);

  for_ranges(units, num_tiles, kEntriesPerTask / kTile,
             [&](const Unit& unit, int64_t head, int64_t row, int64_t first, int64_t last) {
    const PagedKVCache& pages = unit.pages;
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t at = row * num_tiles + tile;
      for (int64_t lane = 0; lane < kTile && tile * kTile + lane < counts[row]; ++lane) {
        const int64_t carrier = names[at * kTile + lane];
        const int64_t entry = carriers[row * num_carriers + carrier];
        const T* key = key_at<T>(pages, head, place_of_entry(pages, unit.segments, entry));
        typename SumOfSquares<T>::type squares = 0;
        for (int64_t e = 0; e < d; ++e) {
          const float x = to_float(key[e * pages.block_size]);
          squares += static_cast<decltype(squares)>(x) * x;
          packed[(at * d + e) * kTile + lane] = from_float<Q>(x);
        }
        inverse[at * kTile + lane] = inverse_length(static_cast<float>(squares));
      }
    }
  });

  constexpr int64_t kMembersPerTask = 64;
  for_ranges(units, num_members, kMembersPerTask,
             [&](const Unit& unit, int64_t kv_head, int64_t head, int64_t first, int64_t last) {
    thread_local Scratch scratch;
    const int64_t rows = last - first;
    float* lengths = scratch.floats(kMembersPerTask * (d + 2) + kernels.similar_scratch(kMembersPerTask));
    float* found = lengths + kMembersPerTask;
    Q* keys = reinterpret_cast<Q*>(found + kMembersPerTask);
    int32_t where[kMembersPerTask];
    read_members<T>(unit, kv_head, members + head * num_members + first, rows, keys, lengths);
    Similar x{};
    x.in_pairs = sizeof(Q) == 2;
    x.head_size = static_cast<int32_t>(d);
    x.num_members = static_cast<int32_t>(rows);
    x.num_carriers = counts[head];
    x.members = keys;
    x.carriers = packed.data() + head * num_tiles * kTile * d;
    x.inverse = inverse.data() + head * num_tiles * kTile;
    x.best = found;
    x.where = where;
    x.scratch = found + kMembersPerTask + kMembersPerTask * d;
    kernels.similar(x);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t to = head * num_members + first + r;
      const bool none = counts[head] == 0;
      similarity[to] = none ? -std::numeric_limits<float>::infinity() : std::min(1.0f, found[r] * lengths[r]);
      best[to] = carriers[head * num_carriers + (none ? 0 : names[head * num_tiles * kTile + where[r]])];
    }
  });
}

// The same where members are few and most entries are carriers: keys are multiplied where they lie.
template <class T, class Q>
void find_most_similar_entries(const Kernels& kernels, const SequenceLayers& units, const int64_t* members, int64_t num_members,
                               const int64_t* carriers, int64_t num_carriers, const uint8_t* usable, float* similarity,
                               int64_t* best) {
  const int64_t d = units[0].pages.head_size, heads = units[0].pages.num_heads, n = num_entries(units[0].segments);
  parallel_for(static_cast<int64_t>(units.size()) * heads, threads_for(units, n), [&](int64_t row) {
    const Unit& unit = units[row / heads];
    const int64_t head = row % heads, *own = carriers + row * num_carriers;
    thread_local Scratch scratch;
    float* lengths = scratch.floats(num_members * (d + 3) + n + kernels.similar_entries_scratch(num_members));
    float* found = lengths + num_members;
    int32_t *where = reinterpret_cast<int32_t*>(found + num_members), *ranks = where + num_members;
    Q* keys = reinterpret_cast<Q*>(ranks + n);
    read_members<T>(unit, head, members + row * num_members, num_members, keys, lengths);
    std::fill_n(ranks, n, INT32_MAX);
    for (int64_t i = num_carriers - 1; i >= 0; --i)
      if (usable[row * num_carriers + i]) ranks[own[i]] = static_cast<int32_t>(i);
    SimilarEntries x{};
    x.pages = &unit.pages;
    x.segments = unit.segments;
    x.head = static_cast<int32_t>(head);
    x.num_members = static_cast<int32_t>(num_members);
    x.in_pairs = sizeof(Q) == 2;
    x.members = keys;
    x.ranks = ranks;
    x.best = found;
    x.where = where;
    x.scratch = reinterpret_cast<float*>(ranks + n) + num_members * d;
    kernels.similar_entries(x);
    for (int64_t r = 0; r < num_members; ++r) {
      const bool none = where[r] == INT32_MAX;
      similarity[row * num_members + r] =
          none ? -std::numeric_limits<float>::infinity() : std::min(1.0f, found[r] * lengths[r]);
      best[row * num_members + r] = own[none ? 0 : where[r]];
    }
  });
}

template <class T, class Q>
void find(const Kernels& kernels, const SequenceLayers& units, const int64_t* members, int64_t num_members,
          const int64_t* carriers, int64_t num_carriers, const uint8_t* usable, float* similarity, int64_t* best) {
  constexpr int64_t kFewMembers = 64;
  const bool in_place = num_members <= kFewMembers && 2 * num_carriers >= num_entries(units[0].segments);
  const auto run = in_place ? find_most_similar_entries<T, Q> : find_most_similar<T, Q>;
  run(kernels, units, members, num_members, carriers, num_carriers, usable, similarity, best);
}

}  // namespace

void most_similar(const Kernels& kernels, const SequenceLayers& units, const int64_t* members, int64_t num_members,
                  const int64_t* carriers, int64_t num_carriers, const uint8_t* usable, float* similarity,
                  int64_t* best) {
  if (units.empty() || num_members == 0) return;
  const auto run = [&](auto find) {
    find(kernels, units, members, num_members, carriers, num_carriers, usable, similarity, best);
  };
  const DType dtype = units[0].pages.dtype;
  // Products of bfloat16 are exact in float32, so pairs lose nothing.
  if (dtype == DType::f32) run(find<float, float>);
  else if (dtype == DType::f16) run(find<F16, float>);
  else if (kernels.has_pairs) run(find<BF16, BF16>);
  else run(find<BF16, float>);
}

void fused_attention(const Kernels& kernels, const SequenceLayers& units, const float* queries, int64_t group,
                     const int64_t* query_positions, int64_t num_queries, const float* log_votes,
                     const int64_t* positions, float scale, bool largest, float* fused) {
  if (units.empty()) return;
  const int64_t heads = units[0].pages.num_heads, d = units[0].pages.head_size;
  const int64_t n = num_entries(units[0].segments);
  parallel_for(static_cast<int64_t>(units.size()) * heads, threads_for(units, n), [&](int64_t row) {
    const Unit& unit = units[row / heads];
    const int64_t num_tiles = Tiles(unit.segments, unit.pages.block_size).count;
    thread_local Scratch scratch;
    Fuse f{};
    f.pages = &unit.pages;
    f.segments = unit.segments;
    f.head = static_cast<int32_t>(row % heads);
    f.group = static_cast<int32_t>(group);
    f.num_queries = static_cast<int32_t>(num_queries);
    f.queries = queries + row * group * num_queries * d;
    f.query_positions = query_positions + row * num_queries;
    f.log_votes = log_votes + row * n;
    f.positions = positions + row * n;
    f.scale = scale;
    f.largest = largest;
    f.fused = fused + row * n;
    f.scratch = scratch.floats(kernels.fuse_scratch(group, num_queries, d, num_tiles));
    kernels.fuse(f);
  });
}

void move_entries(const SequenceLayers& units, const std::vector<const int32_t*>& destinations, const int64_t* kept,
                  int64_t count) {
  if (units.empty()) return;
  with_type(units[0].pages.dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    const int64_t heads = units[0].pages.num_heads, d = units[0].pages.head_size, bs = units[0].pages.block_size;
    // A head's moves are in one buffer before the first is written, because places may overlap.
    parallel_for(static_cast<int64_t>(units.size()) * heads, threads_for(units, count), [&](int64_t row) {
      const PagedKVCache& pages = units[row / heads].pages;
      const Segments& s = units[row / heads].segments;
      const int32_t* destination = destinations[row / heads];
      const int64_t *from = kept + row * count, head = row % heads;
      thread_local std::vector<int64_t> moving, empty;
      moving.clear();
      empty.clear();
      for (int64_t first = 0; first < count; first += bs) {
        const int64_t last = std::min(count, first + bs);
        // Nearly all entries stay, which takes no arithmetic to see.
        const int64_t stays = first < s.front && s.blocks[first / bs] == destination[first / bs] ? s.front : 0;
        for (int64_t i = first; i < last; ++i) {
          if (from[i] == i && i < stays) continue;
          if (from[i] < 0) empty.push_back(i);
          else if (!(place_of_entry(pages, s, from[i]) == place_of_slot(pages, destination, i))) moving.push_back(i);
        }
      }
      thread_local Scratch scratch;
      T* buffer = reinterpret_cast<T*>(scratch.floats(static_cast<int64_t>(moving.size() + 1) * 2 * d));
      T* next = buffer;
      for (int64_t i : moving) {
        const Place at = place_of_entry(pages, s, from[i]);
        const T* key = key_at<T>(pages, head, at);
        for (int64_t e = 0; e < d; ++e) next[e] = key[e * bs];
        std::memcpy(next + d, value_at<T>(pages, head, at), d * sizeof(T));
        next += 2 * d;
      }
      const auto write = [&](int64_t slot, const T* values) {
        const Place to = place_of_slot(pages, destination, slot);
        T* key = key_at<T>(pages, head, to);
        for (int64_t e = 0; e < d; ++e) key[e * bs] = values[e];
        std::memcpy(value_at<T>(pages, head, to), values + d, d * sizeof(T));
      };
      std::memset(next, 0, 2 * d * sizeof(T));
      for (int64_t i : empty) write(i, next);
      next = buffer;
      for (int64_t i : moving) {
        write(i, next);
        next += 2 * d;
      }
    });
  });
}

void write_rows(const SequenceLayers& units, const int64_t* places, int64_t count, const float* keys, const float* values) {
  if (units.empty()) return;
  with_type(units[0].pages.dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    for_ranges(units, count, kEntriesPerTask,
               [&](const Unit& unit, int64_t head, int64_t row, int64_t first, int64_t last) {
                 const int64_t d = unit.pages.head_size, bs = unit.pages.block_size;
                 for (int64_t i = row * count + first; i < row * count + last; ++i) {
                   if (places[i] < 0) continue;
                   const Place to = place_of_slot(unit.pages, unit.segments.blocks, places[i]);
                   if (keys) {
                     T* key = key_at<T>(unit.pages, head, to);
                     for (int64_t e = 0; e < d; ++e) key[e * bs] = from_float<T>(keys[i * d + e]);
                   }
                   if (values) {
                     T* value = value_at<T>(unit.pages, head, to);
                     for (int64_t e = 0; e < d; ++e) value[e] = from_float<T>(values[i * d + e]);
                   }
                 }
               });
  });
}

void write_metadata(const SequenceLayers& units, int64_t count, const float* log_votes, const float* scores, const float* aux,
                    const int64_t* positions) {
  for_ranges(units, count, kEntriesPerTask,
             [&](const Unit& unit, int64_t head, int64_t row, int64_t first, int64_t last) {
               const int64_t bs = unit.pages.block_size;
               for (int64_t slot = first; slot < last;) {
                 const int64_t offset = slot % bs, some = std::min(bs - offset, last - slot);
                 const int64_t block = unit.segments.blocks[slot / bs], from = row * count + slot;
                 const auto copy = [&](const float* in, Plane which) {
                   std::memcpy(plane(unit.pages, block, head, which) + offset, in + from, some * sizeof(float));
                 };
                 copy(log_votes, kLogVotes);
                 copy(scores, kScores);
                 copy(aux, kAux);
                 int32_t* to = reinterpret_cast<int32_t*>(plane(unit.pages, block, head, kPositions)) + offset;
                 for (int64_t k = 0; k < some; ++k) to[k] = static_cast<int32_t>(positions[from + k]);
                 slot += some;
               }
             });
}

void write_tokens(const PagedKVCache& pages, const std::vector<int64_t>& slots, const Rows& keys, const Rows& values) {
  with_type(pages.dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    with_type(keys.dtype, [&](auto* from) {
      typedef std::remove_pointer_t<decltype(from)> U;
      for_ranges({Unit{pages, {}}}, static_cast<int64_t>(slots.size()), kEntriesPerTask,
                 [&](const Unit&, int64_t head, int64_t, int64_t first, int64_t last) {
                   for (int64_t i = first; i < last; ++i) {
                     if (slots[i] < 0) continue;
                     const Place to{slots[i] / pages.block_size, slots[i] % pages.block_size};
                     const U* k = static_cast<const U*>(keys.data) + i * keys.token_stride + head * keys.head_stride;
                     const U* v =
                         static_cast<const U*>(values.data) + i * values.token_stride + head * values.head_stride;
                     T *key = key_at<T>(pages, head, to), *value = value_at<T>(pages, head, to);
                     for (int64_t e = 0; e < pages.head_size; ++e) {
                       key[e * pages.block_size] = from_float<T>(to_float(k[e]));
                       value[e] = from_float<T>(to_float(v[e]));
                     }
                   }
                 });
    });
  });
}

}  // namespace kvmerge
