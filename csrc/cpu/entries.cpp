// Reading and writing single entries of layers. Entry i of a sequence is slot i where i < front, else tail + i - front.
//
// A sequence layer is one layer of one sequence; all of a call have equally many heads and entries, and what operators
// take and give is [sequence layers * heads, ...].
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "parallel.h"
#include "tensors.h"

namespace kvmerge {
namespace {

#include "simd.h"
#include "tiles.h"

struct SequenceLayer {
  PagedKVCache cache;
  Segments segments;
  // Where the heads' fronts have pages of their own: num_pages for each head, of which the first fronts[head] slots
  // hold its entries; entries from there up to segments.front are dead, wherever their pages lie.
  const Page* pages = nullptr;
  const int64_t* fronts = nullptr;
  int64_t num_pages = 0;

  Segments of_head(int64_t head) const {
    Segments s = segments;
    if (pages) s.pages = pages + head * num_pages;
    return s;
  }
  int64_t front_of(int64_t head) const { return pages ? fronts[head] : segments.front; }
};
typedef std::vector<SequenceLayer> SequenceLayers;

constexpr int64_t kEntriesPerTask = 256;
constexpr int64_t kMinParallelEntries = 512;  // below, waking threads costs more than it gains

inline int threads_for(const SequenceLayers& seq_layers, int64_t count) {
  const int64_t entries = static_cast<int64_t>(seq_layers.size()) * seq_layers[0].cache.num_heads * count;
  return entries < kMinParallelEntries ? 1 : max_threads();
}

// Calls task(one, head, row, first, last) for ranges of `count` items of every head; row: its number * heads + head.
template <class F>
void for_ranges(const SequenceLayers& seq_layers, int64_t count, int64_t per_task, const F& task) {
  if (seq_layers.empty()) return;
  const int64_t ranges = (count + per_task - 1) / per_task, heads = seq_layers[0].cache.num_heads;
  parallel_for(static_cast<int64_t>(seq_layers.size()) * heads * ranges, threads_for(seq_layers, count),
               [&](int64_t i) {
                 const int64_t row = i / ranges, first = i % ranges * per_task;
                 task(seq_layers[row / heads], row % heads, row, first, std::min(count, first + per_task));
               });
}

// Calls f with a null pointer to the cache's element type.
template <class F>
auto with_type(DType dtype, const F& f) {
  if (dtype == DType::f32) return f(static_cast<float*>(nullptr));
  if (dtype == DType::bf16) return f(static_cast<BF16*>(nullptr));
  if (dtype == DType::e4m3) return f(static_cast<E4M3*>(nullptr));
  if (dtype == DType::e5m2) return f(static_cast<E5M2*>(nullptr));
  return f(static_cast<F16*>(nullptr));
}

struct Place {
  Page page;
  int64_t offset;
  bool operator==(const Place& other) const { return page.rows == other.page.rows && offset == other.offset; }
};

// s: of the head.
inline Place place_of_slot(const PagedKVCache& cache, const Segments& s, int64_t head, int64_t slot, bool front) {
  return {page_of(cache, s, head, slot / cache.block_size, front), slot % cache.block_size};
}

inline Place place_of_entry(const PagedKVCache& cache, const Segments& s, int64_t head, int64_t entry) {
  const bool front = entry < s.front;
  return place_of_slot(cache, s, head, front ? entry : s.tail + entry - s.front, front);
}

// The key at a place: elements block_size apart.
template <class T>
inline T* key_at(Place at) {
  return reinterpret_cast<T*>(at.page.rows) + at.offset;
}

template <class T>
inline T* value_at(const PagedKVCache& cache, Place at) {
  return reinterpret_cast<T*>(at.page.rows) + (static_cast<int64_t>(cache.block_size) + at.offset) * cache.head_size;
}

template <class T>
inline void read_value(const PagedKVCache& cache, Place at, float* out) {
  const T* value = value_at<T>(cache, at);
  for (int64_t e = 0; e < cache.head_size; ++e) out[e] = to_float(value[e]);
}

// How many of `count` places a head has.
inline int64_t places_of(const SequenceLayer& one, int64_t head, int64_t count) {
  return one.pages ? std::min(count, one.fronts[head]) : count;
}

inline int64_t num_entries(const Segments& s) { return s.front + s.seq_len - s.tail; }

// Calls f(page, offset, count, entry) for the pieces of a head's entries [first, last) that lie in one page each.
template <class F>
void for_pieces(const SequenceLayer& one, int64_t head, int64_t first, int64_t last, const F& f) {
  const Segments s = one.of_head(head);
  const int64_t bs = one.cache.block_size;
  for (int64_t i = first; i < last;) {
    const Place at = place_of_entry(one.cache, s, head, i);
    const int64_t count = std::min({bs - at.offset, last - i, i < s.front ? s.front - i : last - i});
    f(at.page, at.offset, count, i);
    i += count;
  }
}

// log_votes, scores, aux: [rows, n] float32; positions: [rows, n] int64. Votes and positions behind the front are
// implied. All seq_layers have n entries; those of a front that a head has no room for are dead.
void gather_metadata(const SequenceLayers& seq_layers, float* log_votes, float* scores, float* aux,
                     int64_t* positions) {
  if (seq_layers.empty()) return;
  const int64_t n = num_entries(seq_layers[0].segments);
  for_ranges(seq_layers, n, kEntriesPerTask,
             [&](const SequenceLayer& one, int64_t head, int64_t row, int64_t first, int64_t last) {
               const Segments& s = one.segments;
               for_pieces(one, head, first, last, [&](Page page, int64_t offset, int64_t count, int64_t entry) {
                 const int64_t to = row * n + entry;
                 const auto copy = [&](float* out, Plane which) {
                   std::memcpy(out + to, plane(one.cache, page, which) + offset, count * sizeof(float));
                 };
                 copy(scores, kScores);
                 copy(aux, kAux);
                 if (entry < s.front) {
                   copy(log_votes, kLogVotes);
                   const int32_t* from = reinterpret_cast<int32_t*>(plane(one.cache, page, kPositions)) + offset;
                   for (int64_t k = 0; k < count; ++k) positions[to + k] = from[k];
                   for (int64_t k = std::max<int64_t>(0, one.front_of(head) - entry); k < count; ++k) {
                     log_votes[to + k] = -std::numeric_limits<float>::infinity();
                     scores[to + k] = aux[to + k] = 0.0f;
                     positions[to + k] = -1;
                   }
                 } else {
                   std::fill_n(log_votes + to, count, 0.0f);
                   for (int64_t k = 0; k < count; ++k) positions[to + k] = s.tail + entry - s.front + k;
                 }
               });
             });
}

inline bool is_dead(const SequenceLayer& one, int64_t head, int64_t entry) {
  return entry < 0 || (entry >= one.front_of(head) && entry < one.segments.front);
}

// Keys of the entries at index, [count, head_size]. Where many lie in one block one after the other they are read
// together: an element's neighbours share its cache line.
template <class T>
void gather_keys(const SequenceLayer& one, int64_t head, const int64_t* index, int64_t count, float* rows) {
  const int64_t d = one.cache.head_size, bs = one.cache.block_size;
  const Segments s = one.of_head(head);
  constexpr int64_t kMany = 8;
  for (int64_t first = 0; first < count;) {
    if (is_dead(one, head, index[first])) {
      std::fill_n(rows + first++ * d, d, 0.0f);
      continue;
    }
    const Place start = place_of_entry(one.cache, s, head, index[first]);
    int64_t some = 1;
    while (first + some < count && index[first + some] == index[first] + some && !is_dead(one, head, index[first + some]) &&
           place_of_entry(one.cache, s, head, index[first + some]) == Place{start.page, start.offset + some})
      ++some;
    const T* keys = key_at<T>(start);
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

// Their keys, or their values, which lie one by one.
template <class T>
void gather_head(const SequenceLayer& one, int64_t head, bool keys, const int64_t* index, int64_t count, float* rows) {
  if (keys) return gather_keys<T>(one, head, index, count, rows);
  const int64_t d = one.cache.head_size;
  const Segments s = one.of_head(head);
  for (int64_t i = 0; i < count; ++i) {
    if (is_dead(one, head, index[i])) std::fill_n(rows + i * d, d, 0.0f);
    else read_value<T>(one.cache, place_of_entry(one.cache, s, head, index[i]), rows + i * d);
  }
}

// Places for entries, some of which have new keys or values: origin, [rows, num_places], is a place's entry; row,
// likewise, where it is in `rows`, [rows, num_rows, head_size]; negative: none. Without origins indices are of entries.
struct Changes {
  const int64_t *origin = nullptr, *row = nullptr;
  const float* rows = nullptr;
  int64_t num_places = 0, num_rows = 0;

  int64_t entry_at(int64_t head_row, int64_t index) const {
    return !origin || index < 0 ? index : origin[head_row * num_places + index];
  }
  // Null where there is nothing new.
  const float* new_at(int64_t head_row, int64_t index, int64_t head_size) const {
    if (!rows || index < 0) return nullptr;
    const int64_t number = row[head_row * num_places + index];
    return number < 0 ? nullptr : rows + (head_row * num_rows + number) * head_size;
  }
};

// rows: [rows, count, head_size] float32, of the entries or places index[row * count + i]; zeros where negative.
void gather_rows(const SequenceLayers& seq_layers, bool keys, const int64_t* index, int64_t count,
                 const Changes& changes, float* rows) {
  if (seq_layers.empty()) return;
  with_type(seq_layers[0].cache.dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    for_ranges(seq_layers, count, kEntriesPerTask,
               [&](const SequenceLayer& one, int64_t head, int64_t row, int64_t first, int64_t last) {
                 const int64_t start = row * count + first, d = one.cache.head_size;
                 const int64_t* some = index + start;
                 int64_t entries[kEntriesPerTask];
                 for (int64_t i = 0; i < last - first; ++i)
                   entries[i] = changes.new_at(row, some[i], d) ? -1 : changes.entry_at(row, some[i]);
                 gather_head<T>(one, head, keys, entries, last - first, rows + start * d);
                 for (int64_t i = 0; i < last - first; ++i)
                   if (const float* fresh = changes.new_at(row, some[i], d))
                     std::copy_n(fresh, d, rows + (start + i) * d);
               });
  });
}

constexpr int64_t kMixed = 64;  // sources that are read together

// mixed: [rows, num_targets, head_size] float32: each target's key or value (0 where there are no targets, or it is
// negative), with the sum of share (x - what it was) over those x of the sources, [rows, count], that join it: row_of,
// [rows, count], below num_targets; negative, as a source may be: none.
void mix_entries(const SequenceLayers& seq_layers, bool keys, const int64_t* sources, const int64_t* row_of,
                 const float* shares, int64_t count, const int64_t* targets, int64_t num_targets, float* mixed) {
  if (seq_layers.empty()) return;
  with_type(seq_layers[0].cache.dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    const int64_t heads = seq_layers[0].cache.num_heads, d = seq_layers[0].cache.head_size;
    const int64_t num_rows = static_cast<int64_t>(seq_layers.size()) * heads;
    parallel_for(num_rows, threads_for(seq_layers, count + num_targets), [&](int64_t row) {
      const SequenceLayer& one = seq_layers[row / heads];
      const int64_t head = row % heads, start = row * count;
      thread_local Scratch scratch;
      float *some = scratch.floats((kMixed + (targets ? num_targets : 0)) * d), *before = some + kMixed * d;
      float* out = mixed + row * num_targets * d;
      if (targets) gather_head<T>(one, head, keys, targets + row * num_targets, num_targets, out);
      else std::fill_n(out, num_targets * d, 0.0f);
      if (targets) std::copy_n(out, num_targets * d, before);
      for (int64_t first = 0; first < count; first += kMixed) {
        const int64_t last = std::min(count, first + kMixed);
        gather_head<T>(one, head, keys, sources + start + first, last - first, some);
        for (int64_t i = first; i < last; ++i) {
          const int64_t to = row_of[start + i];
          if (sources[start + i] < 0 || to < 0) continue;
          const float *x = some + (i - first) * d, share = shares[start + i];
          float* sum = out + to * d;
          if (targets)
            for (int64_t e = 0; e < d; ++e) sum[e] += share * (x[e] - before[to * d + e]);
          else
            for (int64_t e = 0; e < d; ++e) sum[e] += share * x[e];
        }
      }
    });
  });
}

// Which slot each source joins (Join in kernels.h). slots: [rows, num_slots] indices of entries; sources: [rows,
// num_sources], negative where there is none; the others likewise.
void join_entries(const Kernels& kernels, const SequenceLayers& seq_layers, const int64_t* slots, int64_t num_slots,
                  const int64_t* sources, int64_t num_sources, const float* source_weights, float* slot_weights,
                  int64_t* joined) {
  if (seq_layers.empty()) return;
  with_type(seq_layers[0].cache.dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    const int64_t heads = seq_layers[0].cache.num_heads, d = seq_layers[0].cache.head_size;
    const int64_t num_rows = static_cast<int64_t>(seq_layers.size()) * heads;
    parallel_for(num_rows, threads_for(seq_layers, num_slots + num_sources), [&](int64_t row) {
      thread_local Scratch scratch;
      float* keys = scratch.floats((num_slots + num_sources) * d + kernels.join_scratch(num_slots, num_sources, d));
      float* joining = keys + num_slots * d;
      const SequenceLayer& one = seq_layers[row / heads];
      gather_keys<T>(one, row % heads, slots + row * num_slots, num_slots, keys);
      gather_keys<T>(one, row % heads, sources + row * num_sources, num_sources, joining);
      kernels.join_slots(Join{keys, joining, source_weights + row * num_sources, num_slots, num_sources, d,
                              slot_weights + row * num_slots, joined + row * num_sources, joining + num_sources * d});
    });
  });
}

inline float inverse_length(float squares) { return 1.0f / std::max(std::sqrt(squares), 1e-12f); }

// Rounding must not lift a cosine above every threshold. A key that holds no number, or an infinite one, has none.
inline float similarity_of(float cosine, bool none) {
  return none || cosine != cosine ? -std::numeric_limits<float>::infinity() : std::min(1.0f, cosine);
}

// Writes the key of an entry or place as it is multiplied, elements `step` apart; zeros where there is none. Returns
// one over its length.
template <class T, class Q>
float read_key(const SequenceLayer& one, const Segments& s, int64_t head, int64_t row, const Changes& changes,
               int64_t index, Q* key, int64_t step) {
  const int64_t d = one.cache.head_size;
  typename SumOfSquares<T>::type squares = 0;
  const auto read = [&](const auto& number) {
    for (int64_t e = 0; e < d; ++e) {
      const float x = number(e);
      squares += static_cast<decltype(squares)>(x) * x;
      key[e * step] = from_float<Q>(x);
    }
  };
  const int64_t entry = changes.entry_at(row, index), bs = one.cache.block_size;
  if (const float* fresh = changes.new_at(row, index, d)) {
    read([&](int64_t e) { return to_float(from_float<Q>(fresh[e])); });
  } else if (entry >= 0) {
    const T* from = key_at<T>(place_of_entry(one.cache, s, head, entry));
    read([&](int64_t e) { return to_float(from[e * bs]); });
  } else {
    read([](int64_t) { return 0.0f; });
  }
  return inverse_length(static_cast<float>(squares));
}

// keys: [count, head_size], and one over the length of each.
template <class T, class Q>
void read_sources(const SequenceLayer& one, int64_t head, int64_t row, const Changes& changes, const int64_t* index,
                  int64_t count, Q* keys, float* lengths) {
  const Segments s = one.of_head(head);
  for (int64_t r = 0; r < count; ++r)
    lengths[r] =
        read_key<T>(one, s, head, row, changes, index[r], keys + r * one.cache.head_size, static_cast<int64_t>(1));
}

// Sources and targets of all heads, as the kernel multiplies them.
template <class T, class Q>
void find_most_similar(const Kernels& kernels, const SequenceLayers& seq_layers, const int64_t* sources,
                       int64_t num_sources, const int64_t* targets, int64_t num_targets, const uint8_t* usable,
                       const Changes& changes, float* similarity, int64_t* best) {
  const int64_t d = seq_layers[0].cache.head_size,
                heads = static_cast<int64_t>(seq_layers.size()) * seq_layers[0].cache.num_heads;
  const int64_t num_tiles = (num_targets + kTile - 1) / kTile;
  // Usable targets side by side: tiles [d, kTile], the length of each, which target it is.
  std::vector<Q> packed(heads * num_tiles * kTile * d);
  std::vector<float> inverse(heads * num_tiles * kTile);
  std::vector<int32_t> names(heads * num_tiles * kTile), counts(heads);
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < num_targets; ++i)
      if (usable[h * num_targets + i]) names[h * num_tiles * kTile + counts[h]++] = static_cast<int32_t>(i);

  for_ranges(seq_layers, num_tiles, kEntriesPerTask / kTile,
             [&](const SequenceLayer& one, int64_t head, int64_t row, int64_t first, int64_t last) {
               const Segments s = one.of_head(head);
               for (int64_t tile = first; tile < last; ++tile) {
                 const int64_t at = row * num_tiles + tile;
                 for (int64_t lane = 0; lane < kTile && tile * kTile + lane < counts[row]; ++lane) {
                   const int64_t target = names[at * kTile + lane];
                   inverse[at * kTile + lane] =
                       read_key<T>(one, s, head, row, changes, targets[row * num_targets + target],
                                   packed.data() + at * d * kTile + lane, kTile);
                 }
               }
             });

  constexpr int64_t kSourcesPerTask = 64;
  for_ranges(seq_layers, num_sources, kSourcesPerTask,
             [&](const SequenceLayer& one, int64_t kv_head, int64_t head, int64_t first, int64_t last) {
               thread_local Scratch scratch;
               const int64_t rows = last - first;
               float* lengths = scratch.floats(kSourcesPerTask * (d + 2) + kernels.similar_scratch(kSourcesPerTask, d));
               float* found = lengths + kSourcesPerTask;
               Q* keys = reinterpret_cast<Q*>(found + kSourcesPerTask);
               int32_t where[kSourcesPerTask];
               const int64_t* own = sources + head * num_sources + first;
               read_sources<T>(one, kv_head, head, changes, own, rows, keys, lengths);
               Similar x{};
               x.in_pairs = sizeof(Q) == 2;
               x.head_size = static_cast<int32_t>(d);
               x.num_sources = static_cast<int32_t>(rows);
               x.num_targets = counts[head];
               x.sources = keys;
               x.targets = packed.data() + head * num_tiles * kTile * d;
               x.inverse = inverse.data() + head * num_tiles * kTile;
               x.best = found;
               x.where = where;
               x.scratch = found + kSourcesPerTask + kSourcesPerTask * d;
               kernels.similar(x);
               for (int64_t r = 0; r < rows; ++r) {
                 const int64_t to = head * num_sources + first + r;
                 const bool none = counts[head] == 0;
                 similarity[to] = similarity_of(found[r] * lengths[r], none || own[r] < 0);
                 best[to] = targets[head * num_targets + (none ? 0 : names[head * num_tiles * kTile + where[r]])];
               }
             });
}

// The same where sources are few and most entries are targets: keys are multiplied where they lie.
template <class T, class Q>
void find_most_similar_entries(const Kernels& kernels, const SequenceLayers& seq_layers, const int64_t* sources,
                               int64_t num_sources, const int64_t* targets, int64_t num_targets, const uint8_t* usable,
                               float* similarity, int64_t* best) {
  const int64_t d = seq_layers[0].cache.head_size, heads = seq_layers[0].cache.num_heads,
                n = num_entries(seq_layers[0].segments);
  parallel_for(static_cast<int64_t>(seq_layers.size()) * heads, threads_for(seq_layers, n), [&](int64_t row) {
    const SequenceLayer& one = seq_layers[row / heads];
    const int64_t head = row % heads, *own = targets + row * num_targets;
    thread_local Scratch scratch;
    float* lengths = scratch.floats(num_sources * (d + 3) + n + kernels.similar_entries_scratch(num_sources, d));
    float* found = lengths + num_sources;
    int32_t *where = reinterpret_cast<int32_t*>(found + num_sources), *ranks = where + num_sources;
    Q* keys = reinterpret_cast<Q*>(ranks + n);
    read_sources<T>(one, head, row, Changes{}, sources + row * num_sources, num_sources, keys, lengths);
    std::fill_n(ranks, n, INT32_MAX);
    for (int64_t i = num_targets - 1; i >= 0; --i)
      if (usable[row * num_targets + i]) ranks[own[i]] = static_cast<int32_t>(i);
    SimilarEntries x{};
    x.cache = &one.cache;
    x.segments = one.of_head(head);
    x.head = static_cast<int32_t>(head);
    x.num_sources = static_cast<int32_t>(num_sources);
    x.in_pairs = sizeof(Q) == 2;
    x.sources = keys;
    x.ranks = ranks;
    x.best = found;
    x.where = where;
    x.scratch = reinterpret_cast<float*>(ranks + n) + num_sources * d;
    kernels.similar_entries(x);
    for (int64_t r = 0; r < num_sources; ++r) {
      const bool none = where[r] == INT32_MAX;
      const int64_t to = row * num_sources + r;
      similarity[to] = similarity_of(found[r] * lengths[r], none || sources[to] < 0);
      best[row * num_sources + r] = own[none ? 0 : where[r]];
    }
  });
}

template <class T, class Q>
void find(const Kernels& kernels, const SequenceLayers& seq_layers, const int64_t* sources, int64_t num_sources,
          const int64_t* targets, int64_t num_targets, const uint8_t* usable, const Changes& changes,
          float* similarity, int64_t* best) {
  constexpr int64_t kFewSources = 64;
  const bool few = num_sources <= kFewSources && 2 * num_targets >= num_entries(seq_layers[0].segments);
  if (few && !changes.origin)
    find_most_similar_entries<T, Q>(kernels, seq_layers, sources, num_sources, targets, num_targets, usable, similarity,
                                    best);
  else
    find_most_similar<T, Q>(kernels, seq_layers, sources, num_sources, targets, num_targets, usable, changes,
                            similarity, best);
}

// similarity, best: [rows, num_sources].
void most_similar(const Kernels& kernels, const SequenceLayers& seq_layers, const int64_t* sources, int64_t num_sources,
                  const int64_t* targets, int64_t num_targets, const uint8_t* usable, const Changes& changes,
                  float* similarity, int64_t* best) {
  if (seq_layers.empty() || num_sources == 0) return;
  const auto run = [&](auto find) {
    find(kernels, seq_layers, sources, num_sources, targets, num_targets, usable, changes, similarity, best);
  };
  const DType dtype = seq_layers[0].cache.dtype;
  // Products of bfloat16 are exact in float32, so pairs lose nothing.
  if (dtype == DType::f32) run(find<float, float>);
  else if (dtype == DType::f16) run(find<F16, float>);
  else if (dtype == DType::e4m3) run(find<E4M3, float>);
  else if (dtype == DType::e5m2) run(find<E5M2, float>);
  else if (kernels.has_pairs) run(find<BF16, BF16>);
  else run(find<BF16, float>);
}

// fused: [rows, n], see Fuse. queries: [rows, group, num_queries, head_size]; query_positions: [rows, num_queries];
// log_votes, positions: [rows, n].
void fused_attention(const Kernels& kernels, const SequenceLayers& seq_layers, const Rows& queries, int64_t group,
                     const int64_t* query_positions, int64_t num_queries, const float* log_votes,
                     const int64_t* positions, float scale, Softmax softmax, bool largest, float* fused) {
  if (seq_layers.empty()) return;
  const int64_t heads = seq_layers[0].cache.num_heads, d = seq_layers[0].cache.head_size;
  const int64_t n = num_entries(seq_layers[0].segments);
  parallel_for(static_cast<int64_t>(seq_layers.size()) * heads, threads_for(seq_layers, n), [&](int64_t row) {
    const SequenceLayer& one = seq_layers[row / heads];
    const Segments segments = one.of_head(row % heads);
    const int64_t num_tiles = Tiles(one.cache, segments, row % heads).count;
    thread_local Scratch scratch;
    Fuse f{};
    f.cache = &one.cache;
    f.segments = segments;
    f.head = static_cast<int32_t>(row % heads);
    f.group = static_cast<int32_t>(group);
    f.num_queries = static_cast<int32_t>(num_queries);
    f.queries = queries;
    f.queries.data = static_cast<char*>(queries.data) +
                     row * group * num_queries * d * (queries.dtype == DType::f32 ? sizeof(float) : sizeof(BF16));
    f.query_positions = query_positions + row * num_queries;
    f.log_votes = log_votes + row * n;
    f.positions = positions + row * n;
    f.scale = scale;
    f.cap = softmax.cap;
    f.sinks = softmax.sinks ? softmax.sinks + row * group : nullptr;
    f.largest = largest;
    f.fused = fused + row * n;
    f.scratch = scratch.floats(kernels.fuse_scratch(group, num_queries, d, num_tiles));
    kernels.fuse(f);
  });
}

// destinations: where each one's places are; kept: [rows, count]. What a head has no room for is not written.
void move_entries(const SequenceLayers& seq_layers, const SequenceLayers& destinations, const int64_t* kept,
                  int64_t num_places) {
  if (seq_layers.empty()) return;
  with_type(seq_layers[0].cache.dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    const int64_t heads = seq_layers[0].cache.num_heads, d = seq_layers[0].cache.head_size,
                  bs = seq_layers[0].cache.block_size;
    // A head's moves are in one buffer before the first is written, because places may overlap.
    parallel_for(static_cast<int64_t>(seq_layers.size()) * heads, threads_for(seq_layers, num_places), [&](int64_t row) {
      const PagedKVCache& cache = seq_layers[row / heads].cache;
      const int64_t *from = kept + row * num_places, head = row % heads;
      const int64_t count = places_of(destinations[row / heads], head, num_places);
      const Segments s = seq_layers[row / heads].of_head(head), to = destinations[row / heads].of_head(head);
      thread_local std::vector<int64_t> moving, empty;
      moving.clear();
      empty.clear();
      for (int64_t first = 0; first < count; first += bs) {
        const int64_t last = std::min(count, first + bs);
        // Nearly all entries stay, which takes no arithmetic to see.
        const bool same = first < s.front && page_of(cache, s, head, first / bs, true).rows ==
                                                 page_of(cache, to, head, first / bs, true).rows;
        const int64_t stays = same ? s.front : 0;
        for (int64_t i = first; i < last; ++i) {
          if (from[i] == i && i < stays) continue;
          if (from[i] < 0) empty.push_back(i);
          else if (!(place_of_entry(cache, s, head, from[i]) == place_of_slot(cache, to, head, i, true)))
            moving.push_back(i);
        }
      }
      thread_local Scratch scratch;
      T* buffer = reinterpret_cast<T*>(scratch.floats(static_cast<int64_t>(moving.size() + 1) * 2 * d));
      T* next = buffer;
      for (int64_t i : moving) {
        const Place at = place_of_entry(cache, s, head, from[i]);
        const T* key = key_at<T>(at);
        for (int64_t e = 0; e < d; ++e) next[e] = key[e * bs];
        std::memcpy(next + d, value_at<T>(cache, at), d * sizeof(T));
        next += 2 * d;
      }
      const auto write = [&](int64_t slot, const T* values) {
        const Place at = place_of_slot(cache, to, head, slot, true);
        T* key = key_at<T>(at);
        for (int64_t e = 0; e < d; ++e) key[e * bs] = values[e];
        std::memcpy(value_at<T>(cache, at), values + d, d * sizeof(T));
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

// places: [rows, count] of each one's. keys, values: [rows, count, head_size] or null.
void write_rows(const SequenceLayers& seq_layers, const int64_t* places, int64_t count, const float* keys,
                const float* values) {
  if (seq_layers.empty()) return;
  with_type(seq_layers[0].cache.dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    for_ranges(seq_layers, count, kEntriesPerTask,
               [&](const SequenceLayer& one, int64_t head, int64_t row, int64_t first, int64_t last) {
                 const int64_t d = one.cache.head_size, bs = one.cache.block_size;
                 const Segments s = one.of_head(head);
                 const int64_t num_places = places_of(one, head, INT64_MAX);
                 for (int64_t i = row * count + first; i < row * count + last; ++i) {
                   if (places[i] < 0 || places[i] >= num_places) continue;
                   const Place to = place_of_slot(one.cache, s, head, places[i], true);
                   if (keys) {
                     T* key = key_at<T>(to);
                     for (int64_t e = 0; e < d; ++e) key[e * bs] = from_float<T>(keys[i * d + e]);
                   }
                   if (values) {
                     T* value = value_at<T>(one.cache, to);
                     for (int64_t e = 0; e < d; ++e) value[e] = from_float<T>(values[i * d + e]);
                   }
                 }
               });
  });
}

// [rows, count] each, to each one's places [0, count).
void write_metadata(const SequenceLayers& seq_layers, int64_t count, const float* log_votes, const float* scores,
                    const float* aux, const int64_t* positions) {
  for_ranges(seq_layers, count, kEntriesPerTask,
             [&](const SequenceLayer& one, int64_t head, int64_t row, int64_t first, int64_t last) {
               const int64_t bs = one.cache.block_size;
               const Segments s = one.of_head(head);
               last = std::min(last, places_of(one, head, count));
               for (int64_t slot = first; slot < last;) {
                 const int64_t offset = slot % bs, some = std::min(bs - offset, last - slot), from = row * count + slot;
                 const Page page = page_of(one.cache, s, head, slot / bs, true);
                 const auto copy = [&](const float* in, Plane which) {
                   std::memcpy(plane(one.cache, page, which) + offset, in + from, some * sizeof(float));
                 };
                 copy(log_votes, kLogVotes);
                 copy(scores, kScores);
                 copy(aux, kAux);
                 int32_t* to = reinterpret_cast<int32_t*>(plane(one.cache, page, kPositions)) + offset;
                 for (int64_t k = 0; k < some; ++k) to[k] = static_cast<int32_t>(positions[from + k]);
                 slot += some;
               }
             });
}

// Turns the keys of each one's places [0, count) as if RoPE had counted positions `after` instead of `before` ([rows,
// count] each): by the angle between the table's rows, [num_positions, 2 * num_pairs]: cosines, then sines. A key where
// both are equal, or `after` is negative, stays.
void turn_keys(const SequenceLayers& seq_layers, int64_t count, const int64_t* before, const int64_t* after,
               const float* table, int64_t num_positions, int64_t num_pairs, bool is_neox) {
  if (seq_layers.empty()) return;
  const auto row_of = [&](int64_t position) {
    return table + std::clamp<int64_t>(position, 0, num_positions - 1) * 2 * num_pairs;
  };
  with_type(seq_layers[0].cache.dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    for_ranges(seq_layers, count, kEntriesPerTask,
               [&](const SequenceLayer& one, int64_t head, int64_t row, int64_t first, int64_t last) {
                 const int64_t bs = one.cache.block_size;
                 const Segments s = one.of_head(head);
                 last = std::min(last, places_of(one, head, count));
                 // A block's turns, slots next to each other as in its keys.
                 std::vector<float> cos(num_pairs * bs), sin(num_pairs * bs);
                 std::vector<uint8_t> moves(bs);
                 for (int64_t slot = first; slot < last;) {
                   const int64_t offset = slot % bs, some = std::min(bs - offset, last - slot);
                   for (int64_t k = 0; k < some; ++k) {
                     const int64_t from = before[row * count + slot + k], to = after[row * count + slot + k];
                     moves[k] = to >= 0 && to != from;
                     if (!moves[k]) {
                       for (int64_t i = 0; i < num_pairs; ++i) cos[i * bs + k] = sin[i * bs + k] = 0.0f;
                       continue;
                     }
                     const float *a = row_of(from), *b = row_of(to);
                     for (int64_t i = 0; i < num_pairs; ++i) {
                       const float c = a[i], d = a[num_pairs + i], size = c * c + d * d;
                       cos[i * bs + k] = (b[i] * c + b[num_pairs + i] * d) / size;
                       sin[i * bs + k] = (b[num_pairs + i] * c - b[i] * d) / size;
                     }
                   }
                   T* keys = key_at<T>(place_of_slot(one.cache, s, head, slot, true));
                   for (int64_t i = 0; i < num_pairs; ++i) {
                     T *x = keys + (is_neox ? i : 2 * i) * bs, *y = keys + (is_neox ? i + num_pairs : 2 * i + 1) * bs;
                     const float *c = cos.data() + i * bs, *d = sin.data() + i * bs;
                     for (int64_t k = 0; k < some; ++k) {
                       const float p = to_float(x[k]), q = to_float(y[k]);
                       const T turned_x = from_float<T>(p * c[k] - q * d[k]);
                       const T turned_y = from_float<T>(q * c[k] + p * d[k]);
                       x[k] = moves[k] ? turned_x : x[k];
                       y[k] = moves[k] ? turned_y : y[k];
                     }
                   }
                   slot += some;
                 }
               });
  });
}

// slots: block * block_size + offset, negative: none.
void write_tokens(const PagedKVCache& cache, const std::vector<int64_t>& slots, const Rows& keys, const Rows& values) {
  with_type(cache.dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    with_type(keys.dtype, [&](auto* from) {
      typedef std::remove_pointer_t<decltype(from)> U;
      for_ranges({SequenceLayer{cache, {}}}, static_cast<int64_t>(slots.size()), kEntriesPerTask,
                 [&](const SequenceLayer&, int64_t head, int64_t, int64_t first, int64_t last) {
                   for (int64_t i = first; i < last; ++i) {
                     if (slots[i] < 0) continue;
                     const Place to{page_of_block(cache, slots[i] / cache.block_size, head), slots[i] % cache.block_size};
                     const U* k = static_cast<const U*>(keys.data) + i * keys.token_stride + head * keys.head_stride;
                     const U* v =
                         static_cast<const U*>(values.data) + i * values.token_stride + head * values.head_stride;
                     T *key = key_at<T>(to), *value = value_at<T>(cache, to);
                     for (int64_t e = 0; e < cache.head_size; ++e) {
                       key[e * cache.block_size] = from_float<T>(to_float(k[e]));
                       value[e] = from_float<T>(to_float(v[e]));
                     }
                   }
                 });
    });
  });
}

// The operators as apache-tvm-ffi functions.

// Sequence layers: number u lies in the cache of layer[u], in row u of `blocks`; its heads' fronts perhaps in pages of
// their own.
struct Batch {
  BlockIds blocks;
  std::vector<Page> pages;
  int64_t num_blocks = 0, num_rows = 0, num_entries = 0, head_size = 0;
  SequenceLayers seq_layers;

  Batch(const Tensors& layers, const TensorView& layer, const TensorView& ids, const OptionalTensor& page_ids,
        const OptionalTensor& fronts) {
    const int64_t num_units = layer.ndim() == 1 ? layer.size(0) : 0;
    const std::vector<int64_t> which = Argument("layer", layer).integers(num_units);
    const Argument table("blocks", ids);
    table.check_shape({num_units, -1});
    blocks = table.block_ids();
    num_blocks = table.size(1);
    const std::vector<PagedKVCache> cache = caches_of(layers);
    for (int64_t u = 0; u < num_units; ++u) {
      KVM_CHECK(0 <= which[u] && which[u] < static_cast<int64_t>(cache.size()), IndexError) << "no layer " << which[u];
      seq_layers.push_back(SequenceLayer{cache[which[u]], Segments{blocks.row(u), 0, 0, 0}});
    }
    if (seq_layers.empty()) return;
    num_rows = num_units * cache.front().num_heads;
    head_size = cache.front().head_size;
    if (!page_ids.has_value() || !fronts.has_value()) return;
    const HeadPages found = head_pages_of(cache, page_ids.value(), fronts.value(), num_units);
    pages = found.pages;
    for (const Page& page : pages) KVM_CHECK(page.rows, ValueError) << "a head has no pages";
    const int64_t per_unit = cache.front().num_heads * found.num_pages;
    for (int64_t u = 0; u < num_units; ++u) {
      seq_layers[u].pages = pages.data() + u * per_unit;
      seq_layers[u].fronts = found.fronts + u * cache.front().num_heads;
      seq_layers[u].num_pages = found.num_pages;
    }
  }

  // With the segments that the seq_layers' live entries are in, equally many each.
  Batch(const Tensors& layers, const TensorView& layer, const TensorView& ids, const TensorView& segments,
        const OptionalTensor& page_ids, const OptionalTensor& fronts)
      : Batch(layers, layer, ids, page_ids, fronts) {
    const Argument s("segments", segments);
    const int64_t* bounds = s.contiguous({static_cast<int64_t>(seq_layers.size()), 3}).i64();
    for (SequenceLayer& one : seq_layers) {
      one.segments = segments_of(one.cache, one.segments.blocks, num_blocks, bounds[0], bounds[1], bounds[2],
                                 one.pages ? one.num_pages : -1);
      const int64_t count = bounds[0] + bounds[2] - bounds[1];
      KVM_CHECK(&one == &seq_layers.front() || count == num_entries, ValueError)
          << "seq_layers differ in number of entries";
      num_entries = count;
      bounds += 3;
    }
  }

  // [rows, count] numbers below size, or negative.
  const int64_t* indices(const char* name, const char* what, const TensorView& index, int64_t size) const {
    const Argument a(name, index);
    const int64_t *values = a.contiguous({num_rows, -1}).i64(), count = a.size(0) * a.size(1);
    bool valid = true;
    for (int64_t i = 0; i < count; ++i) valid &= values[i] < size;
    for (int64_t i = 0; !valid && i < count; ++i)
      KVM_CHECK(values[i] < size, IndexError)
          << name << ": there is no " << what << " " << values[i] << " among " << size;
    return values;
  }

  // [rows, count] indices of entries, negative where there is none.
  const int64_t* entries(const char* name, const TensorView& index) const {
    return indices(name, "entry", index, num_entries);
  }

  // The same of places, if there are changes.
  const int64_t* entries(const char* name, const TensorView& index, const Changes& changes) const {
    return changes.origin ? indices(name, "place", index, changes.num_places) : entries(name, index);
  }

  Changes changes(const OptionalTensor& origin, const OptionalTensor& row, const OptionalTensor& rows) const {
    Changes found;
    if (!origin.has_value()) return found;
    found.origin = entries("origin", origin.value());
    found.num_places = origin.value().size(1);
    if (!row.has_value() || !rows.has_value()) return found;
    const TensorView values = rows.value();
    found.rows = Argument("rows", values).contiguous({num_rows, -1, head_size}).f32();
    found.num_rows = values.size(1);
    found.row = indices("row", "row", row.value(), found.num_rows);
    Argument("row", row.value()).check_shape({num_rows, found.num_places});
    return found;
  }

  // Checks that the places [0, count) exist.
  void check_places(int64_t count) const {
    for (const SequenceLayer& one : seq_layers)
      if (!one.pages) segments_of(one.cache, one.segments.blocks, num_blocks, 0, 0, count);
  }
};

void call_gather_metadata(Tensors layers, TensorView layer, TensorView blocks, TensorView segments,
                          OptionalTensor pages, OptionalTensor fronts, TensorView log_votes, TensorView scores,
                          TensorView aux, TensorView positions) {
  const Batch batch(layers, layer, blocks, segments, pages, fronts);
  const std::vector<int64_t> shape = {batch.num_rows, batch.num_entries};
  gather_metadata(batch.seq_layers, Argument("log_votes", log_votes).contiguous(shape).f32(),
                  Argument("scores", scores).contiguous(shape).f32(), Argument("aux", aux).contiguous(shape).f32(),
                  Argument("positions", positions).contiguous(shape).i64());
}

void call_gather_rows(Tensors layers, TensorView layer, TensorView blocks, TensorView segments, OptionalTensor pages,
                      OptionalTensor fronts, bool of_keys, TensorView index, OptionalTensor origin, OptionalTensor row,
                      OptionalTensor new_rows, TensorView rows) {
  const Batch batch(layers, layer, blocks, segments, pages, fronts);
  const Changes changes = batch.changes(origin, row, new_rows);
  const int64_t* entries = batch.entries("index", index, changes);
  float* out = Argument("rows", rows).contiguous({batch.num_rows, index.size(1), batch.head_size}).f32();
  gather_rows(batch.seq_layers, of_keys, entries, index.size(1), changes, out);
}

void call_mix_entries(Tensors layers, TensorView layer, TensorView blocks, TensorView segments, OptionalTensor pages,
                      OptionalTensor fronts, bool of_keys, TensorView sources, TensorView row, TensorView shares,
                      OptionalTensor targets, TensorView mixed) {
  const Batch batch(layers, layer, blocks, segments, pages, fronts);
  const int64_t* entries = batch.entries("sources", sources);
  const int64_t count = sources.size(1);
  const int64_t* own = nullptr;
  int64_t num_targets = count;
  if (targets.has_value()) {
    const TensorView given = targets.value();
    own = batch.entries("targets", given);
    num_targets = given.size(1);
  }
  const int64_t* row_of = Argument("row", row).contiguous({batch.num_rows, count}).i64();
  for (int64_t i = 0; i < batch.num_rows * count; ++i)
    KVM_CHECK(row_of[i] < num_targets, IndexError) << "there is no target " << row_of[i] << " of " << num_targets;
  mix_entries(batch.seq_layers, of_keys, entries, row_of,
              Argument("shares", shares).contiguous({batch.num_rows, count}).f32(), count, own, num_targets,
              Argument("mixed", mixed).contiguous({batch.num_rows, num_targets, batch.head_size}).f32());
}

void call_join_entries(Tensors layers, TensorView layer, TensorView blocks, TensorView segments, OptionalTensor pages,
                       OptionalTensor fronts, TensorView slots, TensorView sources, TensorView source_weights,
                       TensorView slot_weights, TensorView joined) {
  const Batch batch(layers, layer, blocks, segments, pages, fronts);
  const int64_t *s = batch.entries("slots", slots), *m = batch.entries("sources", sources);
  const int64_t num_slots = slots.size(1), num_sources = sources.size(1);
  KVM_CHECK(num_slots > 0 || num_sources == 0, ValueError) << "there must be a slot";
  join_entries(current(), batch.seq_layers, s, num_slots, m, num_sources,
               Argument("source_weights", source_weights).contiguous({batch.num_rows, num_sources}).f32(),
               Argument("slot_weights", slot_weights).contiguous({batch.num_rows, num_slots}).f32(),
               Argument("joined", joined).contiguous({batch.num_rows, num_sources}).i64());
}

void call_most_similar(Tensors layers, TensorView layer, TensorView blocks, TensorView segments, OptionalTensor pages,
                       OptionalTensor fronts, TensorView sources, TensorView targets, TensorView usable,
                       OptionalTensor origin, OptionalTensor row, OptionalTensor new_keys, TensorView similarity,
                       TensorView best) {
  const Batch batch(layers, layer, blocks, segments, pages, fronts);
  const Changes changes = batch.changes(origin, row, new_keys);
  const int64_t *m = batch.entries("sources", sources, changes), *c = batch.entries("targets", targets, changes);
  const int64_t num_sources = sources.size(1), num_targets = targets.size(1);
  KVM_CHECK(num_targets > 0 || num_sources == 0, ValueError) << "there must be a target";
  const uint8_t* use = Argument("usable", usable).contiguous({batch.num_rows, num_targets}).boolean();
  float* found = Argument("similarity", similarity).contiguous({batch.num_rows, num_sources}).f32();
  int64_t* names = Argument("best", best).contiguous({batch.num_rows, num_sources}).i64();
  for (int64_t i = 0; i < batch.num_rows * num_targets; ++i)
    KVM_CHECK(c[i] >= 0 || !use[i], IndexError) << "targets: " << c[i] << " is usable";
  most_similar(current(), batch.seq_layers, m, num_sources, c, num_targets, use, changes, found, names);
}

void call_fused_attention(Tensors layers, TensorView layer, TensorView blocks, TensorView segments,
                          OptionalTensor pages, OptionalTensor fronts, TensorView queries, TensorView query_positions,
                          TensorView log_votes, TensorView positions, double scale, bool largest, TensorView fused,
                          double cap, OptionalTensor sinks) {
  const Batch batch(layers, layer, blocks, segments, pages, fronts);
  const Argument q("queries", queries);
  const Rows rows{q.contiguous({batch.num_rows, -1, -1, batch.head_size}).data(), 0, 0, q.float_type()};
  const int64_t group = q.size(1), num_queries = q.size(2);
  KVM_CHECK(group > 0 && num_queries > 0, ValueError) << "there must be a query";
  const std::vector<int64_t> shape = {batch.num_rows, batch.num_entries};
  fused_attention(current(), batch.seq_layers, rows, group,
                  Argument("query_positions", query_positions).contiguous({batch.num_rows, num_queries}).i64(),
                  num_queries, Argument("log_votes", log_votes).contiguous(shape).f32(),
                  Argument("positions", positions).contiguous(shape).i64(), static_cast<float>(scale),
                  softmax_of(cap, sinks, batch.num_rows, group), largest,
                  Argument("fused", fused).contiguous(shape).f32());
}

void call_move_entries(Tensors layers, TensorView layer, TensorView blocks, TensorView segments, OptionalTensor pages,
                       OptionalTensor fronts, TensorView new_blocks, OptionalTensor new_pages,
                       OptionalTensor new_fronts, TensorView kept) {
  const Batch batch(layers, layer, blocks, segments, pages, fronts), to(layers, layer, new_blocks, new_pages, new_fronts);
  const int64_t* entries = batch.entries("kept", kept);
  to.check_places(kept.size(1));
  move_entries(batch.seq_layers, to.seq_layers, entries, kept.size(1));
}

void call_write_rows(Tensors layers, TensorView layer, TensorView blocks, OptionalTensor pages, OptionalTensor fronts,
                     TensorView places, OptionalTensor keys, OptionalTensor values) {
  const Batch batch(layers, layer, blocks, pages, fronts);
  const int64_t* slots = Argument("places", places).contiguous({batch.num_rows, -1}).i64();
  const int64_t count = places.size(1), heads = batch.seq_layers.empty() ? 1 : batch.seq_layers[0].cache.num_heads;
  for (int64_t i = 0; i < batch.num_rows * count; ++i) {
    const SequenceLayer& one = batch.seq_layers[i / count / heads];
    if (slots[i] >= 0 && !one.pages) check_slot(one.cache, one.segments.blocks, batch.num_blocks, slots[i]);
  }
  const std::vector<int64_t> shape = {batch.num_rows, count, batch.head_size};
  const auto rows = [&](const char* name, const OptionalTensor& t) -> const float* {
    if (!t.has_value()) return nullptr;
    const TensorView view = t.value();
    return Argument(name, view).contiguous(shape).f32();
  };
  write_rows(batch.seq_layers, slots, count, rows("keys", keys), rows("values", values));
}

void call_write_metadata(Tensors layers, TensorView layer, TensorView blocks, OptionalTensor pages,
                         OptionalTensor fronts, TensorView log_votes, TensorView scores, TensorView aux,
                         TensorView positions) {
  const Batch batch(layers, layer, blocks, pages, fronts);
  const float* votes = Argument("log_votes", log_votes).contiguous({batch.num_rows, -1}).f32();
  const int64_t count = log_votes.size(1);
  batch.check_places(count);
  const std::vector<int64_t> shape = {batch.num_rows, count};
  write_metadata(batch.seq_layers, count, votes, Argument("scores", scores).contiguous(shape).f32(),
                 Argument("aux", aux).contiguous(shape).f32(),
                 Argument("positions", positions).contiguous(shape).i64());
}

void call_turn_keys(Tensors layers, TensorView layer, TensorView blocks, OptionalTensor pages, OptionalTensor fronts,
                    TensorView before, TensorView after, TensorView table, bool is_neox) {
  const Batch batch(layers, layer, blocks, pages, fronts);
  const int64_t* from = Argument("before", before).contiguous({batch.num_rows, -1}).i64();
  const int64_t count = before.size(1);
  batch.check_places(count);
  const int64_t* to = Argument("after", after).contiguous({batch.num_rows, count}).i64();
  const float* rows = Argument("table", table).contiguous({-1, -1}).f32();
  KVM_CHECK(table.size(0) > 0 && table.size(1) % 2 == 0 && table.size(1) <= batch.head_size, ValueError)
      << "table of " << table.size(0) << " positions and " << table.size(1) << " numbers";
  turn_keys(batch.seq_layers, count, from, to, rows, table.size(0), table.size(1) / 2, is_neox);
}

void call_write_tokens(TensorView cache_keys, TensorView slot_mapping, TensorView key, TensorView value) {
  const PagedKVCache cache = cache_of(cache_keys);
  KVM_CHECK(slot_mapping.ndim() == 1, ValueError) << "slot_mapping must have one dimension";
  const std::vector<int64_t> slots = Argument("slot_mapping", slot_mapping).integers(slot_mapping.size(0));
  for (int64_t slot : slots)
    KVM_CHECK(slot < cache.num_blocks * cache.block_size, IndexError) << "slot " << slot << " is not in the cache";
  const Rows keys = Argument("key", key).rows(cache.num_heads, cache.head_size),
             values = Argument("value", value).rows(cache.num_heads, cache.head_size);
  KVM_CHECK(key.size(0) >= slot_mapping.size(0) && value.size(0) >= slot_mapping.size(0), ValueError)
      << "fewer tokens than slots";
  KVM_CHECK(keys.dtype == values.dtype, TypeError) << "key and value must have the same dtype";
  write_tokens(cache, slots, keys, values);
}

}  // namespace
}  // namespace kvmerge

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_metadata, kvmerge::call_gather_metadata);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_rows, kvmerge::call_gather_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mix_entries, kvmerge::call_mix_entries);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(join_entries, kvmerge::call_join_entries);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(most_similar, kvmerge::call_most_similar);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fused_attention, kvmerge::call_fused_attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(move_entries, kvmerge::call_move_entries);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_rows, kvmerge::call_write_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_metadata, kvmerge::call_write_metadata);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(turn_keys, kvmerge::call_turn_keys);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_tokens, kvmerge::call_write_tokens);
