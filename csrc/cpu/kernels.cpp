// The kernels of one instruction set level: compiled once per level, with KVM_LEVEL naming it.
#include "kernels.h"

#include <optional>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kvmerge {
namespace KVM_LEVEL {
namespace {

#include "simd.h"
#include "tiles.h"
#include "repeats.h"

alignas(64) const char kZeros[kMaxHeadSize * 4] = {};

inline int64_t padded_nonzero(int64_t head_size) { return (head_size + 31) / 32 * 32; }
// Rows as tiles take them, floats as vectors do.
inline int64_t in_sixteens(int64_t count) { return (count + 15) / 16 * 16; }

// Consecutive tiles of a chunk that lie in one page.
struct Run {
  int32_t first, count;  // tiles of the chunk
  int32_t lo, hi;        // live lanes, counted from the first tile's lane 0
  Page page;
  int64_t entry;         // index of lane 0
  int32_t offset;        // of lane 0 in the page
  bool front;
};

// Touches cache lines a fixed distance ahead of what is being read, through K and V, chunk after chunk. Processors
// follow the lines of a page by themselves, but neither from page to page nor from block to block.
class Prefetcher {
 public:
  static constexpr int64_t kDistance = 256;  // cache lines
  static constexpr int64_t kStep = 1;      // one of so many lines is touched

  void add(const char* start, int64_t bytes) {
    if (count_ < kMaxRanges) ranges_[count_++] = Range{start, bytes / 64};
  }
  // Forgets the ranges behind, to make room.
  void compact() {
    for (int i = current_; i < count_; ++i) ranges_[i - current_] = ranges_[i];
    count_ -= current_;
    current_ = 0;
  }
  // Where the next `lines` lines begin: the caller touches them one by one. At the end of a range some of the next
  // one's are touched twice.
  inline const char* claim(int64_t lines) {
    const char* start = next_;
    while (lines > left_ && current_ < count_) {
      for (int64_t i = 0; i < left_; i += kStep) prefetch(next_ + i * 64);
      lines -= left_;
      start = next_ = ranges_[current_].start;
      left_ = ranges_[current_++].lines;
    }
    lines = min64(lines, left_);
    next_ += lines * 64;
    left_ -= lines;
    return start;
  }
  void take(int64_t lines) {
    const char* start = claim(lines);
    for (int64_t i = 0; i < lines; i += kStep) prefetch(start + i * 64);
  }

 private:
  struct Range {
    const char* start;
    int64_t lines;
  };
  static constexpr int kMaxRanges = 4 * kChunkTiles;
  Range ranges_[kMaxRanges];
  int count_ = 0, current_ = 0;
  const char* next_ = kZeros;
  int64_t left_ = 0;
};

// What a chunk's kernels work on. Weights and logits of row r start at r * kChunk, accumulators at r * acc_stride.
template <class T, class Q>
struct Chunk {
  const Run* runs;
  int num_runs, rows, head_size, block_size;
  const T *keys[kChunkTiles], *values[kChunkTiles];  // per run, of lane 0
  const Q* query;
  float scale;
  float* logits;
  const Q* weights;
  float* accumulator;
  int64_t acc_stride;
  Prefetcher* ahead;
  // Where queries and weights are whole numbers: what a row's are times, and [rows, acc_stride] sums.
  const float *query_units = nullptr, *weight_units = nullptr;
  float* products = nullptr;
};

// Calls f.rows<N>(r) for groups of N rows from r on, N a power of two up to `Largest`.
template <int Largest, class F>
inline void for_row_groups(int rows, const F& f, int r = 0) {
  for (; rows - r >= Largest; r += Largest) f.template rows<Largest>(r);
  if constexpr (Largest > 1)
    if (r < rows) for_row_groups<Largest / 2>(rows, f, r);
}

// ---- Kernels for any type: keys and values become float32 as they are read ------------------------------------------

constexpr int kVectors = 2;                        // per row of accumulators
constexpr int kRowsAtOnce = kLanes == 16 ? 8 : 4;  // as many accumulators as there are registers for

// Of 32 neighbours in bfloat16, those at even and those at odd places, which costs less than the first and the last 16.
#if defined(__AVX512F__)
constexpr bool kSplits = true;
inline void load_split(const BF16* p, VF* even, VF* odd) {
  const VU x = bit_cast<VU>(_mm512_loadu_si512(p));
  *even = bit_cast<VF>(x << 16);
  *odd = bit_cast<VF>(x & 0xffff0000u);
}
// Puts such columns in order.
inline void join_split(VF even, VF odd, VF* first, VF* second) {
  const __m512i lower = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i upper = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  *first = bit_cast<VF>(_mm512_permutex2var_ps(bit_cast<__m512>(even), lower, bit_cast<__m512>(odd)));
  *second = bit_cast<VF>(_mm512_permutex2var_ps(bit_cast<__m512>(even), upper, bit_cast<__m512>(odd)));
}
#else
constexpr bool kSplits = false;
inline void load_split(const void*, VF*, VF*) {}
inline void join_split(VF, VF, VF*, VF*) {}
#endif
template <class T>
constexpr bool kIsSplit = false;  // whether accumulators of whole 32 columns stay split
template <>
constexpr bool kIsSplit<BF16> = kSplits;

// out[r, t] = sum_i q[r, i] k[i, t] for the kTile lanes t of a tile.
template <class T>
struct TileLogits {
  static constexpr int64_t kBytes = kTile * sizeof(T);
  const T* k;
  int64_t stride;
  int d;
  const float* q;
  float* out;
  Prefetcher* ahead;
  template <int N>
  inline void rows(int first) const {
    const char* touched = first == 0 ? ahead->claim(d * kBytes / 64) : kZeros;
    for (int t = 0; t < kTile; t += kVectors * kLanes) {
      VF sum[N][kVectors] = {};
      for (int i = 0; i < d; ++i) {
        VF key[kVectors];
        if constexpr (kIsSplit<T>) load_split(k + i * stride + t, key, key + 1);
        else
          for (int v = 0; v < kVectors; ++v) key[v] = load(k + i * stride + t + v * kLanes);
        for (int r = 0; r < N; ++r) {
          const VF query = broadcast(q[(first + r) * d + i]);
          for (int v = 0; v < kVectors; ++v) sum[r][v] += query * key[v];
        }
        if (t == 0) prefetch(first == 0 ? touched + i * kBytes : touched);
      }
      for (int r = 0; r < N; ++r) {
        if constexpr (kIsSplit<T>) join_split(sum[r][0], sum[r][1], sum[r], sum[r] + 1);
        for (int v = 0; v < kVectors; ++v) store(out + (first + r) * kChunk + t + v * kLanes, sum[r][v]);
      }
    }
  }
};

// acc[r, e] += sum_t p[r, t] v[t, e] over the lanes [lo, hi) of a tile.
template <class T>
struct TileValues {
  const T* v;
  int d, lo, hi;
  const float* p;
  float* acc;
  int64_t acc_stride;
  Prefetcher* ahead;
  template <int N>
  inline void rows(int first) const {
    int e = 0;
    for (; e + kVectors * kLanes <= d; e += kVectors * kLanes) columns<N, kVectors>(first, e);
    if (e < d) columns<N, 1>(first, e);  // d is a multiple of 16, and so of kLanes
  }
  template <int N, int V>
  inline void columns(int first, int e) const {
    VF sum[N][V];
    for (int r = 0; r < N; ++r)
      for (int j = 0; j < V; ++j) sum[r][j] = load(acc + (first + r) * acc_stride + e + j * kLanes);
    constexpr int64_t kRowBytes = V * kLanes * sizeof(T);
    const char* touched = first == 0 ? ahead->claim((hi - lo) * kRowBytes / 64) : kZeros;
    const int64_t step = first == 0 ? kRowBytes : 0;
    for (int t = lo; t < hi; ++t, touched += step) {
      for (int64_t i = 0; i < kRowBytes; i += 64) prefetch(touched + i);
      VF value[V];
      if constexpr (kIsSplit<T> && V == 2) load_split(v + t * d + e, value, value + 1);
      else
        for (int j = 0; j < V; ++j) value[j] = load(v + t * d + e + j * kLanes);
      for (int r = 0; r < N; ++r) {
        const VF weight = broadcast(p[(first + r) * kChunk + t]);
        for (int j = 0; j < V; ++j) sum[r][j] += weight * value[j];
      }
    }
    for (int r = 0; r < N; ++r)
      for (int j = 0; j < V; ++j) store(acc + (first + r) * acc_stride + e + j * kLanes, sum[r][j]);
  }
};

template <class T>
void chunk_logits(const Chunk<T, float>& c) {
  for (int i = 0; i < c.num_runs; ++i)
    for (int j = 0; j < c.runs[i].count; ++j) {
      float* out = c.logits + (c.runs[i].first + j) * kTile;
      for_row_groups<kRowsAtOnce>(
          c.rows, TileLogits<T>{c.keys[i] + j * kTile, c.block_size, c.head_size, c.query, out, c.ahead});
    }
}

template <class T>
void chunk_values(const Chunk<T, float>& c) {
  for (int i = 0; i < c.num_runs; ++i)
    for (int j = 0; j < c.runs[i].count; ++j) {
      const int lo = static_cast<int>(max64(0, c.runs[i].lo - j * kTile));
      const int hi = static_cast<int>(min64(kTile, c.runs[i].hi - j * kTile));
      const T* v = c.values[i] + static_cast<int64_t>(j) * kTile * c.head_size;
      const float* p = c.weights + (c.runs[i].first + j) * kTile;
      for_row_groups<kRowsAtOnce>(
          c.rows, TileValues<T>{v, c.head_size, lo, hi, p, c.accumulator, c.acc_stride, c.ahead});
    }
}

// ---- Kernels with AVX512_BF16's dot products of pairs ---------------------------------------------------------------
//
// Two rows are interleaved in registers, so that each 32-bit lane holds the pair that belongs together. Interleaving
// works within 128 bits: of 32 columns, the low half of the result has 0-3, 8-11, 16-19, 24-27, the high half the rest.
// Accumulators stay in that order until the end.
//
// Memory is fastest when read as it lies, row after row. Registers hold W groups of 32 columns for N queries, W * N
// <= 8; wider rows are taken a few at a time, 16 KiB together, so that what is left of them comes from the first-level cache.

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;
constexpr int kCachedBytes = 16384;

// Codes are multiplied as whole numbers of 16 bits and added in 32, where 512 products of 14 and 7 bits have room.
constexpr float kLargestInt = 16383.0f;

template <class T>
struct PairsOf {
  typedef BF16 Factor;
  typedef __m512 Sum;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum load_sum(const float* p) { return _mm512_loadu_ps(p); }
  static void store_sum(float* p, Sum x) { _mm512_storeu_ps(p, x); }
  static __m512i load(const BF16* p, bool masked) {
    return masked ? _mm512_maskz_loadu_epi16(0xffffu, p) : _mm512_loadu_si512(p);
  }
  static Sum add(Sum sum, __m512i x, __m512i factor) {
    return _mm512_dpbf16_ps(sum, bit_cast<__m512bh>(x), bit_cast<__m512bh>(factor));
  }
};
template <>
struct PairsOf<I8> {
  typedef int16_t Factor;
  typedef __m512i Sum;
  static Sum zero() { return _mm512_setzero_si512(); }
  static Sum load_sum(const float* p) { return _mm512_loadu_si512(p); }
  static void store_sum(float* p, Sum x) { _mm512_storeu_si512(p, x); }
  static __m512i load(const I8* p, bool masked) {
    if (masked) return _mm512_cvtepi8_epi16(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Sum add(Sum sum, __m512i x, __m512i factor) { return _mm512_dpwssd_epi32(sum, x, factor); }
};

template <class Factor>
inline __m512i pair_of(const Factor* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return _mm512_set1_epi32(pair);
}

// acc[r, columns] += sum over pairs of rows i, i + 1 < count of q[r, i] x[i] + q[r, i + 1] x[i + 1]
template <class T, int W, bool kMasked = false>
struct PairProducts {
  typedef PairsOf<T> P;
  const T* x;
  int64_t stride;
  int count;
  const typename P::Factor* q;
  int64_t q_stride;
  float* acc;
  int64_t acc_stride;
  bool from_zero;
  Prefetcher* ahead;
  template <int N>
  inline void rows(int first) const {
    typename P::Sum low[N][W], high[N][W];
    constexpr int kLines = W * sizeof(T);  // of a pair of rows
    float* out = acc + first * acc_stride;
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r)
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) {
        low[r][w] = from_zero ? P::zero() : P::load_sum(out + r * acc_stride + w * 32);
        high[r][w] = from_zero ? P::zero() : P::load_sum(out + r * acc_stride + w * 32 + 16);
      }
    const typename P::Factor* query = q + first * q_stride;
    const char* touched = ahead && first == 0 ? ahead->claim(count * kLines / 2) : kZeros;
    const int64_t step = touched == kZeros ? 0 : 64;
    for (int i = 0; i < count; i += 2) {
      const T *even = x + i * stride, *odd = even + stride;
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) {
        const __m512i a = P::load(even + w * 32, kMasked), b = P::load(odd + w * 32, kMasked);
        const __m512i ab_low = _mm512_unpacklo_epi16(a, b), ab_high = _mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 8
        for (int r = 0; r < N; ++r) {
          const __m512i pair = pair_of(query + r * q_stride + i);
          low[r][w] = P::add(low[r][w], ab_low, pair);
          high[r][w] = P::add(high[r][w], ab_high, pair);
        }
      }
#pragma GCC unroll 8
      for (int w = 0; w < kLines; w += Prefetcher::kStep) prefetch(touched + w * step);
      touched += kLines * step;
    }
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r)
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) {
        P::store_sum(out + r * acc_stride + w * 32, low[r][w]);
        P::store_sum(out + r * acc_stride + w * 32 + 16, high[r][w]);
      }
  }
};

// acc[r, e] += sum_i q[r, i] x[i, e] for `width` columns e, a few rows of x after the other.
template <class T, int W>
inline void multiply(const T* x, int64_t stride, int count, int width, const typename PairsOf<T>::Factor* q,
                     int64_t q_stride, int rows, float* acc, int64_t acc_stride, bool from_zero, Prefetcher* ahead) {
  const int step = width <= W * 32 ? count : static_cast<int>(max64(2, kCachedBytes / (2 * width) & ~1));
  for (int i = 0; i < count; i += step) {
    const int some = static_cast<int>(min64(step, count - i));
    const bool zero = from_zero && i == 0;
    const T* block = x + i * stride;
    const typename PairsOf<T>::Factor* weights = q + i;
    int e = 0;
    for (; e + W * 32 <= width; e += W * 32)
      for_row_groups<8 / W>(
          rows, PairProducts<T, W>{block + e, stride, some, weights, q_stride, acc + e, acc_stride, zero, ahead});
    if constexpr (W > 2)
      if (e + 64 <= width) {
        for_row_groups<4>(
            rows, PairProducts<T, 2>{block + e, stride, some, weights, q_stride, acc + e, acc_stride, zero, ahead});
        e += 64;
      }
    if constexpr (W > 1)
      if (e + 32 <= width) {
        for_row_groups<8>(
            rows, PairProducts<T, 1>{block + e, stride, some, weights, q_stride, acc + e, acc_stride, zero, ahead});
        e += 32;
      }
    if (e < width)  // 16 columns
      for_row_groups<8>(
          rows, PairProducts<T, 1, true>{block + e, stride, some, weights, q_stride, acc + e, acc_stride, zero, ahead});
  }
}

template <class T>
inline void multiply(const T* x, int64_t stride, int count, int width, const typename PairsOf<T>::Factor* q,
                     int64_t q_stride, int rows, float* acc, int64_t acc_stride, bool from_zero, Prefetcher* ahead) {
  const auto run = rows >= 8 ? multiply<T, 1> : rows >= 4 ? multiply<T, 2> : multiply<T, 4>;
  run(x, stride, count, width, q, q_stride, rows, acc, acc_stride, from_zero, ahead);
}

// Numbers of 8 bits as bfloat16, over kUnit: so far their exponents can be completed by setting bits.
template <class T>
constexpr float kUnit = 1.0f;
template <>
constexpr float kUnit<E4M3> = 256.0f;
template <>
constexpr float kUnit<E5M2> = 65536.0f;

// By the last 5 bits, what bits alone do not make: subnormal numbers, and of E5M2 infinity and NaN.
alignas(64) const uint16_t kSpecialE4M3[32] = {0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860};
alignas(64) const uint16_t kSpecialE5M2[32] = {0, 0x2f80, 0x3000, 0x3040, 0, 0, 0, 0, 0, 0,      0,      0,      0, 0, 0, 0,
                                               0, 0,      0,      0,      0, 0, 0, 0, 0, 0, 0, 0, 0x7f80, 0x7fc0, 0x7fc0, 0x7fc0};

// (bits & mask) | exponent where not special, else the table's, with the sign of `bits`.
inline __m512i completed(__m512i bytes, __m512i bits, int mask, int exponent, __mmask32 special, const uint16_t* table) {
  const __m512i x = _mm512_ternarylogic_epi32(bits, _mm512_set1_epi16(static_cast<int16_t>(mask)),
                                              _mm512_set1_epi16(static_cast<int16_t>(exponent)), 0xea);
  const __m512i y = _mm512_mask_permutexvar_epi16(x, special, bytes, _mm512_load_si512(table));
  return _mm512_ternarylogic_epi32(y, bits, _mm512_set1_epi16(INT16_MIN), 0xf8);
}
inline __m512i as_pairs(const E4M3*, __m256i x) {
  const __m512i bytes = _mm512_cvtepi8_epi16(x), bits = _mm512_slli_epi16(bytes, 4);
  const __mmask32 special = _mm512_testn_epi16_mask(bits, _mm512_set1_epi16(0x0780));
  return completed(bytes, bits, 0x87f0, 0x3800, special, kSpecialE4M3);
}
inline __m512i as_pairs(const E5M2*, __m256i x) {
  const __m512i bytes = _mm512_cvtepi8_epi16(x), bits = _mm512_slli_epi16(bytes, 5);
  const __m512i next = _mm512_add_epi16(bits, _mm512_set1_epi16(0x80));  // its exponent is 0 or 1
  const __mmask32 special = _mm512_testn_epi16_mask(next, _mm512_set1_epi16(0x0f00));
  return completed(bytes, bits, 0x8fe0, 0x3000, special, kSpecialE5M2);
}

// Every whole number of 8 bits is one of bfloat16.
inline __m512i as_pairs(const I8*, __m256i x) {
  const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(x)));
  const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(x, 1)));
  return bit_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// Some rows of x as bfloat16, over kUnit; width: a multiple of 16.
template <class T>
inline void widen_rows(const T* x, int64_t stride, int rows, int width, BF16* out, Prefetcher* ahead) {
  const char* touched = ahead->claim(static_cast<int64_t>(rows) * width / 64);
  for (int i = 0; i < rows; ++i, x += stride, out += width, touched += width) {
    int e = 0;
    for (; e + 32 <= width; e += 32) {
      _mm512_storeu_si512(out + e, as_pairs(x, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + e))));
      if (e % 64 == 0) prefetch(touched + e);
    }
    if (e < width) {
      const __m256i half = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + e)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + e), _mm512_castsi512_si256(as_pairs(x, half)));
    }
  }
}

inline int rows_at_once(int width) { return static_cast<int>(max64(2, kCachedBytes / (2 * width) & ~1)); }

inline void key_products(const Chunk<BF16, BF16>& c, const Run& run, const BF16* k) {
  multiply(k, c.block_size, c.head_size, run.count * kTile, c.query, c.head_size, c.rows, c.logits + run.first * kTile,
           kChunk, true, c.ahead);
}

template <class T>
void key_products(const Chunk<T, BF16>& c, const Run& run, const T* k) {
  alignas(64) BF16 wide[kCachedBytes / 2];
  const int width = run.count * kTile, step = rows_at_once(width);
  for (int i = 0; i < c.head_size; i += step) {
    const int some = static_cast<int>(min64(step, c.head_size - i));
    widen_rows(k + static_cast<int64_t>(i) * c.block_size, c.block_size, some, width, wide, c.ahead);
    multiply(wide, width, some, width, c.query + i, c.head_size, c.rows, c.logits + run.first * kTile, kChunk, i == 0,
             nullptr);
  }
}

inline void key_products(const Chunk<I8, int16_t>& c, const Run& run, const I8* k) {
  multiply(k, c.block_size, c.head_size, run.count * kTile, c.query, c.head_size, c.rows, c.logits + run.first * kTile,
           kChunk, true, c.ahead);
}

// 32 columns that are interleaved, in order, times `scale`.
inline void in_order(const float* x, __m512 scale, __m512* first, __m512* second) {
  const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i upper = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
  *first = _mm512_mul_ps(_mm512_permutex2var_ps(low, lower, high), scale);
  *second = _mm512_mul_ps(_mm512_permutex2var_ps(low, upper, high), scale);
}

template <class T>
void chunk_logits(const Chunk<T, BF16>& c) {
  for (int i = 0; i < c.num_runs; ++i) key_products(c, c.runs[i], c.keys[i]);
  const __m512 scale = _mm512_set1_ps(c.scale * kUnit<T>);
  const Run& last = c.runs[c.num_runs - 1];
  for (int r = 0; r < c.rows; ++r)
    for (int t = 0; t < (last.first + last.count) * kTile; t += kTile) {
      float* x = c.logits + r * kChunk + t;
      __m512 first, second;
      in_order(x, scale, &first, &second);
      _mm512_storeu_ps(x, first);
      _mm512_storeu_ps(x + 16, second);
    }
}

void chunk_logits(const Chunk<I8, int16_t>& c) {
  for (int i = 0; i < c.num_runs; ++i) key_products(c, c.runs[i], c.keys[i]);
  const Run& last = c.runs[c.num_runs - 1];
  for (int r = 0; r < c.rows; ++r) {
    const __m512 scale = _mm512_set1_ps(c.scale * c.query_units[r]);
    for (int t = 0; t < (last.first + last.count) * kTile; t += kTile) {
      float* x = c.logits + r * kChunk + t;
      for (int v = 0; v < kTile; v += 16) _mm512_storeu_ps(x + v, _mm512_cvtepi32_ps(_mm512_loadu_si512(x + v)));
      __m512 first, second;
      in_order(x, scale, &first, &second);
      _mm512_storeu_ps(x, first);
      _mm512_storeu_ps(x + 16, second);
    }
  }
}

// Whole numbers for 16 of a row's.
inline void to_ints(const float* x, float scale, int16_t* out) {
  const __m512i y = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(scale)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(y));
}

// Weights of a row, which become whole numbers times what is returned. width: a multiple of 16.
inline float ints_of(const float* x, int width, int16_t* out) {
  __m512 most = _mm512_setzero_ps();
  for (int i = 0; i < width; i += 16) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(x + i)));
  const float largest = _mm512_reduce_max_ps(most), scale = largest > 0.0f ? kLargestInt / largest : 0.0f;
  for (int i = 0; i < width; i += 16) to_ints(x + i, scale, out + i);
  return largest / kLargestInt;
}

void chunk_values(const Chunk<I8, int16_t>& c) {
  for (int i = 0; i < c.num_runs; ++i) {  // codes that share a pair with the last live one weigh nothing
    const Run& run = c.runs[i];
    multiply(c.values[i], c.head_size, run.hi + run.hi % 2, c.head_size, c.weights + run.first * kTile, kChunk, c.rows,
             c.products, c.acc_stride, i == 0, c.ahead);
  }
  for (int r = 0; r < c.rows; ++r) {
    const __m512 unit = _mm512_set1_ps(c.weight_units[r]);
    for (int64_t e = r * c.acc_stride; e < (r + 1) * c.acc_stride; e += 16) {
      const __m512 product = _mm512_cvtepi32_ps(_mm512_loadu_si512(c.products + e));
      _mm512_storeu_ps(c.accumulator + e, _mm512_fmadd_ps(product, unit, _mm512_loadu_ps(c.accumulator + e)));
    }
  }
}

// Adds `count` rows of V, an even number.
inline void values_of_rows(const Chunk<BF16, BF16>& c, const BF16* v, int count, const BF16* weights,
                           Prefetcher* ahead) {
  multiply(v, c.head_size, count, c.head_size, weights, kChunk, c.rows, c.accumulator, c.acc_stride, false, ahead);
}

void chunk_values(const Chunk<BF16, BF16>& c) {
  const int d = c.head_size;
  for (int i = 0; i < c.num_runs; ++i) {
    const Run& run = c.runs[i];
    const BF16 *v = c.values[i], *weights = c.weights + run.first * kTile;
    // What shares a pair with a live entry at the border is not one, and may hold anything.
    const auto border = [&](int even, const BF16* first, const BF16* second) {
      alignas(64) BF16 rows[2 * kMaxHeadSize];
      __builtin_memcpy(rows, first, d * sizeof(BF16));
      __builtin_memcpy(rows + d, second, d * sizeof(BF16));
      values_of_rows(c, rows, 2, weights + even, nullptr);
    };
    const BF16* zeros = reinterpret_cast<const BF16*>(kZeros);
    int lo = run.lo, hi = run.hi;
    if (lo % 2) {
      border(lo - 1, zeros, v + static_cast<int64_t>(lo) * d);
      ++lo;
    }
    if (hi % 2 && hi > lo) {
      border(hi - 1, v + static_cast<int64_t>(hi - 1) * d, zeros);
      --hi;
    }
    if (lo < hi) values_of_rows(c, v + static_cast<int64_t>(lo) * d, hi - lo, weights + lo, c.ahead);
  }
}

template <class T>
void chunk_values(const Chunk<T, BF16>& c) {
  alignas(64) BF16 wide[kCachedBytes / 2];
  const int d = c.head_size, step = rows_at_once(d);
  for (int i = 0; i < c.num_runs; ++i) {
    const Run& run = c.runs[i];
    const int end = run.hi + run.hi % 2;
    for (int t = run.lo & ~1; t < end; t += step) {
      const int some = static_cast<int>(min64(step, end - t));
      widen_rows(c.values[i] + static_cast<int64_t>(t) * d, d, some, d, wide, c.ahead);
      // What shares a pair with a live entry at the border is not one, and may hold anything.
      if (t < run.lo) __builtin_memset(wide, 0, d * sizeof(BF16));
      if (t + some > run.hi) __builtin_memset(wide + (some - 1) * d, 0, d * sizeof(BF16));
      multiply(wide, d, some, d, c.weights + run.first * kTile + t, kChunk, c.rows, c.accumulator, c.acc_stride, false,
               nullptr);
    }
  }
}

#if defined(__AMX_BF16__)
// ---- Kernels with AMX's products of tiles ---------------------------------------------------------------------------
//
// A tile is 16 rows of 64 bytes. Of a product's right factor, a row holds the pairs of 16 columns, so rows are interleaved
// as above and kept: what 32 of them cost is shared by all queries of a round. A row's sums do not depend on how many
// rows there are, but they are not those of the dot products above: what takes them must do so for all rows of its kind.
constexpr bool kHasTiles = true;
constexpr int kTilePairs = 16 * 32;  // numbers of a tile

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Not on the stack: GCC takes the instruction that loads it to read its first bytes alone, and leaves out the others.
alignas(64) constexpr TileConfig kTileConfig;

// While it lives, this thread's tiles are as large as they can be.
struct TilesInUse {
  TilesInUse() { _tile_loadconfig(&kTileConfig); }
  ~TilesInUse() { _tile_release(); }
};

// Interleaves the rows lo, lo + 1, ... hi - 1 < 32 of x, others being zero, in two tiles: `width` columns, 32 or the first
// 16. kNatural: columns in order; otherwise as `in_order` takes them.
template <bool kNatural>
inline void interleave(const BF16* x, int64_t stride, int lo, int hi, int width, BF16* out) {
  const __mmask32 columns = width < 32 ? 0xffffu : 0xffffffffu;
  const bool is_whole = lo <= 0 && hi >= 32 && width >= 32;
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (int i = 0; i < 32; i += 2) {
    const auto row = [&](int j) {
      if (is_whole) return _mm512_loadu_si512(x + j * stride);
      return _mm512_maskz_loadu_epi16(lo <= j && j < hi ? columns : 0, lo <= j && j < hi ? x + j * stride : x);
    };
    const __m512i a = row(i), b = row(i + 1);
    __m512i first = _mm512_unpacklo_epi16(a, b), second = _mm512_unpackhi_epi16(a, b);
    if constexpr (kNatural) {
      const __m512i both = first;
      first = _mm512_permutex2var_epi64(both, low, second);
      second = _mm512_permutex2var_epi64(both, high, second);
    }
    _mm512_store_si512(out + i * 16, first);
    _mm512_store_si512(out + i * 16 + kTilePairs, second);
  }
}

// out[r, columns] = or += sum_i a[r, i] b[i, columns] of 32 columns; blocks: of 32 numbers i, whose tiles are
// `b_stride` apart. rows: a multiple of 16.
template <bool kAdd>
inline void tile_product(const BF16* a, int64_t a_stride, const BF16* b, int64_t b_stride, int blocks, int rows,
                         float* out, int64_t out_stride) {
  const int64_t a_bytes = a_stride * 2, out_bytes = out_stride * 4;
  for (; rows >= 32; rows -= 32, a += 32 * a_stride, out += 32 * out_stride) {
    float* below = out + 16 * out_stride;
    if constexpr (kAdd) {
      _tile_loadd(4, out, out_bytes);
      _tile_loadd(5, out + 16, out_bytes);
      _tile_loadd(6, below, out_bytes);
      _tile_loadd(7, below + 16, out_bytes);
    } else {
      _tile_zero(4);
      _tile_zero(5);
      _tile_zero(6);
      _tile_zero(7);
    }
    for (int i = 0; i < blocks; ++i) {
      _tile_loadd(2, b + i * b_stride, 64);
      _tile_loadd(0, a + i * 32, a_bytes);
      _tile_dpbf16ps(4, 0, 2);
      _tile_loadd(1, a + 16 * a_stride + i * 32, a_bytes);
      _tile_dpbf16ps(6, 1, 2);
      _tile_loadd(3, b + i * b_stride + kTilePairs, 64);
      _tile_dpbf16ps(5, 0, 3);
      _tile_dpbf16ps(7, 1, 3);
    }
    _tile_stored(4, out, out_bytes);
    _tile_stored(5, out + 16, out_bytes);
    _tile_stored(6, below, out_bytes);
    _tile_stored(7, below + 16, out_bytes);
  }
  if (rows == 0) return;
  if constexpr (kAdd) {
    _tile_loadd(4, out, out_bytes);
    _tile_loadd(5, out + 16, out_bytes);
  } else {
    _tile_zero(4);
    _tile_zero(5);
  }
  for (int i = 0; i < blocks; ++i) {
    _tile_loadd(0, a + i * 32, a_bytes);
    _tile_loadd(2, b + i * b_stride, 64);
    _tile_dpbf16ps(4, 0, 2);
    _tile_loadd(3, b + i * b_stride + kTilePairs, 64);
    _tile_dpbf16ps(5, 0, 3);
  }
  _tile_stored(4, out, out_bytes);
  _tile_stored(5, out + 16, out_bytes);
}

// The keys k of a tile of 32 entries, interleaved; pairs: kTile * padded head size.
template <class T>
inline void pairs_of_keys(const Chunk<T, BF16>& c, const T* k, BF16* pairs) {
  alignas(64) BF16 wide[sizeof(T) == 1 ? kTile * kMaxHeadSize : 1];
  const int d = c.head_size;
  const BF16* x;
  int64_t stride = c.block_size;
  if constexpr (sizeof(T) == 1) {
    widen_rows(k, c.block_size, d, kTile, wide, c.ahead);
    x = wide;
    stride = kTile;
  } else {
    c.ahead->take(d);
    x = k;
  }
  for (int e = 0; e < d; e += 32) interleave<true>(x + e * stride, stride, 0, d - e, kTile, pairs + e * kTile);
}

// Calls f(k, i) for the keys k of a chunk's i-th tile.
template <class T, class F>
inline void for_key_tiles(const Chunk<T, BF16>& c, const F& f) {
  for (int i = 0; i < c.num_runs; ++i)
    for (int j = 0; j < c.runs[i].count; ++j) f(c.keys[i] + j * kTile, c.runs[i].first + j);
}

// `chunk_logits` without the scale, of c.rows / 16 tiles of queries, whose rows are q_stride apart.
template <class T>
void tile_logits(const Chunk<T, BF16>& c, int64_t q_stride) {
  alignas(64) BF16 pairs[kTile * kMaxHeadSize];
  for_key_tiles(c, [&](const T* k, int i) {
    pairs_of_keys(c, k, pairs);
    tile_product<false>(c.query, q_stride, pairs, 2 * kTilePairs, (c.head_size + 31) / 32, c.rows, c.logits + i * kTile,
                        kChunk);
  });
}

// `chunk_values` of c.rows / 16 tiles of weights; pairs: kChunk * padded head size.
template <class T>
void tile_values(const Chunk<T, BF16>& c, BF16* pairs) {
  alignas(64) BF16 wide[sizeof(T) == 1 ? kTile * kMaxHeadSize : 1];
  const int d = c.head_size;
  const int64_t per_tile = kTile * c.acc_stride;
  int blocks = 0;
  for (int i = 0; i < c.num_runs; ++i)
    for (int j = 0; j < c.runs[i].count; ++j, ++blocks) {
      const int lo = static_cast<int>(max64(0, c.runs[i].lo - j * kTile));
      const int hi = static_cast<int>(min64(kTile, c.runs[i].hi - j * kTile));
      const T* v = c.values[i] + static_cast<int64_t>(j) * kTile * d;
      const BF16* x;
      if constexpr (sizeof(T) == 1) {
        widen_rows(v, d, kTile, d, wide, c.ahead);
        x = wide;
      } else {
        c.ahead->take(d);
        x = v;
      }
      for (int e = 0; e < d; e += 32)
        interleave<false>(x + e, d, lo, hi, d - e, pairs + blocks * per_tile + e * kTile);
    }
  for (int e = 0; e < d; e += 32)
    tile_product<true>(c.weights, kChunk, pairs + e * kTile, per_tile, blocks, c.rows, c.accumulator + e, c.acc_stride);
}
#else
constexpr bool kHasTiles = false;
#endif

#else
constexpr bool kHasPairs = false, kHasTiles = false;
template <class T>
constexpr float kUnit = 1.0f;
#endif

// How queries are multiplied: in float32, or as they are.
enum class Way { floats, pairs, tiles };

// Bfloat16 as it is needs queries that are so, because others would lose bits. Numbers of 8 bits lose none, but making
// pairs of E5M2 takes longer than it saves a single row. Tiles are for several queries, all of which go the same way,
// however many of them are taken at once: making them costs more than a single one. Processors with tiles multiply float32
// as fast as pairs.
inline Way way_of(DType cache, DType query, int rows, int64_t total_queries) {
  if (!kHasPairs || query != DType::bf16 || cache == DType::f32 || cache == DType::f16) return Way::floats;
  if (kHasTiles && total_queries > 1) return Way::tiles;
  if (cache == DType::bf16) return kHasTiles ? Way::floats : Way::pairs;
  return cache == DType::e4m3 || rows > 1 ? Way::pairs : Way::floats;
}

template <class T, Way kWay>
struct Operand {  // what queries and weights are kept as
  typedef BF16 type;
};
template <class T>
struct Operand<T, Way::floats> {
  typedef float type;
};
template <>
struct Operand<I8, Way::pairs> {
  typedef int16_t type;
};

template <class T, Way kWay>
struct Multiplied {  // what keys and values are then
  typedef T type;
};
template <Way kWay>
struct Multiplied<I4, kWay> {
  typedef float type;
};
template <>
struct Multiplied<I4, Way::tiles> {
  typedef BF16 type;
};

inline float element(const Rows& rows, int64_t index) {
  if (rows.dtype == DType::f32) return static_cast<const float*>(rows.data)[index];
  if (rows.dtype == DType::bf16) return to_float(static_cast<const BF16*>(rows.data)[index]);
  return to_float(static_cast<const F16*>(rows.data)[index]);
}

int64_t attend_scratch(int64_t rows, int64_t head_size) {
  const int64_t padded_rows = in_sixteens(rows), width = padded_nonzero(head_size);
  // Queries, logits, weights in 16 bits, sums of whole numbers and their units, pairs of values, what is unpacked.
  return padded_rows * (width + kChunk + kChunk / 2 + width + 2) + (kHasTiles ? kChunk * width / 2 : 0) + 64 +
         kChunk * width;
}

// Splits the tiles [begin, end), at most kChunkTiles, into runs; returns their number.
int find_runs(const Tiles& tiles, int64_t begin, int64_t end, Run* runs) {
  int count = 0;
  for (int64_t i = begin; i < end; ++i) {
    const Tile t = tiles[i];
    if (count > 0) {
      Run& last = runs[count - 1];
      if (last.page.rows == t.page.rows && last.front == t.front && last.offset + last.count * kTile == t.offset) {
        last.hi = last.count * kTile + t.hi;
        ++last.count;
        continue;
      }
    }
    runs[count++] = Run{static_cast<int32_t>(i - begin), 1, t.lo, t.hi, t.page, t.entry, t.offset, t.front};
  }
  return count;
}

void add_ranges(Prefetcher& ahead, const Attend& a, const Run* runs, int count) {
  const PagedKVCache& cache = *a.cache;
  const int64_t row_bytes = static_cast<int64_t>(cache.head_size) * cache.item_size / (cache.dtype == DType::i4 ? 2 : 1);
  for (int i = 0; i < count; ++i)
    ahead.add(runs[i].page.rows + runs[i].offset * row_bytes, runs[i].count * kTile * row_bytes);
  if (!a.with_values) return;
  for (int i = 0; i < count; ++i)
    ahead.add(runs[i].page.rows + (cache.block_size + runs[i].offset + runs[i].lo) * row_bytes,
              (runs[i].hi - runs[i].lo) * row_bytes);
}

// Logits become cap * tanh(logit / cap).
inline void cap_logits(float* logits, int rows, int width, float cap, int64_t stride = kChunk) {
  const VF factor = broadcast(2.0f / cap), one = broadcast(1.0f), largest = broadcast(cap);
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < width; i += kLanes) {
      float* x = logits + r * stride + i;
      const VF y = load(x) * factor, past = exp(y < VF{} ? y : -y);
      const VF magnitude = largest * (one - past) / (one + past);
      store(x, select(y < VF{}, -magnitude, magnitude));
    }
}

// Keeps a product from being fused with what follows: the largest logit less itself must be 0, however large it is.
inline VF rounded(VF product) {
#if defined(__AVX512F__)
  asm("" : "+v"(product));
#endif
  return product;
}

// Puts columns in the order in which values of bfloat16 leave them (`kIsSplit`).
inline void split_columns(float* x, int count) {
  for (int e = 0; e + 32 <= count; e += 32) {
    float columns[32];
    __builtin_memcpy(columns, x + e, sizeof columns);
    for (int i = 0; i < 16; ++i) {
      x[e + i] = columns[2 * i];
      x[e + 16 + i] = columns[2 * i + 1];
    }
  }
}

// The scales of a coded page's keys, or of its values.
inline const F16* scales(const PagedKVCache& cache, Page page, bool of_values) {
  return reinterpret_cast<const F16*>(page.metadata + cache.block_size) + (of_values ? cache.block_size : 0);
}

struct Range {
  const F16 *scale, *offset;
  inline Range operator+(int64_t i) const { return {scale + i, offset + i}; }
};

inline int groups_of(int64_t count) { return static_cast<int>((count + 31) / 32); }

// The first range of a page's keys, [groups of slots, 2, head size], or of its values, [groups of channels, 2, slots].
inline Range ranges(const PagedKVCache& cache, Page page, bool of_values, int group) {
  const int64_t n = cache.block_size, d = cache.head_size, width = of_values ? n : d;
  const F16* first = reinterpret_cast<const F16*>(page.rows + n * d) + (of_values ? 2 * d * groups_of(n) : 0);
  return {first + 2 * group * width, first + (2 * group + 1) * width};
}

#if defined(__AVX512F__)
// What the codes 0 to 15 stand for.
inline VF numbers_of(const Range& range) {
  const auto number = [](const F16* x) { return _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(x->bits))); };
  return iota() * bit_cast<VF>(number(range.scale)) + bit_cast<VF>(number(range.offset));
}
#endif

// out[i] = offset + scale * code i, of `count` neighbours (16 or 32) that share a range.
inline void unpack(const I4* codes, const Range& range, int count, float* out) {
#if defined(__AVX512F__)
  const __m128i bytes = count < 32 ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))
                                   : _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m512i pairs = _mm512_cvtepu8_epi32(bytes), table = bit_cast<__m512i>(numbers_of(range));
  const __m512i even = _mm512_permutexvar_epi32(pairs, table);  // of an index, the lower 4 bits count
  const __m512i odd = _mm512_permutexvar_epi32(_mm512_srli_epi32(pairs, 4), table);
  VF first, second;
  join_split(bit_cast<VF>(even), bit_cast<VF>(odd), &first, &second);
  store(out, first);
  if (count == 32) store(out + 16, second);
#else
  const VF scale = broadcast(to_float(*range.scale)), offset = broadcast(to_float(*range.offset));
  uint8_t numbers[32];
  for (int i = 0; i < count / 2; ++i) {
    numbers[2 * i] = codes[i].bits & 15;
    numbers[2 * i + 1] = codes[i].bits >> 4;
  }
  for (int i = 0; i < count; i += kLanes)
    store(out + i, __builtin_convertvector(bit_cast<VI>(widen(numbers + i)), VF) * scale + offset);
#endif
}
#if defined(__AVX512BF16__)
inline void unpack(const I4* codes, const Range& range, int count, BF16* out) {
  const __m128i bytes = count < 32 ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))
                                   : _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m512i pairs = _mm512_cvtepu8_epi32(bytes), both = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
  const __m256bh table = _mm512_cvtneps_pbh(bit_cast<__m512>(numbers_of(range)));
  const __m512i found = _mm512_permutexvar_epi16(_mm512_and_si512(both, _mm512_set1_epi32(0xf000f)),
                                                 _mm512_zextsi256_si512(bit_cast<__m256i>(table)));
  if (count == 32) _mm512_storeu_si512(out, found);
  else _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(found));
}
#else
inline void unpack(const I4*, const Range&, int, BF16*) {}  // not called
#endif

inline const I4* codes_of_keys(const Run& run, int tile) {
  return reinterpret_cast<const I4*>(run.page.rows) + (run.offset + tile * kTile) / 2;
}
inline const I4* codes_of_values(const PagedKVCache& cache, const Run& run) {
  return reinterpret_cast<const I4*>(run.page.rows) + (cache.block_size + run.offset) * cache.head_size / 2;
}
// How many of a tile's slots are there: pages may end within one.
inline int slots_of(const PagedKVCache& cache, const Run& run, int tile) {
  return static_cast<int>(min64(kTile, cache.block_size - run.offset - tile * kTile));
}

// Writes the keys of a run to its columns of `out`, [head size, kChunk].
template <class M>
inline void unpack_keys(const PagedKVCache& cache, const Run& run, M* out) {
  const int n = cache.block_size, d = cache.head_size;
  for (int j = 0; j < run.count; ++j) {
    const I4* codes = codes_of_keys(run, j);
    const Range range = ranges(cache, run.page, false, run.offset / kTile + j);
    M* tile = out + (run.first + j) * kTile;
    for (int i = 0; i < d; ++i) unpack(codes + i * n / 2, range + i, slots_of(cache, run, j), tile + i * kChunk);
  }
}

// Writes the values of a run to its rows of `out`, [kChunk, head size].
template <class M>
inline void unpack_values(const PagedKVCache& cache, const Run& run, M* out) {
  const int d = cache.head_size;
  for (int g = 0; g < groups_of(d); ++g) {
    const I4* codes = codes_of_values(cache, run) + g * 16;
    const Range range = ranges(cache, run.page, true, g) + run.offset;
    M* columns = out + run.first * kTile * d + g * 32;
    for (int t = 0; t < run.hi; ++t)
      unpack(codes + t * d / 2, range + t, static_cast<int>(min64(32, d - g * 32)), columns + t * d);
  }
}

#if defined(__AVX512BF16__)
// Codes of 4 bits as whole numbers of 16 bits, as `PairsOf<I8>`; scales multiply the other factors beforehand, offsets
// are added to sums. Of 32 neighbours, those at even and those at odd places make a vector each (`join_split`).

// even[r], odd[r] += sum over pairs of rows i, i + 1 < count of q[r, i] x[i] + q[r, i + 1] x[i + 1]
template <int N>
inline void nibble_products(const I4* x, int64_t stride, int count, int width, const int16_t* q, int64_t q_stride,
                            __m512i* even, __m512i* odd) {
  const auto row = [&](const I4* p) {
    const __m128i* at = reinterpret_cast<const __m128i*>(p);
    return width < 32 ? _mm_loadl_epi64(at) : _mm_loadu_si128(at);
  };
  for (int i = 0; i < count; i += 2) {
    const __m128i a = row(x + i * stride), b = row(x + (i + 1) * stride);
    const __m256i bytes = _mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b));
    const __m512i both = _mm512_cvtepu8_epi16(bytes);
    const __m512i low = _mm512_and_si512(both, _mm512_set1_epi16(15)), high = _mm512_srli_epi16(both, 4);
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      const __m512i pair = pair_of(q + r * q_stride + i);
      even[r] = _mm512_dpwssd_epi32(even[r], low, pair);
      odd[r] = _mm512_dpwssd_epi32(odd[r], high, pair);
    }
  }
}

// out[r] = the logits of a tile; q: [rows, head size].
struct NibbleLogits {
  const I4* codes;
  int64_t stride;
  Range range;
  int head_size, width;
  const float* q;
  float* out;
  template <int N>
  inline void rows(int first) const {
    alignas(64) float scaled[kMaxHeadSize];
    alignas(64) int16_t ints[N][kMaxHeadSize];
    __m512i even[N] = {}, odd[N] = {};
    float unit[N], offset[N];
    for (int r = 0; r < N; ++r) {
      const float* query = q + (first + r) * head_size;
      VF sum = {};
      for (int i = 0; i < head_size; i += kLanes) {
        store(scaled + i, load(query + i) * load(range.scale + i));
        sum += load(query + i) * load(range.offset + i);
      }
      offset[r] = horizontal_sum(sum);
      unit[r] = ints_of(scaled, head_size, ints[r]);
    }
    nibble_products<N>(codes, stride, head_size, width, ints[0], kMaxHeadSize, even, odd);
    for (int r = 0; r < N; ++r) {
      const auto logits = [&](__m512i x) { return bit_cast<VF>(_mm512_cvtepi32_ps(x)) * unit[r] + offset[r]; };
      VF lower, upper;
      join_split(logits(even[r]), logits(odd[r]), &lower, &upper);
      store(out + (first + r) * kChunk, lower);
      store(out + (first + r) * kChunk + 16, upper);
    }
  }
};

// acc[r] += the values of a group of channels, times weights, [rows, kChunk], which are 0 where there is no entry.
struct NibbleValues {
  const PagedKVCache& cache;
  const Run* runs;
  int num_runs, group;
  const float* weights;
  float* acc;
  int64_t acc_stride;
  template <int N>
  inline void rows(int first) const {
    alignas(64) float scaled[kChunk];
    alignas(64) int16_t ints[N][kChunk];
    __m512i even[N] = {}, odd[N] = {};
    float unit[N], offset[N];
    for (int r = 0; r < N; ++r) {
      __m512 sum = _mm512_setzero_ps();
      for (int i = 0; i < kChunk; i += 16) _mm512_store_ps(scaled + i, _mm512_setzero_ps());
      for (int i = 0; i < num_runs; ++i) {
        const Range range = ranges(cache, runs[i].page, true, group) + runs[i].offset;
        const int start = runs[i].first * kTile;
        for (int t = 0; t < runs[i].hi; t += 16) {
          const __mmask16 live = runs[i].hi - t < 16 ? (1u << (runs[i].hi - t)) - 1 : 0xffffu;
          const auto numbers = [&](const F16* x) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(live, x + t)); };
          const __m512 weight = _mm512_loadu_ps(weights + (first + r) * kChunk + start + t);
          _mm512_store_ps(scaled + start + t, _mm512_mul_ps(weight, numbers(range.scale)));
          sum = _mm512_fmadd_ps(weight, numbers(range.offset), sum);
        }
      }
      offset[r] = horizontal_sum(bit_cast<VF>(sum));
      unit[r] = ints_of(scaled, kChunk, ints[r]);
    }
    const int d = cache.head_size, width = static_cast<int>(min64(32, d - group * 32));
    for (int i = 0; i < num_runs; ++i)
      nibble_products<N>(codes_of_values(cache, runs[i]) + group * 16, d / 2, runs[i].hi + runs[i].hi % 2, width,
                         ints[0] + runs[i].first * kTile, kChunk, even, odd);
    for (int r = 0; r < N; ++r) {
      float* out = acc + (first + r) * acc_stride + group * 32;
      store(out, load(out) + bit_cast<VF>(_mm512_cvtepi32_ps(even[r])) * unit[r] + offset[r]);
      store(out + 16, load(out + 16) + bit_cast<VF>(_mm512_cvtepi32_ps(odd[r])) * unit[r] + offset[r]);
    }
  }
};

inline void nibble_logits(const PagedKVCache& cache, const Run& run, int rows, const float* q, float* logits) {
  for (int j = 0; j < run.count; ++j)
    for_row_groups<8>(rows, NibbleLogits{codes_of_keys(run, j), cache.block_size / 2,
                                         ranges(cache, run.page, false, run.offset / kTile + j), cache.head_size,
                                         slots_of(cache, run, j), q, logits + (run.first + j) * kTile});
}

// Puts split columns in the order of pairs (`in_order`), in that which bfloat16's vectors have, or as they are counted.
inline void order_columns(float* x, int count, bool in_pairs, bool is_split) {
  const __m512i lower = _mm512_setr_epi32(0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
  const __m512i upper = _mm512_setr_epi32(2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  for (int e = 0; e < count; e += 32) {
    const VF even = load(x + e), odd = load(x + e + 16);
    VF first = even, second = odd;
    if (in_pairs) {
      first = bit_cast<VF>(_mm512_permutex2var_ps(bit_cast<__m512>(even), lower, bit_cast<__m512>(odd)));
      second = bit_cast<VF>(_mm512_permutex2var_ps(bit_cast<__m512>(even), upper, bit_cast<__m512>(odd)));
    } else if (!is_split || count - e < 32) {
      join_split(even, odd, &first, &second);
    }
    store(x + e, first);
    store(x + e + 16, second);
  }
}
#endif

// The weights of a chunk in a row: its logits times `factor`, less the row's maximum so far, to the power of e; `result`
// is scaled by what the maximum has changed. kept: float32 copies of the weights, or null. kCoded: weights are times
// `scales`, those of the values. unit: where they are whole numbers, what these are times.
template <bool kPairs, bool kScaled, bool kCoded, class Q>
inline void softmax_row(float* x, int width, float factor, float* largest, float* sum, float* result, int64_t length,
                        Q* weights, float* kept, [[maybe_unused]] const float* scales,
                        [[maybe_unused]] float* unit) {
  constexpr bool kInts = std::is_same_v<Q, int16_t>;
  VF most = load(x);
  for (int i = kLanes; i < width; i += kLanes) most = maximum(most, load(x + i));
  const float chunk_maximum = horizontal_max(most) * factor, old = *largest;
  if (chunk_maximum > old) {
    const VF change = exp(broadcast(old - chunk_maximum));
    *largest = chunk_maximum;
    *sum *= change[0];
    for (int64_t i = 0; i < length; i += kLanes) store(result + i, load(result + i) * change);
  }
  const VF top = broadcast(*largest);
  VF total = {};
  for (int i = 0; i < width; i += kTile) {
    VF weight[kTile / kLanes];
    for (int v = 0; v < kTile / kLanes; ++v) {
      VF logit = load(x + i + v * kLanes);
      if constexpr (kScaled) logit = rounded(logit * factor);
      weight[v] = exp(logit - top);
      total += weight[v];
      if (kept) store(kept + i + v * kLanes, weight[v]);
      if constexpr (kCoded) weight[v] *= load(scales + i + v * kLanes);
    }
    if constexpr (kInts)
      for (int v = 0; v < kTile / kLanes; ++v) store(x + i + v * kLanes, weight[v]);
#if defined(__AVX512BF16__)
    if constexpr (kPairs && !kInts) {
      const __m512bh both = _mm512_cvtne2ps_pbh(bit_cast<__m512>(weight[1]), bit_cast<__m512>(weight[0]));
      _mm512_storeu_si512(weights + i, bit_cast<__m512i>(both));
    }
#endif
    if constexpr (!kPairs)
      for (int v = 0; v < kTile / kLanes; ++v) store(weights + i + v * kLanes, weight[v]);
  }
#if defined(__AVX512BF16__)
  if constexpr (kInts) *unit = ints_of(x, width, weights);
#endif
  *sum += horizontal_sum(total);
}

template <class T, Way kWay>
void attend_as(const Attend& a) {
  typedef typename Multiplied<T, kWay>::type M;
  constexpr bool kPacked = std::is_same_v<T, I4>, kNibbles = kPacked && kWay == Way::pairs;
  typedef typename Operand<M, kNibbles ? Way::floats : kWay>::type Q;
  constexpr bool kPairs = kWay != Way::floats && !kNibbles, kTiles = kWay == Way::tiles;
  constexpr bool kCoded = std::is_same_v<T, I8>;
  constexpr bool kInts = std::is_same_v<Q, int16_t>;
  const PagedKVCache& cache = *a.cache;
  const Tiles tiles(cache, a.segments, a.head);
  alignas(64) float value_scales[kCoded ? kChunk : 1];
  const int d = cache.head_size, rows = a.num_queries * a.group;
  const int64_t acc_stride = padded_nonzero(d), bs = cache.block_size, num_entries = tiles.num_entries();
  const bool softmax = a.mode != ScoreMode::log_ema || a.with_values;
  const int64_t padded_rows = kTiles ? in_sixteens(rows) : rows, q_stride = kTiles ? acc_stride : d;
  if (a.with_values)
    for (int64_t i = 0; i < padded_rows * acc_stride; ++i) a.accumulator[i] = 0.0f;

  Prefetcher ahead, none;
  Run runs[kChunkTiles], next_runs[kChunkTiles];
  int num_next = find_runs(tiles, a.tile_begin, min64(a.tile_begin + kChunkTiles, a.tile_end), next_runs);
  add_ranges(ahead, a, next_runs, num_next);
  ahead.take(Prefetcher::kDistance);

  Q* q = reinterpret_cast<Q*>(a.scratch);
  float* logits = a.scratch + in_sixteens(padded_rows * q_stride);
  Q* weights = reinterpret_cast<Q*>(kPairs ? logits + padded_rows * kChunk : logits);
  float* units = reinterpret_cast<float*>(weights + padded_rows * kChunk);  // of queries, then of weights
  float* products = units + in_sixteens(2 * rows);
  M* unpacked = reinterpret_cast<M*>(a.scratch + attend_scratch(rows, d) - kChunk * acc_stride);
  for (int r = 0; r < rows; ++r) {
    const int64_t token = r / a.group, head = static_cast<int64_t>(a.head) * a.group + r % a.group;
    const int64_t start = token * a.query.token_stride + head * a.query.head_stride;
    // Pairs multiply the queries as they are, and their sum is scaled; float32 queries are scaled beforehand.
#if defined(__AVX512BF16__)
    if constexpr (kInts) {
      for (int i = 0; i < d; ++i) products[i] = element(a.query, start + i);
      units[r] = ints_of(products, d, q + r * q_stride);
    }
#endif
    if constexpr (kPairs && !kInts)
      __builtin_memcpy(q + r * q_stride, static_cast<const BF16*>(a.query.data) + start, d * 2);
    if constexpr (!kPairs)
      for (int i = 0; i < d; ++i) q[r * d + i] = from_float<Q>(element(a.query, start + i) * a.scale);
    a.maximum[r] = kLowest;
    a.sum[r] = 0.0f;
  }
#if defined(__AMX_BF16__)
  BF16* pairs = reinterpret_cast<BF16*>(weights + padded_rows * kChunk);
  std::optional<TilesInUse> tiles_in_use;
  if constexpr (kTiles) {
    tiles_in_use.emplace();
    for (int r = 0; r < padded_rows; ++r)  // what lies beyond a row's numbers, and in rows that are none
      for (int64_t i = r < rows ? d : 0; i < q_stride; ++i) q[r * q_stride + i] = Q{};
    for (int64_t i = rows * kChunk; i < padded_rows * kChunk; ++i) weights[i] = Q{};
  }
#endif

  const int64_t first_limit =  // entries that row 0 sees
      a.sees_all ? num_entries : num_entries - a.total_queries + a.first_query + 1;
  for (int64_t chunk = a.tile_begin; chunk < a.tile_end; chunk += kChunkTiles) {
    const int count = static_cast<int>(min64(kChunkTiles, a.tile_end - chunk)), width = count * kTile;
    const int num_runs = num_next;
    for (int i = 0; i < num_runs; ++i) runs[i] = next_runs[i];
    ahead.compact();
    num_next = find_runs(tiles, chunk + count, min64(chunk + count + kChunkTiles, a.tile_end), next_runs);
    add_ranges(ahead, a, next_runs, num_next);

    Chunk<M, Q> c{runs, num_runs, static_cast<int>(padded_rows), d, kPacked ? kChunk : static_cast<int>(bs), {}, {}, q,
                  a.scale, logits, weights, a.accumulator, acc_stride, kPacked ? &none : &ahead, units, units + rows,
                  products};
    bool has_votes = false;
    for (int i = 0; i < num_runs; ++i) {
      const M* start = reinterpret_cast<const M*>(runs[i].page.rows);
      c.keys[i] = start + runs[i].offset;
      c.values[i] = start + (bs + runs[i].offset) * d;
      has_votes |= runs[i].front;
      if constexpr (kPacked) {
        c.keys[i] = unpacked + runs[i].first * kTile;
        c.values[i] = unpacked + runs[i].first * kTile * d;
        ahead.take(static_cast<int64_t>(runs[i].count) * kTile * d / 128);
        if constexpr (!kNibbles) unpack_keys(cache, runs[i], unpacked);
      }
    }
    float factor = 1.0f;  // of the logits
#if defined(__AMX_BF16__)
    if constexpr (kTiles) {
      tile_logits(c, q_stride);
      factor = a.scale * kUnit<M>;
      if (a.cap > 0.0f || a.mode == ScoreMode::log_ema || has_votes || factor <= 0.0f) {
        for (int r = 0; r < rows; ++r)
          for (int i = 0; i < width; i += kLanes) store(logits + r * kChunk + i, load(logits + r * kChunk + i) * factor);
        factor = 1.0f;
      }
    }
#endif
#if defined(__AVX512BF16__)
    if constexpr (kNibbles)
      for (int i = 0; i < num_runs; ++i) nibble_logits(cache, runs[i], rows, q, logits);
#endif
    if constexpr (!kTiles && !kNibbles) chunk_logits(c);
    if constexpr (kCoded)
      for (int i = 0; i < num_runs; ++i) {
        const Run& run = runs[i];
        const F16* of_keys = scales(cache, run.page, false) + run.offset;
        const F16* of_values = scales(cache, run.page, true) + run.offset;
        for (int v = 0; v < run.count * kTile; v += kLanes) {
          store(value_scales + run.first * kTile + v, load(of_values + v));
          const VF key_scale = load(of_keys + v);
          for (int r = 0; r < rows; ++r) {
            float* x = logits + r * kChunk + run.first * kTile + v;
            store(x, load(x) * key_scale);
          }
        }
        for (int t = run.hi; t < run.count * kTile; ++t) value_scales[run.first * kTile + t] = 0.0f;  // may be anything
      }
    if (a.cap > 0.0f) cap_logits(logits, rows, width, a.cap);
    if (a.mode == ScoreMode::log_ema)
      for (int r = 0; r < rows; ++r)
        __builtin_memcpy(a.logits + r * a.stored_stride + chunk * kTile, logits + r * kChunk, width * sizeof(float));
    if (!softmax) continue;
    for (int i = 0; i < num_runs; ++i) {
      const Run& run = runs[i];
      float* of_run = logits + run.first * kTile;
      if (run.front) {
        const float* votes = plane(cache, run.page, kLogVotes) + run.offset;
        for (int v = 0; v < run.hi; v += kLanes) {
          const VF vote = load(votes + v);
          const VI dead = vote == broadcast(-kInfinity);
          for (int r = 0; r < rows; ++r) {
            float* x = of_run + r * kChunk + v;
            store(x, select(dead, vote, load(x) + vote));
          }
        }
      }
      if (run.lo == 0 && run.hi == run.count * kTile && run.entry + run.hi <= first_limit) continue;
      for (int r = 0; r < rows; ++r) {
        const int64_t stop = min64(run.hi, first_limit + r / a.group - run.entry);
        float* x = of_run + r * kChunk;
        for (int64_t t = 0; t < run.lo; ++t) x[t] = -kInfinity;
        for (int64_t t = max64(0, stop); t < run.count * kTile; ++t) x[t] = -kInfinity;
      }
    }
    const bool keeps = a.mode != ScoreMode::none;
    for (int r = 0; r < rows; ++r) {
      float* kept = keeps ? a.stored + r * a.stored_stride + chunk * kTile : nullptr;
      softmax_row<kPairs, kTiles, kCoded>(logits + r * kChunk, width, factor, a.maximum + r, a.sum + r,
                                          a.accumulator + r * acc_stride, a.with_values ? acc_stride : 0,
                                          weights + r * kChunk, kept, value_scales, units + rows + r);
      if (keeps) a.chunk_max[r * a.chunk_stride + chunk / kChunkTiles] = a.maximum[r];
    }
    if (!a.with_values) continue;
    if constexpr (kPacked)
      for (int i = 0; i < num_runs; ++i) {
        ahead.take(static_cast<int64_t>(runs[i].hi) * d / 128);
        if constexpr (!kNibbles) unpack_values(cache, runs[i], unpacked);
      }
#if defined(__AVX512BF16__)
    if constexpr (kNibbles)
      for (int g = 0; g < groups_of(d); ++g)
        for_row_groups<8>(rows, NibbleValues{cache, runs, num_runs, g, weights, a.accumulator, acc_stride});
#endif
#if defined(__AMX_BF16__)
    if constexpr (kTiles) tile_values(c, pairs);
#endif
    if constexpr (!kTiles && !kNibbles) chunk_values(c);
  }
#if defined(__AVX512BF16__)
  if constexpr (kNibbles) {
    const bool in_pairs = way_of(a.dtype, a.query.dtype, rows, a.total_queries) == Way::pairs;
    for (int r = 0; r < rows; ++r)
      order_columns(a.accumulator + r * acc_stride, d, in_pairs, a.dtype == DType::bf16);
  }
#endif
  if constexpr ((kCoded || kPacked) && kWay == Way::floats)
    if (kSplits && a.dtype == DType::bf16)
      for (int r = 0; r < rows; ++r) split_columns(a.accumulator + r * acc_stride, d);
}

template <class T>
void attend_in(const Attend& a) {
  switch (way_of(a.dtype, a.query.dtype, a.num_queries * a.group, a.total_queries)) {
    case Way::tiles: return attend_as<T, kHasTiles ? Way::tiles : Way::floats>(a);
    case Way::pairs: return attend_as<T, kHasPairs ? Way::pairs : Way::floats>(a);
    case Way::floats: break;
  }
  // Codes of 4 bits are multiplied as whole numbers, unless queries have more bits than these.
  if constexpr (std::is_same_v<T, I4> && kHasPairs)
    if (a.query.dtype != DType::f32) return attend_as<I4, Way::pairs>(a);
  attend_as<T, Way::floats>(a);
}

void attend(const Attend& a) {
  if (a.cache->dtype == DType::f32) return attend_as<float, Way::floats>(a);
  if (a.cache->dtype == DType::f16) return attend_as<F16, Way::floats>(a);
  if (a.cache->dtype == DType::e4m3) return attend_in<E4M3>(a);
  if (a.cache->dtype == DType::e5m2) return attend_in<E5M2>(a);
  if (a.cache->dtype == DType::i8) return attend_in<I8>(a);
  if (a.cache->dtype == DType::i4) return attend_in<I4>(a);
  attend_in<BF16>(a);
}

// What values are over when pairs are multiplied.
inline float unit_of(DType dtype) {
  return dtype == DType::e4m3 ? kUnit<E4M3> : dtype == DType::e5m2 ? kUnit<E5M2> : 1.0f;
}

inline void to_bf16(const float* x, int count, BF16* out) {  // count: a multiple of 16
#if defined(__AVX512BF16__)
  for (int e = 0; e < count; e += 16) {
    const __m256bh y = _mm512_cvtneps_pbh(_mm512_loadu_ps(x + e));
    __builtin_memcpy(out + e, &y, sizeof y);
  }
#else
  for (int e = 0; e < count; ++e) out[e] = from_float<BF16>(x[e]);
#endif
}

void finish(const Finish& f) {
  const int rows = f.num_queries * f.group, d = f.cache->head_size;
  const int64_t acc_stride = padded_nonzero(d);
  for (int r = 0; r < rows; ++r) {
    float top = f.maximum[r], total = 0.0f;
    for (int i = 1; i < f.num_pieces; ++i) {
      const float m = f.maximum[i * f.piece_stride + r];
      top = m > top ? m : top;
    }
    if (f.sinks) {
      const float sink = f.sinks[r % f.group];
      top = sink > top ? sink : top;
      total = exp(broadcast(sink - top))[0];
    }
    alignas(64) float sums[kMaxHeadSize];
    const float* sum = f.accumulator + r * acc_stride;
    if (f.num_pieces == 1 && top == f.maximum[r]) {
      total += f.sum[r];
    } else {
      for (int64_t e = 0; e < acc_stride; e += kLanes) store(sums + e, VF{});
      for (int i = 0; i < f.num_pieces; ++i) {
        const VF factor = exp(broadcast(f.maximum[i * f.piece_stride + r] - top));
        total += f.sum[i * f.piece_stride + r] * factor[0];
        if (f.with_values)
          for (int64_t e = 0; e < acc_stride; e += kLanes)
            store(sums + e, load(sums + e) + factor * load(f.accumulator + i * f.piece_stride + r * acc_stride + e));
      }
      sum = sums;
    }
    f.total_maximum[r] = top;
    f.total_sum[r] = total;
    if (!f.with_values) continue;
    const bool in_pairs = way_of(f.cache->dtype, f.query_dtype, rows, f.total_queries) != Way::floats;
    const float value_scale = in_pairs ? f.value_scale * unit_of(f.cache->dtype) : f.value_scale;
    const float inverse = total > 0.0f ? value_scale / total : (total == 0.0f ? 0.0f : total);
    const int64_t token = r / f.group, head = static_cast<int64_t>(f.head) * f.group + r % f.group;
    const int64_t start = token * f.output.token_stride + head * f.output.head_stride;
    const bool is_split = !in_pairs && kSplits && f.cache->dtype == DType::bf16;
    alignas(64) float row[kMaxHeadSize];
    for (int e = 0; e < d; e += 32) {
      const bool is_whole = d - e >= 32;
#if defined(__AVX512BF16__)
      if (in_pairs) {
        __m512 first, second;
        in_order(sum + e, _mm512_set1_ps(inverse), &first, &second);
        _mm512_store_ps(row + e, first);
        if (is_whole) _mm512_store_ps(row + e + 16, second);
        continue;
      }
#endif
      VF columns[32 / kLanes];
      for (int v = 0; v < (is_whole ? 32 : 16) / kLanes; ++v) columns[v] = load(sum + e + v * kLanes);
      if (is_split && is_whole) join_split(columns[0], columns[32 / kLanes - 1], columns, columns + 32 / kLanes - 1);
      for (int v = 0; v < (is_whole ? 32 : 16) / kLanes; ++v) store(row + e + v * kLanes, columns[v] * inverse);
    }
    if (f.output.dtype == DType::f32) __builtin_memcpy(static_cast<float*>(f.output.data) + start, row, d * sizeof(float));
    else if (f.output.dtype == DType::bf16) to_bf16(row, d, static_cast<BF16*>(f.output.data) + start);
    else
      for (int e = 0; e < d; ++e) static_cast<F16*>(f.output.data)[start + e] = from_float<F16>(row[e]);
  }
}

// Lanes whose index from `first` on is below `limit`.
inline VI below(int64_t first, int64_t limit) {
  const int64_t count = max64(-1, min64(kLanes, limit - first));
  return iota() < broadcast(static_cast<float>(count));
}

// Raises the scores of a tile by rows `first`, `first + step`, ...; stored: of row 0, at the tile. What is not a number
// raises nothing.
void raise_tile(const Update& u, float* scores, const float* stored, int first, int step) {
  for (int v = 0; v < kTile; v += kLanes) {
    VF score = load(scores + v);
    for (int r = first; r < u.num_queries * u.group; r += step)
      score = maximum(load(stored + r * u.stored_stride + v) * u.scratch[r], score);
    store(scores + v, score);
  }
}

// The same for each query head that has scores of its own.
void raise_tile(const Update& u, const Tile& t, const float* stored) {
  const int heads = u.score_stride ? u.group : 1;
  for (int g = 0; g < heads; ++g) {
    float* scores = u.scores + g * u.score_stride + t.entry;
    alignas(64) float raised[kTile] = {};  // a chunk begins and ends anywhere in a tile
    for (int k = t.lo; k < t.hi; ++k) raised[k] = scores[k];
    raise_tile(u, raised, stored, g, heads);
    for (int k = t.lo; k < t.hi; ++k) scores[k] = raised[k];
  }
}

inline bool is_all(VI mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(bit_cast<__m512i>(mask)) == 0xffff;
#else
  int32_t all = -1;
  for (int i = 0; i < kLanes; ++i) all &= mask[i];
  return all != 0;
#endif
}

// The statistic of log_ema after a query: log(decay e^past + share mean of e^logit over the heads), from the weights that
// attention has of these logits already. False where they are too small for that, or the statistic too large beside them.
// level: what a sum of 1 is as a logit, and the share.
inline bool log_ema_of_weights(const Update& u, const float* stored, const float* factor, VF level, VF past, VF* score) {
  VF total = {};
  for (int g = 0; g < u.group; ++g) total += load(stored + g * u.stored_stride) * broadcast(factor[g]);
  const VF above = past - level;
  if (!is_all((total >= broadcast(1e-30f)) & (above <= broadcast(80.0f)))) return false;
  *score = level + log(exp(above) + total);
  return true;
}

// scores, aux: the statistics of a tile t; at: where the rows' numbers for the tile are.
void update_tile(const Update& u, const Tile& t, float* scores, float* aux, int64_t at, int64_t num_entries) {
  const int64_t first = t.entry, num_old = num_entries - u.total_queries;
  const float log_decay = u.log_decay, log_share = u.log_share, log_group = u.log_group;
  const float *factor = u.scratch, *levels = u.scratch + u.num_queries * u.group;
  const float* votes = t.front ? plane(*u.cache, t.page, kLogVotes) + t.offset : nullptr;
  const bool all_old = first + kTile <= num_old;  // all queries see them, as in most tiles
  const VI all = VI{} == VI{};
  for (int v = 0; v < kTile; v += kLanes) {
    VF score = load(scores + v), seen = load(aux + v);
    if (!all_old && u.new_start_empty && u.first_query == 0) {
      const VI old = below(first + v, num_old);
      score = select(old, score, VF{});
      seen = select(old, seen, VF{});
    }
    for (int j = 0; j < u.num_queries; ++j) {
      const int64_t row = static_cast<int64_t>(j) * u.group * u.stored_stride + at + v;
      const VI visible = all_old ? all : below(first + v, num_old + u.first_query + j + 1);
      const VF counted = all_old ? broadcast(1.0f) : select(visible, broadcast(1.0f), VF{});
      if (u.mode != ScoreMode::log_ema) {
        VF total = {};
        for (int g = 0; g < u.group; ++g)
          total += load(u.stored + row + g * u.stored_stride) * broadcast(factor[j * u.group + g]);
        score = score * u.decay + total;
        if (u.mode == ScoreMode::mean) seen += counted;
        continue;
      }
      const VF past = select(seen > VF{}, score + log_decay, broadcast(-kInfinity));
      seen += counted;
      if (all_old && u.stored) {
        const VF vote = votes && v < t.hi ? load(votes + v) : VF{};
        if (log_ema_of_weights(u, u.stored + row, factor + j * u.group, broadcast(levels[j]) - vote, past, &score)) continue;
      }
      const float* x = u.logits + row;
      VF top = load(x), total = {};
      for (int g = 1; g < u.group; ++g) top = maximum(top, load(x + g * u.stored_stride));
      for (int g = 0; g < u.group; ++g) total += exp(load(x + g * u.stored_stride) - top);
      const VF level = top + log(total) - log_group;
      score = select(visible, log_add_exp(past, level + log_share), score);
    }
    if (u.mode == ScoreMode::log_ema) score = select(seen > VF{}, score, VF{});
    store(scores + v, score);
    store(aux + v, seen);
  }
}

void update(const Update& u) {
  const PagedKVCache& cache = *u.cache;
  const Tiles tiles(cache, u.segments, u.head);
  const int rows = u.num_queries * u.group;
  const int64_t num_entries = tiles.num_entries();
  for (int64_t i = u.tile_begin; i < u.tile_end; ++i) {
    const bool is_new_chunk = i == u.tile_begin || i % kChunkTiles == 0;
    if (u.mode == ScoreMode::log_ema && u.stored && is_new_chunk)
      for (int j = 0; j < u.num_queries; ++j) {
        const float* maxima = u.chunk_max + j * u.group * u.chunk_stride + i / kChunkTiles;
        float top = maxima[0];
        for (int g = 1; g < u.group; ++g) top = maxima[g * u.chunk_stride] > top ? maxima[g * u.chunk_stride] : top;
        for (int g = 0; g < u.group; ++g)
          u.scratch[j * u.group + g] = exp(broadcast(maxima[g * u.chunk_stride] - top))[0];
        u.scratch[rows + j] = top + u.log_share - u.log_group;
      }
    if (u.mode != ScoreMode::log_ema && is_new_chunk)
      for (int r = 0; r < rows; ++r) {
        const float m = u.chunk_max[r * u.chunk_stride + i / kChunkTiles];
        u.scratch[r] = exp(broadcast(m - u.maximum[r]))[0] / u.sum[r] * (u.weights ? u.weights[r / u.group] : 1.0f);
      }
    const Tile t = tiles[i];
    if (u.mode == ScoreMode::largest) {
      raise_tile(u, t, u.stored + i * kTile);
      continue;
    }
    float* scores = u.scores ? u.scores + t.entry : plane(cache, t.page, kScores) + t.offset;
    float* aux = u.scores ? u.aux + t.entry : plane(cache, t.page, kAux) + t.offset;
    if (t.lo == 0 && t.hi == kTile) {
      update_tile(u, t, scores, aux, i * kTile, num_entries);
      continue;
    }
    alignas(64) float some_scores[kTile] = {}, some_aux[kTile] = {};
    for (int k = t.lo; k < t.hi; ++k) some_scores[k] = scores[k], some_aux[k] = aux[k];
    update_tile(u, t, some_scores, some_aux, i * kTile, num_entries);
    for (int k = t.lo; k < t.hi; ++k) scores[k] = some_scores[k], aux[k] = some_aux[k];
  }
}

// The products of some keys, the sources, with chunks of others: by tiles where there are.
template <class Q>
class Products {
 public:
  static int64_t scratch(int64_t rows, int64_t head_size) {
    return rows_of_tiles(rows) * (kChunk + padded_nonzero(head_size)) + 16;
  }

  Products(const void* sources, int rows, [[maybe_unused]] int head_size, float* scratch)
      : sources_(static_cast<const Q*>(sources)), rows_(rows), products_(scratch) {
#if defined(__AMX_BF16__)
    if constexpr (kTiles) {
      const int64_t stride = padded_nonzero(head_size);
      rows_ = static_cast<int>(rows_of_tiles(rows));
      Q* padded = reinterpret_cast<Q*>(products_ + rows_ * kChunk);
      for (int64_t i = 0; i < rows_ * stride; ++i) padded[i] = Q{};
      for (int r = 0; r < rows; ++r) __builtin_memcpy(padded + r * stride, sources_ + r * head_size, head_size * sizeof(Q));
      sources_ = padded;
      in_use_.emplace();
    }
#endif
  }

  // The chunk is without keys so far; its logits will be the products.
  template <class T>
  Chunk<T, Q> chunk(const Run* runs, int head_size, int64_t block_size) {
    return {runs, 0, rows_, head_size, static_cast<int>(block_size), {}, {}, sources_, 1.0f, products_, nullptr, nullptr, 0, &none_};
  }

  template <class T>
  void multiply(const Chunk<T, Q>& c) const {
#if defined(__AMX_BF16__)
    if constexpr (kTiles) return tile_logits(c, padded_nonzero(c.head_size));
#endif
    chunk_logits(c);
  }

 private:
  static constexpr bool kTiles = kHasTiles && sizeof(Q) == 2;
  static int64_t rows_of_tiles(int64_t rows) { return kTiles ? in_sixteens(rows) : rows; }
  const Q* sources_;
  int rows_;
  float* products_;
  Prefetcher none_;
#if defined(__AMX_BF16__)
  std::optional<TilesInUse> in_use_;
#endif
};

int64_t similar_scratch(int64_t num_sources, int64_t head_size) {
  return num_sources * 2 * kTile + Products<BF16>::scratch(num_sources, head_size);
}

template <class Q>
void similar_as(const Similar& x) {
  const int rows = x.num_sources, d = x.head_size;
  const int64_t num_tiles = (x.num_targets + kTile - 1) / kTile;
  float* best = x.scratch;  // best and where: kTile candidates per source
  int32_t* where = reinterpret_cast<int32_t*>(best + rows * kTile);
  Products<Q> products(x.sources, rows, d, best + 2 * rows * kTile);
  for (int i = 0; i < rows * kTile; ++i) best[i] = -kInfinity, where[i] = 0;
  for (int64_t first = 0; first < num_tiles; first += kChunkTiles) {
    Run runs[kChunkTiles];
    Chunk<Q, Q> c = products.template chunk<Q>(runs, d, kTile);
    for (; c.num_runs < kChunkTiles && first + c.num_runs < num_tiles; ++c.num_runs) {
      runs[c.num_runs] = Run{c.num_runs, 1, 0, kTile, {}, 0, 0, false};
      c.keys[c.num_runs] = static_cast<const Q*>(x.targets) + (first + c.num_runs) * kTile * d;
    }
    products.multiply(c);
    for (int i = 0; i < c.num_runs; ++i)
      for (int v = 0; v < kTile; v += kLanes) {
        const int32_t target = static_cast<int32_t>((first + i) * kTile + v);
        if (target >= x.num_targets) break;
        const VF inverse = load(x.inverse + target);
        const VI in_range = iota() < broadcast(static_cast<float>(min64(kLanes, x.num_targets - target)));
        for (int r = 0; r < rows; ++r) {
          const VF product = load(c.logits + r * kChunk + i * kTile + v) * inverse;
          float* b = best + r * kTile + v;
          const VF old = load(b), old_where = load(reinterpret_cast<float*>(where) + r * kTile + v);
          const VI better = (product > old) & in_range;
          store(b, select(better, product, old));
          store(reinterpret_cast<float*>(where) + r * kTile + v,
                select(better, bit_cast<VF>(VI{} + target / kTile * kTile), old_where));
        }
      }
  }
  for (int r = 0; r < rows; ++r) {
    x.best[r] = -kInfinity;
    x.where[r] = 0;
    for (int lane = 0; lane < kTile; ++lane) {
      const float candidate = best[r * kTile + lane];
      const int32_t at = where[r * kTile + lane] + lane;
      if (candidate > x.best[r] || (candidate == x.best[r] && at < x.where[r])) {
        x.best[r] = candidate;
        x.where[r] = at;
      }
    }
  }
}

void similar(const Similar& x) {
#if defined(__AVX512BF16__)
  if (x.in_pairs) return similar_as<BF16>(x);
#endif
  similar_as<float>(x);
}

int64_t similar_entries_scratch(int64_t num_sources, int64_t head_size) {
  return num_sources * 2 * kLanes + Products<BF16>::scratch(num_sources, head_size);
}

// The lengths of a tile's keys: of each, one square is added after the other, as `SumOfSquares` says.
template <class T>
inline void lengths_of(const T* keys, int64_t stride, int head_size, float* out) {
  if constexpr (sizeof(T) == sizeof(float)) {
    typename SumOfSquares<T>::type squares[kTile] = {};
    for (int e = 0; e < head_size; ++e, keys += stride)
      for (int k = 0; k < kTile; ++k) squares[k] += static_cast<double>(keys[k]) * keys[k];
    for (int k = 0; k < kTile; ++k) out[k] = static_cast<float>(squares[k]);
  } else {
    VF squares[kTile / kLanes] = {};  // sums that do not wait for each other
    for (int e = 0; e < head_size; ++e, keys += stride)
      for (int v = 0; v < kTile / kLanes; ++v) {
        const VF key = load(keys + v * kLanes);
        squares[v] += key * key;
      }
    for (int v = 0; v < kTile / kLanes; ++v) store(out + v * kLanes, squares[v]);
  }
  for (int k = 0; k < kTile; ++k) out[k] = __builtin_sqrtf(out[k]);
}

template <class T, class Q>
void similar_entries_as(const SimilarEntries& x) {
  const Tiles tiles(*x.cache, x.segments, x.head);
  const int rows = x.num_sources, d = x.cache->head_size, bs = x.cache->block_size;
  // Of each source kLanes candidates, one per lane of the tiles.
  float *best = x.scratch, *ranks = best + rows * kLanes;
  Products<Q> products(x.sources, rows, d, ranks + rows * kLanes);
  for (int i = 0; i < rows * kLanes; ++i) best[i] = -kInfinity;
  for (int i = 0; i < rows; ++i) store(ranks + i * kLanes, bit_cast<VF>(VI{} + INT32_MAX));
  for (int64_t first = 0; first < tiles.count; first += kChunkTiles) {
    Run runs[kChunkTiles];
    Chunk<T, Q> c = products.template chunk<T>(runs, d, bs);
    c.num_runs = find_runs(tiles, first, min64(first + kChunkTiles, tiles.count), runs);
    for (int i = 0; i < c.num_runs; ++i)
      c.keys[i] = reinterpret_cast<const T*>(runs[i].page.rows) + runs[i].offset;
    products.multiply(c);
    for (int i = 0; i < c.num_runs; ++i) {
      const Run& run = runs[i];
      alignas(64) float lengths[kChunk];
      for (int start = 0; start < run.count * kTile; start += kTile) lengths_of(c.keys[i] + start, bs, d, lengths + start);
      for (int start = 0; start < run.count * kTile; start += kLanes) {
        alignas(64) int32_t rank[kLanes];
        if (run.lo <= start && start + kLanes <= run.hi) {
          __builtin_memcpy(rank, x.ranks + run.entry + start, sizeof rank);
        } else {
          for (int k = 0; k < kLanes; ++k) {
            const bool live = run.lo <= start + k && start + k < run.hi;
            rank[k] = live ? x.ranks[run.entry + start + k] : INT32_MAX;
          }
        }
        const VF inverse = 1.0f / maximum(load(lengths + start), broadcast(1e-12f));
        const VI ours = bit_cast<VI>(load(reinterpret_cast<const float*>(rank)));
        const VI usable = ours != VI{} + INT32_MAX;
        for (int r = 0; r < rows; ++r) {
          const VF product = load(c.logits + r * kChunk + run.first * kTile + start) * inverse;
          const VF old = load(best + r * kLanes), old_rank = load(ranks + r * kLanes);
          const VI better = usable & ((product > old) | ((product == old) & (ours < bit_cast<VI>(old_rank))));
          store(best + r * kLanes, select(better, product, old));
          store(ranks + r * kLanes, select(better, bit_cast<VF>(ours), old_rank));
        }
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    x.best[r] = -kInfinity;
    x.where[r] = INT32_MAX;
    for (int lane = 0; lane < kLanes; ++lane) {
      const float candidate = best[r * kLanes + lane];
      const int32_t rank = bit_cast<int32_t>(ranks[r * kLanes + lane]);
      if (candidate > x.best[r] || (candidate == x.best[r] && rank < x.where[r])) {
        x.best[r] = candidate;
        x.where[r] = rank;
      }
    }
  }
}

void similar_entries(const SimilarEntries& x) {
#if defined(__AVX512BF16__)
  if (x.in_pairs) return similar_entries_as<BF16, BF16>(x);
#endif
  if (x.cache->dtype == DType::f32) return similar_entries_as<float, float>(x);
  if (x.cache->dtype == DType::f16) return similar_entries_as<F16, float>(x);
  if (x.cache->dtype == DType::e4m3) return similar_entries_as<E4M3, float>(x);
  if (x.cache->dtype == DType::e5m2) return similar_entries_as<E5M2, float>(x);
  similar_entries_as<BF16, float>(x);
}

// Queries go together whose weights for all entries the second-level cache holds with the keys.
constexpr int kFuseRows = 32;

inline int64_t fuse_rows(int64_t group, int64_t num_queries) {
  return group * min64(num_queries, max64(1, kFuseRows / group));
}

inline int64_t fuse_slots(int64_t num_tiles) { return (num_tiles + kChunkTiles - 1) / kChunkTiles * kChunk; }

int64_t fuse_scratch(int64_t group, int64_t num_queries, int64_t head_size, int64_t num_tiles) {
  const int64_t rows = in_sixteens(fuse_rows(group, num_queries)), slots = fuse_slots(num_tiles);
  head_size = padded_nonzero(head_size);
  // FuseKeys, FuseScratch and the queries, each from a multiple of 16 on.
  return slots * (3 + rows) + (kHasTiles ? slots * head_size / 2 : 0) + slots / kChunk +
         rows * (head_size + kChunk) + group + 9 * 16;
}

// What the queries of a KV head have in common.
struct FuseKeys {
  const Tiles tiles;
  int64_t slots;
  float* votes;
  int32_t* positions;  // INT32_MAX where no query sees anything
  int32_t* latest;     // per chunk: of its positions, or INT32_MAX where there are votes
  BF16* pairs;         // of all tiles, where there are tiles
};

// fused: [slots], the result. Of the rows that go together, padded to tiles: logits, then weights, [rows, slots]; logits of
// a chunk, [rows, kChunk]. shares: [group], one over the sums of a query's weights.
struct FuseScratch {
  float *fused, *weights, *logits, *shares;
};

// Adds what `rows` queries and their heads give to the slots; row r is query r / group, query head r % group.
template <class T, class Q>
void fuse_rows_as(const Fuse& f, const FuseKeys& keys, const Q* q, int rows, const int64_t* query_positions,
                  const FuseScratch x) {
  const int64_t slots = keys.slots, width = keys.tiles.count * kTile;
  const int d = f.cache->head_size, bs = f.cache->block_size;
  constexpr bool kTiles = kHasTiles && sizeof(Q) == 2;
  // Logits are over a positive `factor`, which multiplies their difference from the largest.
  float factor = 1.0f;
#if defined(__AMX_BF16__)
  if constexpr (kTiles) {
    const int64_t d32 = padded_nonzero(d);
    for (int64_t i = 0; i < keys.tiles.count; ++i)
      tile_product<false>(q, d32, keys.pairs + i * kTile * d32, 2 * kTilePairs, static_cast<int>(d32 / 32),
                          static_cast<int>(in_sixteens(rows)), x.weights + i * kTile, slots);
    if (f.cap == 0.0f && f.scale > 0.0f) factor = f.scale;
    else
      for (int64_t i = 0; i < rows * slots; i += kLanes) store(x.weights + i, load(x.weights + i) * f.scale);
  }
#endif
  if constexpr (!kTiles)
    for (int64_t first = 0; first < keys.tiles.count; first += kChunkTiles) {
      Run runs[kChunkTiles];
      Prefetcher none;
      Chunk<T, Q> c{runs, 0, rows, d, bs, {}, {}, q, f.scale, x.logits, nullptr, nullptr, 0, &none};
      const int64_t last = min64(first + kChunkTiles, keys.tiles.count);
      c.num_runs = find_runs(keys.tiles, first, last, runs);
      for (int i = 0; i < c.num_runs; ++i)
        c.keys[i] = reinterpret_cast<const T*>(runs[i].page.rows) + runs[i].offset;
      chunk_logits(c);
      for (int r = 0; r < rows; ++r)
        __builtin_memcpy(x.weights + r * slots + first * kTile, x.logits + r * kChunk,
                         (last - first) * kTile * sizeof(float));
    }
  if (f.cap > 0.0f) cap_logits(x.weights, rows, static_cast<int>(width), f.cap, slots);
  const VF inverse = broadcast(1.0f / factor), exponent = broadcast(factor * 1.44269504f);
  // One query after the other, so that the first-level cache holds its weights until they are added up.
  for (int first = 0; first < rows; first += f.group) {
    const int32_t seen = static_cast<int32_t>(max64(-1, min64(query_positions[first / f.group], INT32_MAX - 1)));
    const VI limit = VI{} + seen;
    for (int g = 0; g < f.group; ++g) {
      float* weights = x.weights + (first + g) * slots;
      VF largest[2] = {broadcast(-kInfinity), broadcast(-kInfinity)};
      for (int64_t start = 0; start < width; start += kChunk) {
        const int64_t stop = min64(start + kChunk, width);
        const bool sees_all = keys.latest[start / kChunk] <= seen;
        for (int64_t v = start; !sees_all && v < stop; v += kLanes) {
          const VI position = bit_cast<VI>(load(reinterpret_cast<const float*>(keys.positions) + v));
          const VF logit = load(weights + v) + load(keys.votes + v) * inverse;
          store(weights + v, select(position <= limit, logit, broadcast(-kInfinity)));
        }
        for (int64_t v = start; v < stop; v += 2 * kLanes)
          for (int i = 0; i < 2; ++i) largest[i] = maximum(largest[i], load(weights + v + i * kLanes));
      }
      float top = horizontal_max(maximum(largest[0], largest[1]));
      const float sink = f.sinks ? f.sinks[g] / factor : -kInfinity;
      top = sink > top ? sink : top;
      if (top == -kInfinity) top = 0.0f;  // a query that sees nothing
      const VF tops = broadcast(top);
      // One sum, so that it is the same to the last bit wherever dead entries lie between the others.
      VF total = {};
      for (int64_t v = 0; v < width; v += kLanes) {
        const VF weight = exp2((load(weights + v) - tops) * exponent);
        total += weight;
        store(weights + v, weight);
      }
      const float sum = horizontal_sum(total) + exp2((broadcast(sink) - tops) * exponent)[0];
      x.shares[g] = sum == 0.0f ? 0.0f : 1.0f / sum;
    }
    for (int64_t v = 0; v < width; v += kLanes) {
      VF of_query = {};
      for (int g = 0; g < f.group; ++g) of_query += load(x.weights + (first + g) * slots + v) * broadcast(x.shares[g]);
      const VF before = load(x.fused + v);
      store(x.fused + v, f.largest ? maximum(before, of_query) : before + of_query);
    }
  }
}

template <class T, class Q>
void fuse_as(const Fuse& f) {
  constexpr bool kPairs = sizeof(Q) == 2, kTiles = kPairs && kHasTiles;
  const Tiles tiles(*f.cache, f.segments, f.head);
  const int64_t slots = fuse_slots(tiles.count), at_once = fuse_rows(f.group, f.num_queries) / f.group;
  const int d = f.cache->head_size;
  const int64_t q_stride = kTiles ? padded_nonzero(d) : d, padded_rows = in_sixteens(at_once * f.group);
  float* next = f.scratch;
  const auto take = [&](int64_t floats) {
    float* start = next;
    next += in_sixteens(floats);
    return start;
  };
  FuseKeys keys{tiles, slots, take(slots), reinterpret_cast<int32_t*>(take(slots)),
                reinterpret_cast<int32_t*>(take(slots / kChunk)),
                reinterpret_cast<BF16*>(take(kTiles ? slots * q_stride / 2 : 0))};
  const FuseScratch x{take(slots), take(padded_rows * slots), take(padded_rows * kChunk), take(f.group)};
  Q* q = reinterpret_cast<Q*>(take(padded_rows * q_stride));
  for (int64_t i = 0; i < slots; ++i) keys.votes[i] = 0.0f, x.fused[i] = 0.0f, keys.positions[i] = INT32_MAX;
  for (int64_t i = 0; i < tiles.count; ++i) {
    const Tile t = tiles[i];
    for (int64_t k = t.lo; k < t.hi; ++k) {
      const int64_t position = f.positions[t.entry + k];
      keys.votes[i * kTile + k] = f.log_votes[t.entry + k];
      keys.positions[i * kTile + k] = static_cast<int32_t>(position < 0 ? INT32_MAX : min64(position, INT32_MAX));
    }
  }
  for (int64_t chunk = 0; chunk < slots / kChunk; ++chunk) {
    int32_t latest = 0;
    for (int64_t i = chunk * kChunk; i < min64((chunk + 1) * kChunk, tiles.count * kTile); ++i) {
      const int32_t position = keys.votes[i] == 0.0f ? keys.positions[i] : INT32_MAX;
      latest = position > latest ? position : latest;
    }
    keys.latest[chunk] = latest;
  }
#if defined(__AMX_BF16__)
  std::optional<TilesInUse> tiles_in_use;
  if constexpr (kTiles) {
    tiles_in_use.emplace();
    Prefetcher none;
    for (int64_t first = 0; first < tiles.count; first += kChunkTiles) {
      Run runs[kChunkTiles];
      Chunk<T, Q> c{runs, 0, 0, d, f.cache->block_size, {}, {}, q, 1.0f, x.logits, nullptr, nullptr, 0, &none};
      c.num_runs = find_runs(tiles, first, min64(first + kChunkTiles, tiles.count), runs);
      for (int i = 0; i < c.num_runs; ++i)
        c.keys[i] = reinterpret_cast<const T*>(runs[i].page.rows) + runs[i].offset;
      for_key_tiles(c, [&](const T* k, int i) { pairs_of_keys(c, k, keys.pairs + (first + i) * kTile * q_stride); });
    }
    for (int64_t i = 0; i < padded_rows * q_stride; ++i) q[i] = Q{};
  }
#endif
  for (int64_t first = 0; first < f.num_queries; first += at_once) {
    const int64_t some = min64(at_once, f.num_queries - first);
    for (int64_t j = 0; j < some; ++j)
      for (int64_t g = 0; g < f.group; ++g) {
        const int64_t query = (g * f.num_queries + first + j) * d;
        Q* to = q + (j * f.group + g) * q_stride;
        // As in attend: pairs are multiplied as they are, and their sum is scaled.
        if (kPairs && f.queries.dtype == DType::bf16)
          __builtin_memcpy(to, static_cast<const BF16*>(f.queries.data) + query, d * sizeof(BF16));
        else
          for (int e = 0; e < d; ++e) to[e] = from_float<Q>(element(f.queries, query + e) * (kPairs ? 1.0f : f.scale));
      }
    fuse_rows_as<T, Q>(f, keys, q, static_cast<int>(some * f.group), f.query_positions + first, x);
  }
  for (int64_t i = 0; i < tiles.count; ++i) {
    const Tile t = tiles[i];
    for (int64_t k = t.lo; k < t.hi; ++k) f.fused[t.entry + k] = x.fused[i * kTile + k];
  }
}

void fuse(const Fuse& f) {
#if defined(__AVX512BF16__)
  if (f.cache->dtype == DType::bf16) {
    if (f.queries.dtype == DType::bf16) return fuse_as<BF16, BF16>(f);
  }
#endif
  if (f.cache->dtype == DType::f32) return fuse_as<float, float>(f);
  if (f.cache->dtype == DType::f16) return fuse_as<F16, float>(f);
  if (f.cache->dtype == DType::e4m3) return fuse_as<E4M3, float>(f);
  if (f.cache->dtype == DType::e5m2) return fuse_as<E5M2, float>(f);
  fuse_as<BF16, float>(f);
}

// Keys are searched bit by bit, from `result` 0, with the sign bit flipped so that it is the smallest: how many keys are
// below what the result would be with this bit set? A pass over keys that the first-level cache holds takes less time
// than moving any of them.
inline int32_t key_of(uint32_t result) { return static_cast<int32_t>(result ^ 0x80000000u); }

int64_t count_below(const int32_t* keys, int64_t n, int32_t limit) {
  const VI limits = VI{} + limit;
  VI sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) {
      VI x;
      __builtin_memcpy(&x, keys + i + j * kLanes, sizeof x);
      sums[j] -= x < limits;
    }
  int64_t below = horizontal_sum(sums[0] + sums[1] + (sums[2] + sums[3]));
  for (; i < n; ++i) below += keys[i] < limit;
  return below;
}

int32_t kth_smallest(const int32_t* keys, int64_t n, int64_t k) {
  uint32_t differences = 0;
  for (int64_t i = 0; i < n; ++i) differences |= static_cast<uint32_t>(keys[i] ^ keys[0]);
  if (differences == 0) return keys[0];
  const int highest = 31 - __builtin_clz(differences);
  // Which all keys have in common.
  uint32_t result = (static_cast<uint32_t>(keys[0]) ^ 0x80000000u) & ~((2u << highest) - 1);
  for (int bit = highest; bit >= 0; --bit) {
    const uint32_t candidate = result | 1u << bit;
    if (count_below(keys, n, key_of(candidate)) <= k) result = candidate;
  }
  return key_of(result);
}

// An integer in the order of the numbers, where -0 is 0.
inline int32_t ordered(float x) {
  const int32_t bits = bit_cast<int32_t>(x + 0.0f);
  return bits ^ (bits >> 31 & 0x7fffffff);
}

bool mark_largest(const Ranking& r) {
  int32_t* keys = r.keys;
  if (r.numbers) {
    for (int64_t i = 0; i < r.n; ++i) keys[i] = ordered(r.numbers[i]);
  } else {
    int64_t beyond = 0;
    for (int64_t i = 0; i < r.n; ++i) {
      const int64_t x = r.integers[i];
      keys[i] = x == INT64_MAX ? INT32_MAX : static_cast<int32_t>(x);
      beyond |= (x ^ keys[i]) & -static_cast<int64_t>(x != INT64_MAX);
      beyond |= x == INT32_MAX;
    }
    if (beyond) return false;
  }
  if (r.first) {
    const int32_t most = ordered(-kLowest), least = ordered(kLowest);
    for (int64_t i = 0; i < r.n; ++i) {
      int32_t key = keys[i] < least ? least : keys[i];
      key = key > most ? most : key;
      key = r.numbers[i] != r.numbers[i] ? least : key;
      key = r.first[i] ? INT32_MAX : key;
      keys[i] = r.possible[i] ? key : INT32_MIN;
    }
  }
  const int32_t threshold = kth_smallest(keys, r.n, r.n - r.count);
  for (int64_t i = 0; i < r.n; ++i) r.mask[i] = keys[i] >= threshold;
  for (int64_t i = r.n - 1, surplus = r.n - count_below(keys, r.n, threshold) - r.count; surplus > 0; --i)
    if (keys[i] == threshold) r.mask[i] = 0, --surplus;
  return true;
}

// products: [count, width], of rows, [count, size], with columns, [size, width]; width: whole vectors.
void multiply(const float* rows, int64_t count, const float* columns, int64_t size, int64_t width, float* products) {
  constexpr int kRows = 8;
  for (int64_t first = 0; first < count; first += kRows) {
    const float* row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = rows + min64(first + r, count - 1) * size;
    for (int64_t v = 0; v < width; v += kLanes) {
      VF sums[kRows] = {};
      for (int64_t e = 0; e < size; ++e) {
        const VF column = load(columns + e * width + v);
        for (int r = 0; r < kRows; ++r) sums[r] += row[r][e] * column;
      }
      for (int r = 0; r < kRows && first + r < count; ++r) store(products + (first + r) * width + v, sums[r]);
    }
  }
}

// The first of `count` numbers that is the largest, or the first that is none. count: whole vectors.
int64_t first_largest(const float* x, int64_t count) {
  VF largest = load(x);
  VI is_none = largest != largest;
  for (int64_t i = kLanes; i < count; i += kLanes) {
    const VF numbers = load(x + i);
    is_none |= numbers != numbers;
    largest = maximum(largest, numbers);
  }
  int32_t any = 0;
  for (int lane = 0; lane < kLanes; ++lane) any |= is_none[lane];
  const float top = horizontal_max(largest);
  int64_t first = 0;
  while (first < count && (any ? x[first] == x[first] : x[first] != top)) ++first;
  return first;
}

inline int64_t in_vectors(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

int64_t join_scratch(int64_t num_slots, int64_t num_sources, int64_t head_size) {
  const int64_t width = in_vectors(num_sources);
  return width * (head_size + num_slots + num_sources) + num_sources * in_vectors(num_slots);
}

void join_slots(const Join& x) {
  const int64_t m = x.num_sources, d = x.head_size, width = in_vectors(m), slots = in_vectors(x.num_slots);
  float *columns = x.scratch, *of_slots = columns + d * width, *between = of_slots + x.num_slots * width,
        *products = between + m * width;  // [m, slots]
  for (int64_t e = 0; e < d; ++e)
    for (int64_t i = 0; i < width; ++i) columns[e * width + i] = i < m ? x.joining[i * d + e] : 0.0f;
  multiply(x.keys, x.num_slots, columns, d, width, of_slots);
  multiply(x.joining, m, columns, d, width, between);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t slot = 0; slot < slots; ++slot)
      products[i * slots + slot] =
          slot < x.num_slots && x.slot_weights[slot] > 0.0f ? of_slots[slot * width + i] : -kInfinity;
  for (int64_t i = 0; i < m; ++i) {
    const int64_t best = x.joined[i] = first_largest(products + i * slots, slots);
    const float weight = x.source_weights[i], total = x.slot_weights[best] += weight;
    const float share = weight / (total > 1.0f ? total : 1.0f);
    for (int64_t j = i + 1; j < m; ++j) {
      float& product = products[j * slots + best];
      product += share * (between[i * width + j] - product);
    }
  }
}

// 1 - e^x for x <= 0, to a few ulp: by its series where e^x is near 1.
inline VF one_less_exp(VF x) {
  VF p = x * (1.0f / 720) + (1.0f / 120);
  p = p * x + (1.0f / 24);
  p = p * x + (1.0f / 6);
  p = p * x + 0.5f;
  p = p * x + 1.0f;
  return select(x > broadcast(-0.25f), -x * p, 1.0f - exp(x));
}

void log_contributions(const Contributions& c) {
  const VF rate = broadcast(c.log_decay), none = broadcast(-kInfinity);
  const auto at = [&](VF votes, VF score, VF count) {
    return select(count > VF{}, votes + (score - log(one_less_exp(count * rate))), none);
  };
  int64_t i = 0;
  for (; i + kLanes <= c.n; i += kLanes) store(c.out + i, at(load(c.log_votes + i), load(c.scores + i), load(c.counts + i)));
  for (; i < c.n; ++i)
    c.out[i] = at(broadcast(c.log_votes[i]), broadcast(c.scores[i]), broadcast(c.counts[i]))[0];
}

void split(const Split& s) {
  for (int64_t i = 0; i < s.num_heads * s.n; ++i) s.keys[i] = ordered(s.shares[i]);
  // Of each head, those that are not below the limit, as far as it may have them; returns how many that is.
  const auto not_below = [&](int32_t limit, int64_t* counts) {
    int64_t total = 0;
    for (int64_t h = 0; h < s.num_heads; ++h) {
      const int64_t count = s.n - count_below(s.keys + h * s.n, s.n, limit);
      total += counts[h] = count < s.least ? s.least : count > s.most ? s.most : count;
    }
    return total;
  };
  uint32_t result = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t candidate = result | 1u << bit;
    const int64_t total = not_below(key_of(candidate), s.counts);
    if (total == s.total) return;
    if (total > s.total) result = candidate;
  }
  // No limit lets in as many as there is room for: `result` is the largest that lets in more.
  not_below(key_of(result), s.level);
  int64_t left = s.total - not_below(key_of(result + 1), s.counts);
  for (; left > 0; --left) {
    int64_t next = -1;
    for (int64_t h = 0; h < s.num_heads; ++h)
      if (s.counts[h] < s.level[h] && (next < 0 || s.counts[h] < s.counts[next])) next = h;
    ++s.counts[next];
  }
}

#include "norms.h"

}  // namespace

#define KVM_TEXT_(x) #x
#define KVM_TEXT(x) KVM_TEXT_(x)

const Kernels& kernels() {
  static constexpr Kernels table = {KVM_TEXT(KVM_LEVEL), kHasPairs, kHasTiles, attend_scratch, attend,
                                    finish, update, similar_scratch, similar,
                                    similar_entries_scratch, similar_entries, fuse_scratch, fuse, repeats_scratch, newest_repeats,
                                    norms_scratch, norms,
                                    mark_largest, split, join_scratch, join_slots, log_contributions};
  return table;
}

}  // namespace KVM_LEVEL
}  // namespace kvmerge
