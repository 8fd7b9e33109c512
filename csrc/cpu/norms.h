// Sums of absolute products of values with rows of weights (see Norms in kernels.h). Included into each level's own
// namespace.
//
// Products never reach memory beyond the first-level cache, which holds a chunk of weights while all values go past it.

constexpr int64_t kWeightBytes = 32 << 10;  // of a chunk

// What of `rows` makes a chunk: a multiple of 32.
inline int64_t chunk_rows(int64_t head_size, int64_t item_size) {
  return max64(32, kWeightBytes / (head_size * item_size) / 32 * 32);
}

// Adds the sums over N rows to those of a tile of values [head_size, kTile].
struct FloatNorms {
  const float* values;
  const float* weights;
  int d;
  float* sums;
  template <int N>
  inline void rows(int first) const {
    for (int t = 0; t < kTile; t += kVectors * kLanes) {
      VF product[N][kVectors] = {};
      for (int i = 0; i < d; ++i) {
        VF value[kVectors];
        for (int v = 0; v < kVectors; ++v) value[v] = load(values + i * kTile + t + v * kLanes);
        for (int r = 0; r < N; ++r) {
          const VF weight = broadcast(weights[(first + r) * d + i]);
          for (int v = 0; v < kVectors; ++v) product[r][v] += weight * value[v];
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        VF sum = load(sums + t + v * kLanes);
        for (int r = 0; r < N; ++r) sum += bit_cast<VF>(bit_cast<VU>(product[r][v]) & 0x7fffffffu);
        store(sums + t + v * kLanes, sum);
      }
    }
  }
};

template <class T>
void float_norms(const Norms& x) {
  const int d = x.head_size;
  const int64_t num_tiles = (x.n + kTile - 1) / kTile, step = chunk_rows(d, 4);
  float *values = x.scratch, *weights = values + num_tiles * kTile * d;
  for (int64_t i = 0; i < num_tiles * kTile; ++i)
    for (int e = 0; e < d; ++e)
      values[i / kTile * kTile * d + e * kTile + i % kTile] = i < x.n ? x.values[i * d + e] : 0.0f;
  const T* from = static_cast<const T*>(x.weights);
  for (int64_t row = 0; row < x.num_rows; row += step) {
    const int64_t rows = min64(step, x.num_rows - row);
    for (int64_t i = 0; i < rows * d; ++i) weights[i] = to_float(from[row * d + i]);
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      float sums[kTile] = {};
      for_row_groups<kRowsAtOnce>(static_cast<int>(rows), FloatNorms{values + tile * kTile * d, weights, d, sums});
      for (int64_t i = tile * kTile; i < min64(x.n, (tile + 1) * kTile); ++i) x.sums[i] += sums[i % kTile];
    }
  }
}

#if defined(__AMX_BF16__)
constexpr int kTerms = 3;  // bfloat16 whose sum is a float32

// Bits of the first `terms` of them of 16 numbers. Each is what rounding towards zero leaves, so that the next is exact.
inline void split_terms(__m512 x, int terms, __m512i* out) {
  const __m512i most = _mm512_set1_epi32(INT32_MIN >> 15);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __mmask16 is_finite = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(kInfinity), _CMP_LT_OQ);
  for (int t = 0; t < terms; ++t) {
    const __m512 term = bit_cast<__m512>(_mm512_and_si512(bit_cast<__m512i>(x), most));
    out[t] = bit_cast<__m512i>(term);
    if (t == 0) out[0] = _mm512_mask_mov_epi32(out[0], is_nan, _mm512_set1_epi32(0x7fc00000));
    x = _mm512_maskz_sub_ps(is_finite, x, term);
  }
}

// Up to 16 values as right factors: terms after terms, tiles of 32 numbers, pairs of 16 values in a row.
inline void pairs_of_values(const float* values, int64_t count, int d, int terms, BF16* out) {
  const __m512i rows = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
  for (int i = 0; i < d; i += 32) {
    alignas(64) __m256i numbers[kTerms][32] = {};  // in halves of 32 of a value
    for (int64_t v = 0; v < count; ++v)
      for (int half = 0; half < 2; ++half) {
        __m512i bits[kTerms];
        split_terms(_mm512_loadu_ps(values + v * d + i + half * 16), terms, bits);
        for (int t = 0; t < terms; ++t)
          numbers[t][v * 2 + half] = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits[t], 16));
      }
    for (int t = 0; t < terms; ++t)
      for (int j = 0; j < 16; ++j)
        _mm512_storeu_si512(out + (t * d + i) * 16 + j * 32,
                            _mm512_i32gather_epi32(rows, reinterpret_cast<const int*>(numbers[t]) + j, 4));
  }
}

// For each column of a tile of products, the sum of their absolute values.
inline __m512 column_norms(const float* products) {
  __m512 even = _mm512_setzero_ps(), odd = even;
#pragma GCC unroll 8
  for (int i = 0; i < 256; i += 32) {
    even = _mm512_add_ps(even, _mm512_abs_ps(_mm512_load_ps(products + i)));
    odd = _mm512_add_ps(odd, _mm512_abs_ps(_mm512_load_ps(products + i + 16)));
  }
  return _mm512_add_ps(even, odd);
}

// The products of 16 rows with 16 values in tile C, whose number must be a literal.
#define KVM_PRODUCTS(C)                               \
  _tile_zero(C);                                      \
  if constexpr (K == 0)                               \
    for (int i = 0; i < terms * blocks; ++i) {        \
      _tile_loadd(0, pairs + i * kTilePairs, 64);     \
      _tile_loadd(4, row + i % blocks * 32, bytes);   \
      _tile_dpbf16ps(C, 4, 0);                        \
    }                                                 \
  if constexpr (K > 0) {                              \
    _tile_loadd(4, row, bytes);                       \
    _tile_dpbf16ps(C, 4, 0);                          \
  }                                                   \
  if constexpr (K > 1) {                              \
    _tile_loadd(5, row + 32, bytes);                  \
    _tile_dpbf16ps(C, 5, 1);                          \
  }                                                   \
  if constexpr (K > 2) {                              \
    _tile_loadd(4, row + 64, bytes);                  \
    _tile_dpbf16ps(C, 4, 2);                          \
  }                                                   \
  if constexpr (K > 3) {                              \
    _tile_loadd(5, row + 96, bytes);                  \
    _tile_dpbf16ps(C, 5, 3);                          \
  }                                                   \
  row += 16 * blocks * 32;

// Adds the sums over `rows` rows, a multiple of 32, to those of groups of 16 values. K: the number of blocks of 32
// numbers, whose tiles stay in registers; 0: any, and of any number of terms, which do not.
//
// Tiles are stored one turn after they were computed and read one turn later, from group to group: what waits for
// products in flight keeps the next ones from being started. The lines ahead are those of the next rows.
template <int K>
__attribute__((noinline)) void tile_norms(const BF16* weights, int blocks, int64_t rows, const BF16* pairs, int terms,
                                          int64_t num_groups, float* sums, const char* ahead, int64_t lines) {
  alignas(64) float even[256] = {}, odd[256] = {}, none[16] = {};
  const int64_t bytes = blocks * 64, pair_step = terms * blocks * kTilePairs;
  float* to = none;
  __m512 sum = _mm512_setzero_ps();
  _tile_zero(7);
  for (int64_t i = 0; i < num_groups; ++i, pairs += pair_step) {
    if constexpr (K > 0) _tile_loadd(0, pairs, 64);
    if constexpr (K > 1) _tile_loadd(1, pairs + kTilePairs, 64);
    if constexpr (K > 2) _tile_loadd(2, pairs + 2 * kTilePairs, 64);
    if constexpr (K > 3) _tile_loadd(3, pairs + 3 * kTilePairs, 64);
    const BF16* row = weights;
    for (int64_t r = 0; r < rows; r += 32) {
      KVM_PRODUCTS(6)
      sum = _mm512_add_ps(sum, column_norms(even));
      _tile_stored(7, odd, 64);
      KVM_PRODUCTS(7)
      sum = _mm512_add_ps(sum, column_norms(odd));
      _tile_stored(6, even, 64);
      if (r == 0) {  // that was the last of the group before
        _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sum));
        sum = _mm512_setzero_ps();
        to = sums + i * 16;
      }
      if constexpr (K > 2) {  // the next group's, which the first-level cache has no more
        const char* next = reinterpret_cast<const char*>(pairs + pair_step) + r / 32 * K * K * 64;
#pragma GCC unroll 16
        for (int j = 0; j < K * K; ++j) __builtin_prefetch(next + j * 64, 0, 3);
      }
    }
    for (int64_t j = i * lines / num_groups; j < (i + 1) * lines / num_groups; ++j) prefetch(ahead + j * 64);
  }
  _tile_stored(7, odd, 64);
  sum = _mm512_add_ps(_mm512_add_ps(sum, column_norms(even)), column_norms(odd));  // as above
  _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sum));
}
#undef KVM_PRODUCTS

inline bool norms_by_tiles(const Norms& x) {
  return x.dtype == DType::bf16 && x.num_rows % 32 == 0 && x.head_size % 32 == 0;
}

void norms_of_tiles(const Norms& x) {
  const TilesInUse in_use;
  const int d = x.head_size, blocks = d / 32;
  const int64_t num_groups = (x.n + 15) / 16, step = chunk_rows(d, 2);
  float* sums = x.scratch;
  BF16* pairs = reinterpret_cast<BF16*>(sums + num_groups * 16);
  uint32_t rest = 0;
  for (int64_t i = 0; i < x.n * d; ++i) rest |= bit_cast<uint32_t>(x.values[i]) & 0xffffu;
  const int terms = rest ? kTerms : 1;
  for (int64_t i = 0; i < num_groups; ++i)
    pairs_of_values(x.values + i * 16 * d, min64(16, x.n - i * 16), d, terms, pairs + i * 16 * terms * d);
  for (int64_t i = 0; i < num_groups * 16; ++i) sums[i] = 0.0f;
  const auto run = terms > 1     ? tile_norms<0>
                   : blocks == 1 ? tile_norms<1>
                   : blocks == 2 ? tile_norms<2>
                   : blocks == 3 ? tile_norms<3>
                   : blocks == 4 ? tile_norms<4>
                                 : tile_norms<0>;
  for (int64_t row = 0; row < x.num_rows; row += step) {
    const BF16* weights = static_cast<const BF16*>(x.weights) + row * d;
    const int64_t rows = min64(step, x.num_rows - row), next = min64(step, x.num_rows - row - rows);
    run(weights, blocks, rows, pairs, terms, num_groups, sums, reinterpret_cast<const char*>(weights + rows * d),
        next * d / 32);
  }
  for (int64_t i = 0; i < x.n; ++i) x.sums[i] = sums[i];
}
#endif

int64_t norms_scratch(const Norms& x) {
  const int64_t n = (x.n + kTile - 1) / kTile * kTile;
#if defined(__AMX_BF16__)
  if (norms_by_tiles(x)) return n * (2 + kTerms * x.head_size / 2);
#endif
  return (n + chunk_rows(x.head_size, 4)) * x.head_size;
}

void norms(const Norms& x) {
#if defined(__AMX_BF16__)
  if (norms_by_tiles(x)) return norms_of_tiles(x);
#endif
  for (int64_t i = 0; i < x.n; ++i) x.sums[i] = 0.0f;
  if (x.dtype == DType::f32) return float_norms<float>(x);
  if (x.dtype == DType::bf16) return float_norms<BF16>(x);
  float_norms<F16>(x);
}
