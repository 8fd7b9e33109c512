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

// Marks the largest of each row; `ranking` gives what is ranked, at row 0.
void mark(const Kernels& kernels, const Ranking& ranking, int64_t rows) {
  const int64_t n = ranking.n, count = ranking.count;
  if (count <= 0 || count >= n) {
    std::memset(ranking.mask, count > 0, rows * n);
    return;
  }
  for_rows(rows, n, [&](int64_t row) {
    thread_local Scratch scratch;
    Ranking r = ranking;
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

}  // namespace

void largest(const Kernels& kernels, const float* ranking, int64_t rows, int64_t n, int64_t count, uint8_t* mask) {
  mark(kernels, Ranking{ranking, nullptr, nullptr, nullptr, n, count, nullptr, mask}, rows);
}

void largest(const Kernels& kernels, const int64_t* ranking, int64_t rows, int64_t n, int64_t count, uint8_t* mask) {
  mark(kernels, Ranking{nullptr, ranking, nullptr, nullptr, n, count, nullptr, mask}, rows);
}

void top(const Kernels& kernels, const float* ranking, const uint8_t* is_protected, const uint8_t* is_live, int64_t rows,
         int64_t n, int64_t count, uint8_t* mask) {
  mark(kernels, Ranking{ranking, nullptr, is_protected, is_live, n, count, nullptr, mask}, rows);
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
    for (; next < n; ++next)
      if (kept[next]) valid = false;
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

template <class T>
bool take(const T* plane, const int64_t* index, int64_t rows, int64_t n, int64_t count, T* taken) {
  std::atomic<bool> valid{true};
  for_rows(rows, count, [&](int64_t row) {
    const int64_t* in = index + row * count;
    bool fits = true;
    for (int64_t i = 0; i < count; ++i) fits &= static_cast<uint64_t>(in[i]) < static_cast<uint64_t>(n);
    if (!fits) valid = false;
    else
      for (int64_t i = 0; i < count; ++i) taken[row * count + i] = plane[row * n + in[i]];
  });
  return valid;
}

template bool take(const float*, const int64_t*, int64_t, int64_t, int64_t, float*);
template bool take(const int64_t*, const int64_t*, int64_t, int64_t, int64_t, int64_t*);

bool free_places(const int64_t* index, int64_t rows, int64_t count, int64_t places, int64_t* place) {
  std::atomic<bool> valid{true};
  for_rows(rows, std::max(count, places), [&](int64_t row) {
    const int64_t* in = index + row * count;
    int64_t *out = place + row * count, next = 0;
    std::vector<uint8_t> taken(places);
    for (int64_t i = 0; i < count; ++i)
      if (0 <= in[i] && in[i] < places) {
        if (taken[in[i]]) valid = false;
        taken[in[i]] = 1;
      }
    for (int64_t i = 0; i < count; ++i) {
      out[i] = in[i];
      if (0 <= in[i] && in[i] < places) continue;
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

void join_slots(float* products, const float* between, const float* member_weights, float* slot_weights, int64_t rows,
                int64_t members, int64_t slots, int64_t* joined) {
  for_rows(rows, members * slots, [&](int64_t row) {
    float *p = products + row * members * slots, *weights = slot_weights + row * slots;
    const float* b = between + row * members * members;
    for (int64_t i = 0; i < members; ++i) {
      const float *own = p + i * slots, weight = member_weights[row * members + i];
      int64_t best = 0;
      for (int64_t s = 1; s < slots; ++s)
        if (own[s] > own[best] || (own[s] != own[s] && own[best] == own[best])) best = s;  // the first NaN, as argmax
      joined[row * members + i] = best;
      weights[best] += weight;
      const float share = weight / std::max(weights[best], 1.0f);
      for (int64_t j = 0; j < members; ++j) {
        float& product = p[j * slots + best];
        product += share * (b[i * members + j] - product);
      }
    }
  });
}

}  // namespace kvmerge
