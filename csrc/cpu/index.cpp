#include "index.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "parallel.h"

namespace kvmerge {
namespace {

constexpr int64_t kMinParallelItems = 32 << 10;

// Calls task(row) for all rows.
template <class F>
void for_rows(int64_t rows, int64_t n, const F& task) {
  parallel_for(rows, rows * n < kMinParallelItems ? 1 : max_threads(), task);
}

// An integer in the order of the numbers, where -0 is 0.
inline int32_t ordered(float x) {
  x += 0.0f;
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits ^ (bits >> 31 & 0x7fffffff);
}

// Marks the `count` largest keys, 0 < count < n, given the one that has n - count before it.
template <class K>
void mark(const K* keys, int64_t n, int64_t count, K threshold, uint8_t* mask) {
  int64_t above = 0;
  for (int64_t i = 0; i < n; ++i) above += keys[i] > threshold;
  const int64_t level = count - above;
  int64_t seen = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool equal = keys[i] == threshold;
    mask[i] = keys[i] > threshold || (equal && seen < level);
    seen += equal;
  }
}

// make_keys(row, keys) gives the row's keys; where it returns false, wide(row) does the row another way.
template <class F, class G>
void largest_by(const Kernels& kernels, int64_t rows, int64_t n, int64_t count, uint8_t* mask, const F& make_keys,
                const G& wide) {
  if (count <= 0 || count >= n) {
    std::memset(mask, count > 0, rows * n);
    return;
  }
  for_rows(rows, n, [&](int64_t row) {
    thread_local Scratch scratch;
    int32_t* keys = reinterpret_cast<int32_t*>(scratch.floats(n));
    if (!make_keys(row * n, keys)) return wide(row);
    mark(keys, n, count, kernels.kth_smallest(keys, n, n - count), mask + row * n);
  });
}

}  // namespace

void largest(const Kernels& kernels, const float* ranking, int64_t rows, int64_t n, int64_t count, uint8_t* mask) {
  const auto keys_of = [&](int64_t start, int32_t* keys) {
    for (int64_t i = 0; i < n; ++i) keys[i] = ordered(ranking[start + i]);
    return true;
  };
  largest_by(kernels, rows, n, count, mask, keys_of, [](int64_t) {});
}

void largest(const Kernels& kernels, const int64_t* ranking, int64_t rows, int64_t n, int64_t count, uint8_t* mask) {
  // Positions fit in 32 bits, and INT64_MAX stands for what comes before all of them.
  const auto keys_of = [&](int64_t start, int32_t* keys) {
    bool fits = true;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t x = ranking[start + i];
      fits &= x == INT64_MAX || (INT32_MIN <= x && x < INT32_MAX);
      keys[i] = x == INT64_MAX ? INT32_MAX : static_cast<int32_t>(x);
    }
    return fits;
  };
  largest_by(kernels, rows, n, count, mask, keys_of, [&](int64_t row) {
    std::vector<int64_t> sorted(ranking + row * n, ranking + (row + 1) * n);
    std::nth_element(sorted.begin(), sorted.begin() + (n - count), sorted.end());
    mark(ranking + row * n, n, count, sorted[n - count], mask + row * n);
  });
}

void top(const Kernels& kernels, const float* ranking, const uint8_t* is_protected, const uint8_t* is_live, int64_t rows,
         int64_t n, int64_t count, uint8_t* mask) {
  const int32_t most = ordered(3.402823466e+38f), least = ordered(-3.402823466e+38f);
  const auto keys_of = [&](int64_t start, int32_t* keys) {
    for (int64_t i = 0; i < n; ++i) {
      const float x = ranking[start + i];
      const int32_t key = x != x ? least : std::clamp(ordered(x), least, most);
      keys[i] = !is_live[start + i] ? INT32_MIN : is_protected[start + i] ? INT32_MAX : key;
    }
    return true;
  };
  largest_by(kernels, rows, n, count, mask, keys_of, [](int64_t) {});
}

bool in_place(const uint8_t* mask, int64_t rows, int64_t n, int64_t count, int64_t* index) {
  std::atomic<bool> valid{true};
  for_rows(rows, n, [&](int64_t row) {
    const uint8_t* kept = mask + row * n;
    int64_t *out = index + row * count, next = count;
    for (int64_t i = 0; i < count; ++i) {
      out[i] = i;
      if (kept[i]) continue;
      while (next < n && !kept[next]) ++next;
      if (next < n) out[i] = next++;
      else valid = false;
    }
    while (next < n) valid = kept[next++] ? false : valid.load();
  });
  return valid;
}

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

int64_t most_true(const uint8_t* mask, int64_t rows, int64_t n) {
  int64_t most = 0;
  for (int64_t row = 0; row < rows; ++row) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += mask[row * n + i];
    most = std::max(most, count);
  }
  return most;
}

bool padded(const uint8_t* mask, int64_t rows, int64_t n, int64_t width, int64_t* index) {
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

}  // namespace kvmerge
