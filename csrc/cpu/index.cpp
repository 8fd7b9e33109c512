// Index arithmetic over the entries of each head: what policies/indexing.py does in every compression. All [rows, n].
#include <tvm/ffi/function.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <vector>

#include "parallel.h"
#include "tensors.h"

namespace kvmerge {
namespace {

#include "simd.h"

constexpr int64_t kMinParallelItems = 32 << 10;

// Calls task(row) for all rows.
template <class F>
void for_rows(int64_t rows, int64_t n, const F& task) {
  parallel_for(rows, rows * n < kMinParallelItems ? 1 : max_threads(), task);
}

// A number for each row, or one for all.
struct Counts {
  const int64_t* values;
  int64_t stride;

  Counts(const char* name, const TensorView& counts, int64_t rows) {
    const Argument a(name, counts);
    values = a.contiguous({-1}).i64();
    KVM_CHECK(a.size(0) == 1 || a.size(0) == rows, ValueError) << name << " must be one number, or one for each row";
    stride = a.size(0) == 1 ? 0 : 1;
  }

  int64_t operator[](int64_t row) const { return values[row * stride]; }
};

// Marks the largest of each row; `ranking` gives what is ranked, at row 0.
void mark(const Kernels& kernels, const Ranking& ranking, int64_t rows, const Counts& counts) {
  const int64_t n = ranking.n;
  for_rows(rows, n, [&](int64_t row) {
    thread_local Scratch scratch;
    Ranking r = ranking;
    const int64_t count = r.count = counts[row];
    if (count <= 0 || count >= n) {
      std::memset(r.mask + row * n, count > 0, n);
      return;
    }
    if (r.numbers) r.numbers += row * n;
    if (r.integers) r.integers += row * n;
    if (r.first) r.first += row * n, r.possible += row * n;
    r.keys = reinterpret_cast<int32_t*>(scratch.floats(n));
    r.mask += row * n;
    if (kernels.mark_largest(r)) return;
    std::vector<int64_t> order(n);
    for (int64_t i = 0; i < n; ++i) order[i] = i;
    const auto before = [&](int64_t a, int64_t b) {
      return r.integers[a] != r.integers[b] ? r.integers[a] > r.integers[b] : a < b;
    };
    std::nth_element(order.begin(), order.begin() + count, order.end(), before);
    std::fill_n(r.mask, n, 0);
    for (int64_t i = 0; i < count; ++i) r.mask[order[i]] = 1;
  });
}

// mask: the `counts` of largest ranking in each row; of equal ones those of lower index. No NaN.
void largest(const Kernels& kernels, const float* ranking, int64_t rows, int64_t n, const Counts& counts,
             uint8_t* mask) {
  mark(kernels, Ranking{ranking, nullptr, nullptr, nullptr, n, 0, nullptr, mask}, rows, counts);
}

void largest(const Kernels& kernels, const int64_t* ranking, int64_t rows, int64_t n, const Counts& counts,
             uint8_t* mask) {
  mark(kernels, Ranking{nullptr, ranking, nullptr, nullptr, n, 0, nullptr, mask}, rows, counts);
}

// The same where what is not live ranks below everything, and what is live and protected above. Any ranking.
void top(const Kernels& kernels, const float* ranking, const uint8_t* is_protected, const uint8_t* is_live,
         int64_t rows, int64_t n, const Counts& counts, uint8_t* mask) {
  mark(kernels, Ranking{ranking, nullptr, is_protected, is_live, n, 0, nullptr, mask}, rows, counts);
}

// mask: of the live entries, whose position is not negative, the `counts` newest, and those before position `sinks`.
void newest(const Kernels& kernels, const int64_t* positions, int64_t rows, int64_t n, const Counts& counts,
            int64_t sinks, uint8_t* mask) {
  largest(kernels, positions, rows, n, counts, mask);
  for_rows(rows, n, [&](int64_t row) {
    const int64_t* p = positions + row * n;
    uint8_t* m = mask + row * n;
    for (int64_t i = 0; i < n; ++i) m[i] = (p[i] >= 0) & (m[i] | (p[i] < sinks));
  });
}

// index: [rows, places], the entries in mask, of which each row has its count; entry i at i where i < count, the others
// in order where there is room below the count; -1 from there on. False where a row has more or fewer.
bool in_place(const uint8_t* mask, int64_t rows, int64_t n, const Counts& counts, int64_t places, int64_t* index) {
  std::atomic<bool> valid{true};
  for_rows(rows, n, [&](int64_t row) {
    const uint8_t* kept = mask + row * n;
    const int64_t count = counts[row];
    int64_t *out = index + row * places, next = count;
    if (count < 0 || count > places) {
      valid = false;
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      out[i] = i;
      if (kept[i]) continue;
      while (next < n && !kept[next]) ++next;
      if (next < n) out[i] = next++;
      else valid = false;
    }
    for (; next < n; ++next)
      if (kept[next]) valid = false;
    std::fill(out + count, out + places, -1);
  });
  return valid;
}

// order: the entries by ascending position, which is at least -1, equal ones as they lie.
void by_position(const int64_t* positions, int64_t rows, int64_t n, int64_t* order) {
  for_rows(rows, n, [&](int64_t row) {
    // Radix sort by bytes, as many of them as the largest position has.
    const int64_t* p = positions + row * n;
    uint64_t largest = 0;
    for (int64_t i = 0; i < n; ++i) largest |= static_cast<uint64_t>(p[i] + 1);
    thread_local std::vector<int64_t> buffer;
    buffer.resize(n);
    int64_t *from = buffer.data(), *to = order + row * n;
    int passes = 1;
    while (passes < 8 && largest >> 8 * passes) ++passes;
    if (passes % 2 == 0) std::swap(from, to);  // so that the last pass writes to `order`
    for (int64_t i = 0; i < n; ++i) from[i] = i;
    for (int pass = 0; pass < passes; ++pass) {
      const auto digit = [&](int64_t i) { return static_cast<uint64_t>(p[i] + 1) >> 8 * pass & 255; };
      int64_t start[256] = {};
      for (int64_t i = 0; i < n; ++i) ++start[digit(i)];
      for (int64_t d = 0, total = 0; d < 256; ++d) {
        const int64_t here = start[d];
        start[d] = total;
        total += here;
      }
      for (int64_t i = 0; i < n; ++i) to[start[digit(from[i])]++] = from[i];
      std::swap(from, to);
    }
  });
}

// The most true elements of any row.
int64_t most_true(const uint8_t* mask, int64_t rows, int64_t n) {
  int64_t most = 0;
  for (int64_t row = 0; row < rows; ++row) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += mask[row * n + i];
    most = std::max(most, count);
  }
  return most;
}

// index: [rows, width], where mask is true, ascending, then -1. False where a row has more.
bool padded_nonzero(const uint8_t* mask, int64_t rows, int64_t n, int64_t width, int64_t* index) {
  std::atomic<bool> valid{true};
  for_rows(rows, n, [&](int64_t row) {
    const uint8_t* m = mask + row * n;
    int64_t *out = index + row * width, count = 0;
    for (int64_t i = 0; i < n; ++i) {
      uint64_t eight;
      if (i + 8 <= n && (std::memcpy(&eight, m + i, 8), eight == 0)) {
        i += 7;
        continue;
      }
      if (!m[i]) continue;
      if (count == width) {
        valid = false;
        return;
      }
      out[count++] = i;
    }
    std::fill(out + count, out + width, -1);
  });
  return valid;
}

// where: [rows, size], the place in index ([rows, count]) of each number below `size`, else -1. Negative ones are
// nowhere. False where one is too large.
bool inverse(const int64_t* index, int64_t rows, int64_t count, int64_t size, int64_t* where) {
  std::atomic<bool> valid{true};
  for_rows(rows, std::max(count, size), [&](int64_t row) {
    const int64_t* in = index + row * count;
    int64_t* out = where + row * size;
    std::fill_n(out, size, -1);
    for (int64_t i = 0; i < count; ++i) {
      if (in[i] >= size) valid = false;
      else if (in[i] >= 0) out[in[i]] = i;
    }
  });
  return valid;
}

// A plane of numbers of 4 or 8 bytes, [rows, n], what is taken of it, [rows, count], and what stands where there is none.
struct Taking {
  const char* plane;
  char* taken;
  int64_t n, size;
  float blank;

  void run(int64_t row, int64_t count, int64_t from, int64_t to, int64_t length) const {
    const char* source = plane + (row * n + from) * size;
    char* target = taken + (row * count + to) * size;
    if (length > 4) std::memcpy(target, source, length * size);
    else
      for (int64_t i = 0; i < length; ++i)
        size == 4 ? std::memcpy(target + i * 4, source + i * 4, 4) : std::memcpy(target + i * 8, source + i * 8, 8);
  }
  void none(int64_t row, int64_t count, int64_t to) const {
    char* target = taken + (row * count + to) * size;
    const int64_t integer = static_cast<int64_t>(blank);
    size == 4 ? std::memcpy(target, &blank, 4) : std::memcpy(target, &integer, 8);
  }
};

// What planes hold at index, [rows, count]; nothing where that is negative. Most of what follows each other there does in the
// planes too. False where one is not below n.
bool take(const std::vector<Taking>& planes, const int64_t* index, int64_t rows, int64_t count) {
  std::atomic<bool> valid{true};
  int64_t n = INT64_MAX;
  for (const Taking& one : planes) n = std::min(n, one.n);
  for_rows(rows, count * static_cast<int64_t>(planes.size()), [&](int64_t row) {
    const int64_t* in = index + row * count;
    for (int64_t i = 0, next; i < count; i = next) {
      next = i + 1;
      if (in[i] < 0) {
        for (const Taking& one : planes) one.none(row, count, i);
        continue;
      }
      while (next < count && in[next] == in[next - 1] + 1) ++next;
      if (in[next - 1] >= n) {
        valid = false;
        return;
      }
      for (const Taking& one : planes) one.run(row, count, in[i], i, next - i);
    }
  });
  return valid;
}

// given: [rows, count], what plane, [rows, n], gets at index, [rows, count], where that is not negative. False where one is
// not below n.
template <class T>
bool put(const T* given, const int64_t* index, int64_t rows, int64_t n, int64_t count, T* plane) {
  std::atomic<bool> valid{true};
  for_rows(rows, count, [&](int64_t row) {
    for (int64_t i = row * count; i < (row + 1) * count; ++i)
      if (index[i] >= n) valid = false;
      else if (index[i] >= 0) plane[row * n + index[i]] = given[i];
  });
  return valid;
}

// Of places without an entry, whose position is -1: nothing is moved there, and their metadata is blank.
void empty_places(int64_t rows, int64_t places, const int64_t* positions, int64_t* kept, float* log_votes,
                  float* scores, float* aux) {
  for_rows(rows, places, [&](int64_t row) {
    for (int64_t i = 0, at = row * places; i < places; ++i, ++at) {
      if (positions[at] != -1) continue;
      if (kept[at] != i) kept[at] = -1;
      log_votes[at] = -std::numeric_limits<float>::infinity();
      scores[at] = aux[at] = 0.0f;
    }
  });
}

// Whether one of `size` numbers is at least `least` or NaN, whatever its sign.
bool overflows(const float* numbers, int64_t size, float least) {
  int32_t limit, largest = 0;
  std::memcpy(&limit, &least, sizeof limit);
  for (int64_t i = 0; i < size; ++i) {
    int32_t bits;  // ordered as the numbers, and NaN above all
    std::memcpy(&bits, numbers + i, sizeof bits);
    largest = std::max(largest, bits & INT32_MAX);
  }
  return largest >= limit;
}

// failed: [rows, count], the places whose new key or value overflows, or whose votes are infinite or NaN; else -1.
// False where one is not below num_places. keys, values: [rows, count, size], may be null.
bool overflowing(const int64_t* places, const float* log_votes, const float* keys, const float* values, int64_t rows,
                 int64_t count, int64_t num_places, int64_t size, float least, int64_t* failed) {
  std::atomic<bool> valid{true};
  for_rows(rows, count * size, [&](int64_t row) {
    for (int64_t i = row * count; i < (row + 1) * count; ++i) {
      const int64_t place = places[i];
      failed[i] = -1;
      if (place < 0) continue;
      if (place >= num_places) {
        valid = false;
        return;
      }
      if (!(log_votes[row * num_places + place] < std::numeric_limits<float>::infinity()) ||
          (keys && overflows(keys + i * size, size, least)) || (values && overflows(values + i * size, size, least)))
        failed[i] = place;
    }
  });
  return valid;
}

// counts: [layers, heads], how many of its entries each head keeps, of `total` for all heads of a layer (kernels.h).
void split(const Kernels& kernels, Split s, int64_t layers) {
  for_rows(layers, s.num_heads * s.n, [&](int64_t layer) {
    thread_local Scratch scratch;
    thread_local std::vector<int64_t> level;
    level.resize(s.num_heads);
    Split one = s;
    one.shares += layer * s.num_heads * s.n;
    one.counts += layer * s.num_heads;
    one.keys = reinterpret_cast<int32_t*>(scratch.floats(s.num_heads * s.n));
    one.level = level.data();
    kernels.split(one);
  });
}

// place: [rows, count]: index itself where it is one of so many places, the others in order where there is room; -1
// where the position is negative. False where a row has several of one index, or too many.
bool free_places(const int64_t* index, const int64_t* positions, int64_t rows, int64_t count, int64_t places,
                 int64_t* place) {
  std::atomic<bool> valid{true};
  for_rows(rows, count, [&](int64_t row) {
    const int64_t *in = index + row * count, *position = positions + row * count;
    int64_t *out = place + row * count, next = 0;
    std::vector<uint8_t> taken(places);
    for (int64_t i = 0; i < count; ++i) {
      const bool stays = position[i] >= 0 && 0 <= in[i] && in[i] < places;
      out[i] = stays ? in[i] : -1;
      if (!stays) continue;
      if (taken[in[i]]) valid = false;
      taken[in[i]] = 1;
    }
    for (int64_t i = 0; i < count; ++i) {
      if (position[i] < 0 || out[i] >= 0) continue;
      while (next < places && taken[next]) ++next;
      if (next == places) {
        valid = false;
        return;
      }
      out[i] = next++;
    }
  });
  return valid;
}

// live: [rows], how many positions, [rows, n], are not negative.
void num_live(const int64_t* positions, int64_t rows, int64_t n, int64_t* live) {
  for_rows(rows, n, [&](int64_t row) {
    int64_t count = n;
    for (int64_t i = row * n; i < (row + 1) * n; ++i) count += positions[i] >> 63;
    live[row] = count;
  });
}

// What is not kept, in the order in which it becomes and joins slots (reference.line_up). place, positions, aux, scores:
// [rows, n]; the others [rows, count]. False where another number of entries is not kept.
bool line_up(const int64_t* place, const int64_t* positions, const float* aux, const float* scores, int64_t rows,
             int64_t n, int64_t count, int64_t* index, int64_t* newest, float* weights, float* sums) {
  struct One {
    int kind;  // a slot, another entry, a dead one
    int64_t position, entry;
    bool operator<(const One& other) const {
      if (kind != other.kind) return kind < other.kind;
      return position != other.position ? position < other.position : entry < other.entry;
    }
  };
  std::atomic<bool> valid{true};
  for_rows(rows, n, [&](int64_t row) {
    thread_local std::vector<One> line;
    line.clear();
    for (int64_t i = 0, at = row * n; i < n; ++i, ++at)
      if (place[at] < 0) line.push_back({positions[at] < 0 ? 2 : aux[at] >= 1.0f ? 0 : 1, positions[at], i});
    if (static_cast<int64_t>(line.size()) != count) {
      valid = false;
      return;
    }
    std::sort(line.begin(), line.end());
    for (int64_t i = 0, to = row * count; i < count; ++i, ++to) {
      const One& one = line[i];
      const int64_t at = row * n + one.entry;
      const bool dead = one.kind == 2;
      index[to] = dead ? -1 : one.entry;
      newest[to] = one.position;
      weights[to] = dead ? 0.0f : std::max(aux[at], 1.0f);
      sums[to] = dead ? 0.0f : scores[at];
    }
  });
  return valid;
}

// joined: [rows, width], the places that sources join, ascending, then -1; row_of: [rows, count], where in it each
// source's place is, -1 for one that does not join. sizes: [rows], how many places each has. False where a place is not below num_places.
bool list_joined(const int64_t* places, const uint8_t* joins, int64_t rows, int64_t count, int64_t num_places,
                 int64_t width, int64_t* joined, int64_t* row_of, std::vector<int64_t>* sizes) {
  std::atomic<bool> valid{true};
  for_rows(rows, std::max(count, num_places), [&](int64_t row) {
    const int64_t* in = places + row * count;
    const uint8_t* does = joins + row * count;
    int64_t *list = joined + row * width, *out = row_of + row * count, size = 0;
    for (int64_t i = 0; i < count; ++i)
      if (in[i] < 0 || in[i] >= num_places) {
        valid = false;
        return;
      }
    thread_local std::vector<int64_t> number;
    number.assign(num_places, -1);
    for (int64_t i = 0; i < count; ++i)
      if (does[i]) number[in[i]] = 0;
    for (int64_t place = 0; place < num_places; ++place)
      if (number[place] == 0) list[number[place] = size++] = place;
    std::fill(list + size, list + width, -1);
    (*sizes)[row] = size;
    for (int64_t i = 0; i < count; ++i) out[i] = does[i] ? number[in[i]] : -1;
  });
  return valid;
}

// mixed: [rows, num_mixed, size], each with the sum of share (x - what it was) over those x of joining, [rows, count,
// size], that join it: row_of, [rows, count], negative: none. has_own: false where mixed is 0. False where one joins
// what is not below num_mixed.
bool mix_in(const float* joining, const int64_t* row_of, const float* shares, int64_t rows, int64_t count,
            int64_t num_mixed, int64_t size, bool has_own, float* mixed) {
  std::atomic<bool> valid{true};
  for_rows(rows, (count + num_mixed) * size, [&](int64_t row) {
    thread_local std::vector<float> before;
    float* out = mixed + row * num_mixed * size;
    if (has_own) before.assign(out, out + num_mixed * size);
    for (int64_t i = row * count; i < (row + 1) * count; ++i) {
      const int64_t to = row_of[i];
      if (to < 0) continue;
      if (to >= num_mixed) {
        valid = false;
        return;
      }
      const float *x = joining + i * size, *own = has_own ? before.data() + to * size : nullptr, share = shares[i];
      float* sum = out + to * size;
      if (own)
        for (int64_t k = 0; k < size; ++k) sum[k] += share * (x[k] - own[k]);
      else
        for (int64_t k = 0; k < size; ++k) sum[k] += share * x[k];
    }
  });
  return valid;
}

// What reference.hand_over returns, of one row: entries that leave give their values to their right neighbours.
struct HandOver {
  const int64_t *order, *place;  // [n]
  const uint8_t* is_live;        // [n]
  const float* importance;       // [n]
  int64_t n, width;
  int64_t* index;  // [width], as target, shares and places
  int64_t* target;
  float* shares;
  int64_t* places;
  int64_t* count;

  // False where more than `width` entries take part, or an entry of `order` is none.
  bool run() {
    for (int64_t i = 0; i < n; ++i)
      if (order[i] < 0 || order[i] >= n) return false;
    const auto goes = [&](int64_t rank) { return is_live[order[rank]] && place[order[rank]] < 0; };
    int64_t last = n - 1, size = 0;
    while (last >= 0 && goes(last)) --last;
    leaving.clear();
    for (int64_t rank = 0, after_one = 0; rank <= last; ++rank) {
      const bool leaves = goes(rank);
      if (leaves || after_one) {
        if (size == width) return false;
        if (leaves) leaving.push_back(size);
        index[size] = order[rank];
        places[size++] = leaves ? -1 : place[order[rank]];
      }
      after_one = leaves;
    }
    *count = static_cast<int64_t>(leaving.size());
    scores.resize(width), share.assign(width, 1.0), links.resize(2 * width);
    int64_t *previous = links.data(), *next = previous + width;
    for (int64_t i = 0; i < size; ++i) {
      const float score = importance[index[i]];
      scores[i] = score < 0.0f ? 0.0f : score;
      previous[i] = i - 1;
      next[i] = i + 1;
    }
    const auto before = [&](int64_t a, int64_t b) {  // NaN last, as PyTorch sorts
      const double x = scores[a], y = scores[b];
      if (x != x || y != y) return x == x || (y != y && a < b);
      return x != y ? x < y : a < b;
    };
    std::sort(leaving.begin(), leaving.end(), before);
    for (const int64_t one : leaving) {  // next[one] remains: who takes its value
      if (previous[one] >= 0) next[previous[one]] = next[one];
      previous[next[one]] = previous[one];
    }
    // Backwards in time: by what all that an entry holds is multiplied from then on.
    for (auto one = leaving.rbegin(); one != leaving.rend(); ++one) {
      const int64_t taker = next[*one];
      const double total = scores[*one] + scores[taker];
      share[*one] = share[taker] * (total > 0 ? scores[*one] / total : 0.0);
      share[taker] *= total > 0 ? scores[taker] / total : 1.0;
    }
    for (int64_t i = width - 1; i >= 0; --i) {
      if (i >= size) index[i] = places[i] = -1;
      target[i] = i < size && is_live[index[i]] && place[index[i]] < 0 ? target[i + 1] : i;
      shares[i] = static_cast<float>(share[i]);
    }
    return true;
  }

  std::vector<int64_t> leaving, links;
  std::vector<double> scores, share;
};

// The operators as apache-tvm-ffi functions.

// [rows, n]
const uint8_t* mask_of(const char* name, const TensorView& mask, int64_t rows, int64_t n) {
  return Argument(name, mask).contiguous({rows, n}).boolean();
}

void call_largest(TensorView ranking, TensorView count, TensorView mask) {
  const Argument a("ranking", ranking);
  a.contiguous({-1, -1});
  const int64_t rows = a.size(0), n = a.size(1);
  uint8_t* out = Argument("mask", mask).contiguous({rows, n}).boolean();
  const Counts counts("count", count, rows);
  if (a.is(kDLFloat, 32)) largest(current(), a.f32(), rows, n, counts, out);
  else largest(current(), a.i64(), rows, n, counts, out);
}

void call_top(TensorView ranking, TensorView is_protected, TensorView is_live, TensorView count, TensorView mask) {
  const Argument a("ranking", ranking);
  const float* values = a.contiguous({-1, -1}).f32();
  const int64_t rows = a.size(0), n = a.size(1);
  uint8_t* out = Argument("mask", mask).contiguous({rows, n}).boolean();
  top(current(), values, mask_of("protected", is_protected, rows, n), mask_of("is_live", is_live, rows, n), rows, n,
      Counts("count", count, rows), out);
}

void call_newest(TensorView positions, TensorView count, int64_t sinks, TensorView mask) {
  const Argument a("positions", positions);
  const int64_t* values = a.contiguous({-1, -1}).i64();
  const int64_t rows = a.size(0), n = a.size(1);
  newest(current(), values, rows, n, Counts("count", count, rows), sinks,
         Argument("mask", mask).contiguous({rows, n}).boolean());
}

void call_in_place(TensorView mask, TensorView count, TensorView index) {
  const Argument a("index", index);
  int64_t* out = a.contiguous({mask.ndim() == 2 ? mask.size(0) : -1, -1}).i64();
  const int64_t rows = a.size(0), n = mask.size(1), places = a.size(1);
  KVM_CHECK(places <= n, ValueError) << places << " of " << n << " entries";
  KVM_CHECK(in_place(mask_of("mask", mask, rows, n), rows, n, Counts("count", count, rows), places, out), ValueError)
      << "mask must have as many entries in each row as count says, at most " << places;
}

void call_by_position(TensorView positions, TensorView order) {
  const Argument a("positions", positions);
  const int64_t* values = a.contiguous({-1, -1}).i64();
  by_position(values, a.size(0), a.size(1), Argument("order", order).contiguous({a.size(0), a.size(1)}).i64());
}

int64_t call_most_true(TensorView mask) {
  const Argument a("mask", mask);
  const uint8_t* values = a.contiguous({-1, -1}).boolean();
  return most_true(values, a.size(0), a.size(1));
}

void call_padded_nonzero(TensorView mask, TensorView index) {
  const Argument a("mask", mask), b("index", index);
  const uint8_t* values = a.contiguous({-1, -1}).boolean();
  int64_t* out = b.contiguous({a.size(0), -1}).i64();
  KVM_CHECK(padded_nonzero(values, a.size(0), a.size(1), b.size(1), out), ValueError)
      << "mask has more than " << b.size(1) << " entries in a row";
}

void call_inverse(TensorView index, TensorView where) {
  const Argument a("index", index), b("where", where);
  const int64_t* values = a.contiguous({-1, -1}).i64();
  int64_t* out = b.contiguous({a.size(0), -1}).i64();
  KVM_CHECK(inverse(values, a.size(0), a.size(1), b.size(1), out), IndexError)
      << "index has elements that are not below " << b.size(1);
}

void call_take(Tensors planes, TensorView index, TensorView blanks, Tensors taken) {
  const Argument a("index", index);
  const int64_t *values = a.contiguous({-1, -1}).i64(), rows = a.size(0), count = a.size(1);
  const float* blank = Argument("blanks", blanks).contiguous({static_cast<int64_t>(planes.size())}).f32();
  KVM_CHECK(planes.size() == taken.size(), ValueError) << "as many planes must be given as taken";
  std::vector<Taking> all;
  for (size_t i = 0; i < planes.size(); ++i) {
    const TensorView from = planes[i], to = taken[i];
    const Argument plane("plane", from), out("taken", to);
    plane.contiguous({rows, -1});
    out.contiguous({rows, count});
    const bool is_float = plane.is(kDLFloat, 32);
    if (is_float) all.push_back({reinterpret_cast<char*>(plane.f32()), reinterpret_cast<char*>(out.f32()), plane.size(1), 4, blank[i]});
    else all.push_back({reinterpret_cast<char*>(plane.i64()), reinterpret_cast<char*>(out.i64()), plane.size(1), 8, blank[i]});
  }
  KVM_CHECK(take(all, values, rows, count), IndexError) << "index has elements that are not among " << (all.empty() ? 0 : all[0].n);
}

void call_put(TensorView index, Tensors given, Tensors planes) {
  const Argument a("index", index);
  const int64_t *values = a.contiguous({-1, -1}).i64(), rows = a.size(0), count = a.size(1);
  KVM_CHECK(planes.size() == given.size(), ValueError) << "as many planes must be given as there are";
  for (size_t i = 0; i < planes.size(); ++i) {
    const TensorView from = given[i], to = planes[i];
    const Argument some("given", from), plane("plane", to);
    some.contiguous({rows, count});
    plane.contiguous({rows, -1});
    const int64_t n = plane.size(1);
    const bool fits = plane.is(kDLFloat, 32) ? put(some.f32(), values, rows, n, count, plane.f32())
                                             : put(some.i64(), values, rows, n, count, plane.i64());
    KVM_CHECK(fits, IndexError) << "index has elements that are not below " << n;
  }
}

void call_overflowing(TensorView places, TensorView log_votes, OptionalTensor keys, OptionalTensor values,
                      double least, TensorView failed) {
  const Argument a("places", places), b("log_votes", log_votes);
  const int64_t *index = a.contiguous({-1, -1}).i64(), rows = a.size(0), count = a.size(1);
  const float* votes = b.contiguous({rows, -1}).f32();
  int64_t size = 0;
  const auto given = [&](const char* name, const OptionalTensor& tensor) -> const float* {
    if (!tensor.has_value()) return nullptr;
    const TensorView rows_given = tensor.value();
    const Argument plane(name, rows_given);
    const float* numbers = plane.contiguous({rows, count, size ? size : -1}).f32();
    size = plane.size(2);
    return numbers;
  };
  const float *k = given("keys", keys), *v = given("values", values);
  KVM_CHECK(overflowing(index, votes, k, v, rows, count, b.size(1), size, static_cast<float>(least),
                        Argument("failed", failed).contiguous({rows, count}).i64()),
            IndexError)
      << "places has elements that are not among " << b.size(1);
}

void call_empty_places(TensorView positions, TensorView kept, TensorView log_votes, TensorView scores,
                       TensorView aux) {
  const Argument a("positions", positions);
  const int64_t* values = a.contiguous({-1, -1}).i64();
  const std::vector<int64_t> shape = {a.size(0), a.size(1)};
  empty_places(a.size(0), a.size(1), values, Argument("kept", kept).contiguous(shape).i64(),
               Argument("log_votes", log_votes).contiguous(shape).f32(),
               Argument("scores", scores).contiguous(shape).f32(), Argument("aux", aux).contiguous(shape).f32());
}

void call_split_budget(TensorView shares, int64_t total, int64_t least, int64_t most, TensorView counts) {
  const Argument a("shares", shares);
  const float* values = a.contiguous({-1, -1, -1}).f32();
  const int64_t layers = a.size(0), heads = a.size(1), n = a.size(2);
  KVM_CHECK(0 <= least && heads * least <= total && total <= heads * std::min(most, n), ValueError)
      << heads << " heads of " << n << " entries, " << least << " to " << most << " each, cannot have " << total;
  split(current(),
        Split{values, heads, n, least, most, total, nullptr,
              Argument("counts", counts).contiguous({layers, heads}).i64(), nullptr},
        layers);
}

void call_free_places(TensorView index, TensorView positions, int64_t num_places, TensorView place) {
  const Argument a("index", index);
  const int64_t* values = a.contiguous({-1, -1}).i64();
  const int64_t* tokens = Argument("positions", positions).contiguous({a.size(0), a.size(1)}).i64();
  int64_t* out = Argument("place", place).contiguous({a.size(0), a.size(1)}).i64();
  KVM_CHECK(num_places >= 0 && free_places(values, tokens, a.size(0), a.size(1), num_places, out), ValueError)
      << "index does not fit in " << num_places << " places";
}

void call_join_slots(TensorView keys, TensorView joining, TensorView source_weights, TensorView slot_weights,
                     TensorView joined) {
  const Argument a("keys", keys);
  Join first{};
  first.keys = a.contiguous({-1, -1, -1}).f32();
  const int64_t rows = a.size(0), slots = first.num_slots = a.size(1), size = first.head_size = a.size(2);
  first.joining = Argument("joining", joining).contiguous({rows, -1, size}).f32();
  const int64_t sources = first.num_sources = joining.size(1);
  KVM_CHECK(slots > 0 || sources == 0, ValueError) << "there must be a slot";
  first.source_weights = Argument("source_weights", source_weights).contiguous({rows, sources}).f32();
  first.slot_weights = Argument("slot_weights", slot_weights).contiguous({rows, slots}).f32();
  first.joined = Argument("joined", joined).contiguous({rows, sources}).i64();
  const Kernels& kernels = current();
  for_rows(rows, sources * slots * size, [&](int64_t row) {
    thread_local Scratch scratch;
    Join one = first;
    one.keys += row * slots * size, one.joining += row * sources * size;
    one.source_weights += row * sources, one.slot_weights += row * slots, one.joined += row * sources;
    one.scratch = scratch.floats(kernels.join_scratch(slots, sources, size));
    kernels.join_slots(one);
  });
}

void call_log_contributions(TensorView log_votes, TensorView scores, TensorView counts, double log_decay,
                            TensorView out) {
  const Argument a("log_votes", log_votes);
  Contributions all{};
  all.log_votes = a.contiguous({-1, -1}).f32();
  const int64_t rows = a.size(0), n = all.n = a.size(1);
  all.scores = Argument("scores", scores).contiguous({rows, n}).f32();
  all.counts = Argument("counts", counts).contiguous({rows, n}).f32();
  all.log_decay = static_cast<float>(log_decay);
  all.out = Argument("out", out).contiguous({rows, n}).f32();
  for_rows(rows, n, [&](int64_t row) {
    Contributions one = all;
    one.log_votes += row * n, one.scores += row * n, one.counts += row * n, one.out += row * n;
    current().log_contributions(one);
  });
}

void call_num_live(TensorView positions, TensorView live) {
  const Argument a("positions", positions);
  const int64_t* values = a.contiguous({-1, -1}).i64();
  num_live(values, a.size(0), a.size(1), Argument("live", live).contiguous({a.size(0)}).i64());
}

void call_line_up(TensorView place, TensorView positions, TensorView aux, TensorView scores, TensorView index,
                  TensorView newest, TensorView weights, TensorView sums) {
  const Argument a("place", place), b("index", index);
  const int64_t *at = a.contiguous({-1, -1}).i64(), rows = a.size(0), n = a.size(1);
  int64_t* entries = b.contiguous({rows, -1}).i64();
  const int64_t count = b.size(1);
  KVM_CHECK(line_up(at, Argument("positions", positions).contiguous({rows, n}).i64(),
                    Argument("aux", aux).contiguous({rows, n}).f32(),
                    Argument("scores", scores).contiguous({rows, n}).f32(), rows, n, count, entries,
                    Argument("newest", newest).contiguous({rows, count}).i64(),
                    Argument("weights", weights).contiguous({rows, count}).f32(),
                    Argument("sums", sums).contiguous({rows, count}).f32()),
            ValueError)
      << "place must be negative for " << count << " entries of each head";
}

// Returns the most places that any row has.
int64_t call_list_joined(TensorView places, TensorView joins, int64_t num_places, TensorView joined, TensorView row) {
  const Argument a("places", places), b("joined", joined);
  const int64_t *given = a.contiguous({-1, -1}).i64(), rows = a.size(0), count = a.size(1);
  int64_t* list = b.contiguous({rows, std::min(num_places, count)}).i64();
  std::vector<int64_t> sizes(rows + 1);
  KVM_CHECK(list_joined(given, mask_of("joins", joins, rows, count), rows, count, num_places, b.size(1), list,
                        Argument("row", row).contiguous({rows, count}).i64(), &sizes),
            IndexError)
      << "places has elements that are not among " << num_places;
  return *std::max_element(sizes.begin(), sizes.end());
}

void call_mix_in(TensorView joining, TensorView row, TensorView shares, TensorView mixed, bool has_own) {
  const Argument a("joining", joining), b("own", mixed);
  const float* given = a.contiguous({-1, -1, -1}).f32();
  const int64_t rows = a.size(0), count = a.size(1), size = a.size(2);
  float* out = b.contiguous({rows, -1, size}).f32();
  KVM_CHECK(mix_in(given, Argument("row", row).contiguous({rows, count}).i64(),
                   Argument("shares", shares).contiguous({rows, count}).f32(), rows, count, b.size(1), size, has_own,
                   out),
            IndexError)
      << "row has elements that are not among " << b.size(1);
}

void call_hand_over(TensorView order, TensorView place, TensorView is_live, TensorView importance, TensorView index,
                    TensorView target, TensorView shares, TensorView places, TensorView count) {
  const Argument a("order", order), b("index", index);
  HandOver first;
  first.order = a.contiguous({-1, -1}).i64();
  const int64_t rows = a.size(0), n = first.n = a.size(1);
  first.place = Argument("place", place).contiguous({rows, n}).i64();
  first.is_live = mask_of("is_live", is_live, rows, n);
  first.importance = Argument("importance", importance).contiguous({rows, n}).f32();
  first.index = b.contiguous({rows, -1}).i64();
  const int64_t width = first.width = b.size(1);
  first.target = Argument("target", target).contiguous({rows, width}).i64();
  first.shares = Argument("shares", shares).contiguous({rows, width}).f32();
  first.places = Argument("places", places).contiguous({rows, width}).i64();
  first.count = Argument("count", count).contiguous({rows}).i64();
  std::atomic<bool> valid{true};
  for_rows(rows, 8 * n, [&](int64_t row) {
    HandOver one = first;
    one.order += row * n, one.place += row * n, one.is_live += row * n, one.importance += row * n;
    one.index += row * width, one.target += row * width, one.shares += row * width, one.places += row * width;
    one.count += row;
    if (!one.run()) valid = false;
  });
  KVM_CHECK(valid, ValueError) << "order must list all of " << n << " entries, of which at most " << width
                               << " take part";
}

void call_keep_queries(TensorView query, TensorView addresses, int64_t layer, OptionalTensor tokens) {
  const Argument q("query", query), a("addresses", addresses);
  q.check_shape({-1, -1, -1});
  q.check_rows();
  const int64_t count = a.size(0), bytes = (query.dtype().bits + 7) / 8, heads = q.size(1), size = q.size(2) * bytes;
  if (count == 0) return;
  const int64_t* where = a.contiguous({-1}).i64();
  std::vector<int64_t> places(count);
  for (int64_t i = 0; i < count; ++i) places[i] = i;
  if (tokens.has_value()) {
    const TensorView given = tokens.value();
    places = Argument("tokens", given).integers(count);
  }
  for (int64_t i = 0; i < count; ++i) {
    if (!where[i]) continue;
    KVM_CHECK(0 <= places[i] && places[i] < q.size(0), IndexError) << "token " << places[i] << " is not in the query";
    char* to = reinterpret_cast<char*>(where[i]) + layer * heads * size;
    const char* from = static_cast<const char*>(q.data()) + places[i] * q.stride(0) * bytes;
    for (int64_t h = 0; h < heads; ++h) std::memcpy(to + h * size, from + h * q.stride(1) * bytes, size);
  }
}

void call_read_queries(TensorView places, Tensors kept, TensorView seq_layers, TensorView vectors) {
  const Argument a("places", places), b("seq_layers", seq_layers), out("vectors", vectors);
  const int64_t requests = static_cast<int64_t>(kept.size());
  const int64_t* place = a.contiguous({requests, -1}).i64();
  const int64_t* one = b.contiguous({-1, 2}).i64();
  const int64_t count = a.size(1), heads = vectors.size(1), size = vectors.size(3);
  const DType dtype = out.contiguous({b.size(0), heads, count, size}).float_type();
  const int64_t bytes = dtype == DType::f32 ? 4 : 2;
  char* to = static_cast<char*>(out.data());
  struct Ring {
    const char* queries;
    int64_t layers, places, layer_stride, place_stride, head_stride;
  };
  std::vector<Ring> rings;
  for (const tvm::ffi::Tensor& tensor : kept) {
    const TensorView view(tensor);
    const Argument ring("kept", view);
    ring.check_shape({-1, -1, heads, size});
    ring.check_rows();
    KVM_CHECK(ring.float_type() == dtype, TypeError) << "vectors must have the type of what is kept";
    rings.push_back({static_cast<const char*>(ring.data()), ring.size(0), ring.size(1), ring.stride(0), ring.stride(1),
                     ring.stride(2)});
  }
  for (int64_t i = 0; i < b.size(0); ++i) {
    KVM_CHECK(0 <= one[2 * i] && one[2 * i] < requests, IndexError) << "there is no request " << one[2 * i];
    KVM_CHECK(0 <= one[2 * i + 1] && one[2 * i + 1] < rings[one[2 * i]].layers, IndexError)
        << "there is no layer " << one[2 * i + 1];
    for (int64_t q = 0; q < count; ++q) {
      const int64_t where = place[one[2 * i] * count + q];
      KVM_CHECK(0 <= where && where < rings[one[2 * i]].places, IndexError) << "there is no place " << where;
    }
  }
  for_rows(b.size(0), heads * count * size, [&](int64_t i) {
    const Ring& ring = rings[one[2 * i]];
    for (int64_t q = 0; q < count; ++q)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at = one[2 * i + 1] * ring.layer_stride + place[one[2 * i] * count + q] * ring.place_stride +
                           h * ring.head_stride;
        std::memcpy(to + ((i * heads + h) * count + q) * size * bytes, ring.queries + at * bytes, size * bytes);
      }
  });
}

}  // namespace
}  // namespace kvmerge

TVM_FFI_DLL_EXPORT_TYPED_FUNC(read_queries, kvmerge::call_read_queries);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(keep_queries, kvmerge::call_keep_queries);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(largest, kvmerge::call_largest);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(top, kvmerge::call_top);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(newest, kvmerge::call_newest);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(in_place, kvmerge::call_in_place);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(by_position, kvmerge::call_by_position);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(most_true, kvmerge::call_most_true);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(padded_nonzero, kvmerge::call_padded_nonzero);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(inverse, kvmerge::call_inverse);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(take, kvmerge::call_take);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(put, kvmerge::call_put);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(overflowing, kvmerge::call_overflowing);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(empty_places, kvmerge::call_empty_places);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(split_budget, kvmerge::call_split_budget);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(free_places, kvmerge::call_free_places);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(join_slots, kvmerge::call_join_slots);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hand_over, kvmerge::call_hand_over);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(log_contributions, kvmerge::call_log_contributions);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(num_live, kvmerge::call_num_live);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(line_up, kvmerge::call_line_up);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(list_joined, kvmerge::call_list_joined);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mix_in, kvmerge::call_mix_in);
