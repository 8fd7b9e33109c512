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

// Calls task(head, first, last) for ranges of `count` items of every head.
template <class F>
void for_ranges(const Pages& pages, int64_t count, int64_t per_task, const F& task) {
  const int64_t ranges = (count + per_task - 1) / per_task;
  const int threads = count * pages.num_heads < kMinParallelEntries ? 1 : max_threads();
  parallel_for(ranges * pages.num_heads, threads, [&](int64_t i) {
    const int64_t first = i % ranges * per_task;
    task(i / ranges, first, std::min(count, first + per_task));
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

inline Place place_of_slot(const Pages& pages, const int32_t* blocks, int64_t slot) {
  return {blocks[slot / pages.block_size], slot % pages.block_size};
}

inline Place place_of_entry(const Pages& pages, const Segments& s, int64_t entry) {
  return place_of_slot(pages, s.blocks, entry < s.front ? entry : s.tail + entry - s.front);
}

// The key at a place: elements block_size apart.
template <class T>
inline T* key_at(const Pages& pages, int64_t head, Place at) {
  return reinterpret_cast<T*>(region(pages, at.block, head)) + at.offset;
}

template <class T>
inline T* value_at(const Pages& pages, int64_t head, Place at) {
  return reinterpret_cast<T*>(region(pages, at.block, head)) +
         (static_cast<int64_t>(pages.block_size) + at.offset) * pages.head_size;
}

template <class T>
inline void read_key(const Pages& pages, int64_t head, Place at, float* out) {
  const T* key = key_at<T>(pages, head, at);
  for (int64_t e = 0; e < pages.head_size; ++e) out[e] = to_float(key[e * pages.block_size]);
}

template <class T>
inline void read_value(const Pages& pages, int64_t head, Place at, float* out) {
  const T* value = value_at<T>(pages, head, at);
  for (int64_t e = 0; e < pages.head_size; ++e) out[e] = to_float(value[e]);
}

inline int64_t num_entries(const Segments& s) { return s.front + s.seq_len - s.tail; }

}  // namespace

void gather_metadata(const Pages& pages, const Segments& s, float* log_votes, float* scores, float* aux,
                     int64_t* positions) {
  const int64_t n = num_entries(s);
  for_ranges(pages, n, kEntriesPerTask, [&](int64_t head, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const Place at = place_of_entry(pages, s, i);
      const int64_t to = head * n + i;
      scores[to] = plane(pages, at.block, head, kScores)[at.offset];
      aux[to] = plane(pages, at.block, head, kAux)[at.offset];
      log_votes[to] = i < s.front ? plane(pages, at.block, head, kLogVotes)[at.offset] : 0.0f;
      positions[to] = i < s.front ? reinterpret_cast<int32_t*>(plane(pages, at.block, head, kPositions))[at.offset]
                                  : s.tail + i - s.front;
    }
  });
}

void gather_rows(const Pages& pages, bool keys, const Segments& s, const int64_t* index, int64_t count, float* rows) {
  with_type(pages.dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    for_ranges(pages, count, kEntriesPerTask, [&](int64_t head, int64_t first, int64_t last) {
      for (int64_t i = head * count + first; i < head * count + last; ++i) {
        float* out = rows + i * pages.head_size;
        if (index[i] < 0) std::fill_n(out, pages.head_size, 0.0f);
        else if (keys) read_key<T>(pages, head, place_of_entry(pages, s, index[i]), out);
        else read_value<T>(pages, head, place_of_entry(pages, s, index[i]), out);
      }
    });
  });
}

void gather_all(const Pages& pages, const Segments& s, float* keys, float* values) {
  const int64_t n = num_entries(s), d = pages.head_size;
  with_type(pages.dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    for_ranges(pages, n, kEntriesPerTask, [&](int64_t head, int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const Place at = place_of_entry(pages, s, i);
        read_key<T>(pages, head, at, keys + (head * n + i) * d);
        read_value<T>(pages, head, at, values + (head * n + i) * d);
      }
    });
  });
}

namespace {

// Members and carriers of all heads, as the kernel multiplies them.
template <class T, class Q>
void find_most_similar(const Kernels& kernels, const Pages& pages, const Segments& s, const int64_t* members,
                       int64_t num_members, const int64_t* carriers, int64_t num_carriers, const uint8_t* usable,
                       float* similarity, int64_t* best) {
  const int64_t d = pages.head_size, heads = pages.num_heads;
  const int64_t num_tiles = (num_carriers + kTile - 1) / kTile;
  // Usable carriers side by side: tiles [d, kTile], the length of each, which carrier it is.
  std::vector<Q> packed(heads * num_tiles * kTile * d);
  std::vector<float> inverse(heads * num_tiles * kTile);
  std::vector<int32_t> names(heads * num_tiles * kTile), counts(heads);
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < num_carriers; ++i)
      if (usable[h * num_carriers + i]) names[h * num_tiles * kTile + counts[h]++] = static_cast<int32_t>(i);

  const auto inverse_length = [&](float squares) { return 1.0f / std::max(std::sqrt(squares), 1e-12f); };
  for_ranges(pages, num_tiles, kEntriesPerTask / kTile, [&](int64_t head, int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t at = head * num_tiles + tile;
      for (int64_t lane = 0; lane < kTile && tile * kTile + lane < counts[head]; ++lane) {
        const int64_t carrier = names[at * kTile + lane];
        const T* key = key_at<T>(pages, head, place_of_entry(pages, s, carriers[head * num_carriers + carrier]));
        float squares = 0.0f;
        for (int64_t e = 0; e < d; ++e) {
          const float x = to_float(key[e * pages.block_size]);
          squares += x * x;
          packed[(at * d + e) * kTile + lane] = from_float<Q>(x);
        }
        inverse[at * kTile + lane] = inverse_length(squares);
      }
    }
  });

  constexpr int64_t kMembersPerTask = 64;
  for_ranges(pages, num_members, kMembersPerTask, [&](int64_t head, int64_t first, int64_t last) {
    thread_local Scratch scratch;
    const int64_t rows = last - first;
    float* lengths = scratch.floats(kMembersPerTask * (d + 2) + kernels.similar_scratch(kMembersPerTask));
    float* found = lengths + kMembersPerTask;
    Q* keys = reinterpret_cast<Q*>(found + kMembersPerTask);
    int32_t where[kMembersPerTask];
    for (int64_t r = 0; r < rows; ++r) {
      const T* key =
          key_at<T>(pages, head, place_of_entry(pages, s, members[head * num_members + first + r]));
      float squares = 0.0f;
      for (int64_t e = 0; e < d; ++e) {
        const float x = to_float(key[e * pages.block_size]);
        squares += x * x;
        keys[r * d + e] = from_float<Q>(x);
      }
      lengths[r] = inverse_length(squares);
    }
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

}  // namespace

void most_similar(const Kernels& kernels, const Pages& pages, const Segments& s, const int64_t* members,
                  int64_t num_members, const int64_t* carriers, int64_t num_carriers, const uint8_t* usable,
                  float* similarity, int64_t* best) {
  const auto run = [&](auto find) {
    find(kernels, pages, s, members, num_members, carriers, num_carriers, usable, similarity, best);
  };
  // Products of bfloat16 are exact in float32, so pairs lose nothing.
  if (pages.dtype == DType::f32) run(find_most_similar<float, float>);
  else if (pages.dtype == DType::f16) run(find_most_similar<F16, float>);
  else if (kernels.has_pairs) run(find_most_similar<BF16, BF16>);
  else run(find_most_similar<BF16, float>);
}

void move_entries(const Pages& pages, const Segments& s, const int32_t* destination, const int64_t* kept,
                  int64_t count) {
  with_type(pages.dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    const int64_t d = pages.head_size, bs = pages.block_size;
    // A head's moves are in one buffer before the first is written, because places may overlap.
    const int threads = count * pages.num_heads < kMinParallelEntries ? 1 : max_threads();
    parallel_for(pages.num_heads, threads, [&](int64_t head) {
      std::vector<int64_t> moving;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t from = kept[head * count + i];
        if (from >= 0 && !(place_of_entry(pages, s, from) == place_of_slot(pages, destination, i)))
          moving.push_back(i);
      }
      thread_local Scratch scratch;
      T* buffer = reinterpret_cast<T*>(scratch.floats(static_cast<int64_t>(moving.size()) * 2 * d));
      T* next = buffer;
      for (int64_t i : moving) {
        const Place at = place_of_entry(pages, s, kept[head * count + i]);
        const T* key = key_at<T>(pages, head, at);
        for (int64_t e = 0; e < d; ++e) next[e] = key[e * bs];
        std::memcpy(next + d, value_at<T>(pages, head, at), d * sizeof(T));
        next += 2 * d;
      }
      const auto write = [&](int64_t slot, const T* row) {
        const Place to = place_of_slot(pages, destination, slot);
        T* key = key_at<T>(pages, head, to);
        for (int64_t e = 0; e < d; ++e) key[e * bs] = row[e];
        std::memcpy(value_at<T>(pages, head, to), row + d, d * sizeof(T));
      };
      next = buffer;
      for (int64_t i : moving) {
        write(i, next);
        next += 2 * d;
      }
      const std::vector<T> zeros(2 * d);
      for (int64_t i = 0; i < count; ++i)
        if (kept[head * count + i] < 0) write(i, zeros.data());
    });
  });
}

void write_rows(const Pages& pages, const int32_t* blocks, const int64_t* places, int64_t count, const float* keys,
                const float* values) {
  with_type(pages.dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    const int64_t d = pages.head_size;
    for_ranges(pages, count, kEntriesPerTask, [&](int64_t head, int64_t first, int64_t last) {
      for (int64_t i = head * count + first; i < head * count + last; ++i) {
        if (places[i] < 0) continue;
        const Place to = place_of_slot(pages, blocks, places[i]);
        if (keys) {
          T* key = key_at<T>(pages, head, to);
          for (int64_t e = 0; e < d; ++e) key[e * pages.block_size] = from_float<T>(keys[i * d + e]);
        }
        if (values) {
          T* value = value_at<T>(pages, head, to);
          for (int64_t e = 0; e < d; ++e) value[e] = from_float<T>(values[i * d + e]);
        }
      }
    });
  });
}

void write_metadata(const Pages& pages, const int32_t* blocks, int64_t count, const float* log_votes,
                    const float* scores, const float* aux, const int64_t* positions) {
  for_ranges(pages, count, kEntriesPerTask, [&](int64_t head, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const Place to = place_of_slot(pages, blocks, i);
      const int64_t from = head * count + i;
      plane(pages, to.block, head, kLogVotes)[to.offset] = log_votes[from];
      plane(pages, to.block, head, kScores)[to.offset] = scores[from];
      plane(pages, to.block, head, kAux)[to.offset] = aux[from];
      reinterpret_cast<int32_t*>(plane(pages, to.block, head, kPositions))[to.offset] =
          static_cast<int32_t>(positions[from]);
    }
  });
}

void write_tokens(const Pages& pages, const std::vector<int64_t>& slots, const Rows& keys, const Rows& values) {
  with_type(pages.dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    with_type(keys.dtype, [&](auto* from) {
      typedef std::remove_pointer_t<decltype(from)> U;
      for_ranges(pages, static_cast<int64_t>(slots.size()), kEntriesPerTask,
                 [&](int64_t head, int64_t first, int64_t last) {
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
