// The kernels of one instruction set level: compiled once per level, with KVM_LEVEL naming it.
#include "kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kvmerge {
namespace KVM_LEVEL {
namespace {

#include "simd.h"
#include "tiles.h"

alignas(64) const char kZeros[kMaxHeadSize * 4] = {};

inline int64_t padded(int64_t head_size) { return (head_size + 31) / 32 * 32; }

// Touches one cache line per step, so that what is needed next is on its way while something else is computed.
struct Prefetcher {
  const char* next;
  int64_t step;
  int64_t left;
  inline void lines(int64_t count) {
    for (count = min64(count, left); count > 0; --count, --left, next += step) prefetch(next);
  }
};

// ---- Logits of a tile: out[r, t] = sum_i q[r, i] k[i, t] ------------------------------------------------------------

constexpr int kVectors = 2;  // per row of accumulators

template <int RB, class T>
inline void logits_of_rows(
    const T* k, int64_t stride, int d, const float* q, float, float* out, int64_t out_stride, Prefetcher& ahead) {
  for (int t = 0; t < kTile; t += kVectors * kLanes) {
    VF sum[RB][kVectors] = {};
    for (int i = 0; i < d; ++i) {
      VF key[kVectors];
      for (int v = 0; v < kVectors; ++v) key[v] = load(k + i * stride + t + v * kLanes);
      for (int r = 0; r < RB; ++r) {
        const VF query = broadcast(q[r * d + i]);
        for (int v = 0; v < kVectors; ++v) sum[r][v] += query * key[v];
      }
      if (t == 0) ahead.lines(sizeof(T) > 2 ? 2 : 1);
    }
    for (int r = 0; r < RB; ++r)
      for (int v = 0; v < kVectors; ++v) store(out + r * out_stride + t + v * kLanes, sum[r][v]);
  }
}

// ---- Weighted sum of a tile's values: acc[r, e] += sum_t p[r, t] v[t, e] --------------------------------------------

template <int RB, class T>
inline void values_of_rows(
    const T* v, int d, int lo, int hi, const float* p, float* acc, int64_t acc_stride, Prefetcher& ahead) {
  for (int e = 0; e < d; e += kVectors * kLanes) {
    const int vectors = d - e >= kVectors * kLanes ? kVectors : 1;  // d is a multiple of 16, so of kLanes
    VF sum[RB][kVectors] = {};
    for (int r = 0; r < RB; ++r)
      for (int j = 0; j < vectors; ++j) sum[r][j] = load(acc + r * acc_stride + e + j * kLanes);
    if (vectors == kVectors) {
      for (int t = lo; t < hi; ++t) {
        VF value[kVectors];
        for (int j = 0; j < kVectors; ++j) value[j] = load(v + t * d + e + j * kLanes);
        for (int r = 0; r < RB; ++r) {
          const VF weight = broadcast(p[r * kChunk + t]);
          for (int j = 0; j < kVectors; ++j) sum[r][j] += weight * value[j];
        }
      }
    } else {
      for (int t = lo; t < hi; ++t) {
        const VF value = load(v + t * d + e);
        for (int r = 0; r < RB; ++r) sum[r][0] += broadcast(p[r * kChunk + t]) * value;
      }
    }
    ahead.lines(kVectors * kLanes * sizeof(T) / 2);
    for (int r = 0; r < RB; ++r)
      for (int j = 0; j < vectors; ++j) store(acc + r * acc_stride + e + j * kLanes, sum[r][j]);
  }
}

// ---- The same with AVX512_BF16's dot products of pairs ---------------------------------------------------------------
//
// Two rows are interleaved in registers, so that each 32-bit lane holds the pair that belongs together. Within 128-bit
// lanes: the low half of the interleaved pair holds columns 0-3, 8-11, 16-19, 24-27, the high half the others.

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;

inline __m512bh pair_of(const BF16* row, int i) {
  return bit_cast<__m512bh>(_mm512_set1_epi32(bit_cast<int32_t>(*reinterpret_cast<const int32_t*>(row + i))));
}

template <int RB>
inline void logits_of_rows(const BF16* k, int64_t stride, int d, const BF16* q, float scale, float* out,
                           int64_t out_stride, Prefetcher& ahead) {
  __m512 low[RB], high[RB];
  for (int r = 0; r < RB; ++r) low[r] = high[r] = _mm512_setzero_ps();
  for (int i = 0; i < d; i += 2) {
    const __m512i a = _mm512_loadu_si512(k + i * stride), b = _mm512_loadu_si512(k + (i + 1) * stride);
    const __m512bh first = bit_cast<__m512bh>(_mm512_unpacklo_epi16(a, b));
    const __m512bh second = bit_cast<__m512bh>(_mm512_unpackhi_epi16(a, b));
    for (int r = 0; r < RB; ++r) {
      const __m512bh query = pair_of(q + r * d, i);
      low[r] = _mm512_dpbf16_ps(low[r], first, query);
      high[r] = _mm512_dpbf16_ps(high[r], second, query);
    }
    ahead.lines(2);
  }
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const __m512 factor = _mm512_set1_ps(scale);
  for (int r = 0; r < RB; ++r) {
    const __m512 a = _mm512_permutex2var_ps(low[r], first, high[r]);
    const __m512 b = _mm512_permutex2var_ps(low[r], second, high[r]);
    _mm512_storeu_ps(out + r * out_stride, _mm512_mul_ps(a, factor));
    _mm512_storeu_ps(out + r * out_stride + 16, _mm512_mul_ps(b, factor));
  }
}

template <int RB>
inline void values_of_rows(const BF16* v, int d, int lo, int hi, const BF16* p, float* acc, int64_t acc_stride,
                           Prefetcher& ahead) {
  const BF16* zeros = reinterpret_cast<const BF16*>(kZeros);
  for (int e = 0; e < d; e += 32) {
    const __mmask32 columns = d - e >= 32 ? 0xffffffffu : 0xffffu;
    __m512 low[RB], high[RB];
    for (int r = 0; r < RB; ++r) {
      low[r] = _mm512_loadu_ps(acc + r * acc_stride + e);
      high[r] = _mm512_loadu_ps(acc + r * acc_stride + e + 16);
    }
    for (int t = lo & ~1; t < hi; t += 2) {
      // The other half of a pair at the border is not a live entry, and may hold anything.
      const __m512i a = _mm512_maskz_loadu_epi16(columns, (t >= lo ? v + t * d : zeros) + e);
      const __m512i b = _mm512_maskz_loadu_epi16(columns, (t + 1 < hi ? v + (t + 1) * d : zeros) + e);
      const __m512bh first = bit_cast<__m512bh>(_mm512_unpacklo_epi16(a, b));
      const __m512bh second = bit_cast<__m512bh>(_mm512_unpackhi_epi16(a, b));
      for (int r = 0; r < RB; ++r) {
        const __m512bh weight = pair_of(p + r * kChunk, t);
        low[r] = _mm512_dpbf16_ps(low[r], first, weight);
        high[r] = _mm512_dpbf16_ps(high[r], second, weight);
      }
      ahead.lines(2);
    }
    for (int r = 0; r < RB; ++r) {
      _mm512_storeu_ps(acc + r * acc_stride + e, low[r]);
      _mm512_storeu_ps(acc + r * acc_stride + e + 16, high[r]);
    }
  }
}

inline void to_pairs(const float* p, int count, BF16* out) {  // count: a multiple of 32
  for (int t = 0; t < count; t += 32) {
    const __m512 a = _mm512_loadu_ps(p + t), b = _mm512_loadu_ps(p + t + 16);
    _mm512_storeu_si512(out + t, bit_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
  }
}

inline int pair_order(int e) { return (e & ~31) + (e >> 2 & 1) * 16 + (e >> 3 & 3) * 4 + (e & 3); }
#else
constexpr bool kHasPairs = false;
#endif

template <class T, class U>
struct Same {
  static constexpr bool value = false;
};
template <class T>
struct Same<T, T> {
  static constexpr bool value = true;
};

// What queries and weights are kept as beside a cache of T.
template <class T, bool kPairs>
struct Operand {
  typedef float type;
};
template <>
struct Operand<BF16, true> {
  typedef BF16 type;
};

// Calls f with the number of rows as a constant, for groups of at most eight rows.
template <class F>
inline void for_row_groups(int rows, F&& f) {
  int r = 0;
  if (kLanes == 16)
    for (; rows - r >= 8; r += 8) f.template rows<8>(r);
  for (; rows - r >= 4; r += 4) f.template rows<4>(r);
  if (rows - r >= 2) {
    f.template rows<2>(r);
    r += 2;
  }
  if (rows - r >= 1) f.template rows<1>(r);
}

template <class T, class Q>
struct TileLogits {
  const T* k;
  int64_t stride;
  int d;
  const Q* q;
  float scale;
  float* out;
  Prefetcher& ahead;
  template <int RB>
  inline void rows(int r) {
    logits_of_rows<RB>(k, stride, d, q + r * d, scale, out + r * kChunk, kChunk, ahead);
  }
};

template <class T, class P>
struct TileValues {
  const T* v;
  int d, lo, hi;
  const P* p;
  float* acc;
  int64_t acc_stride;
  Prefetcher& ahead;
  template <int RB>
  inline void rows(int r) {
    values_of_rows<RB>(v, d, lo, hi, p + r * kChunk, acc + r * acc_stride, acc_stride, ahead);
  }
};

inline float element(const Rows& rows, int64_t index) {
  if (rows.dtype == DType::f32) return static_cast<const float*>(rows.data)[index];
  if (rows.dtype == DType::bf16) return to_float(static_cast<const BF16*>(rows.data)[index]);
  return to_float(static_cast<const F16*>(rows.data)[index]);
}

int64_t attend_scratch(int64_t rows, int64_t head_size) {
  return rows * (head_size + kChunk + kChunk / 2) + 64;  // queries, logits, weights as bfloat16
}

template <class T, bool kPairs>
void attend_as(const Attend& a) {
  typedef typename Operand<T, kPairs>::type Q;
  const Pages& pages = *a.pages;
  const Tiles tiles(a.segments, pages.block_size);
  const int d = pages.head_size, rows = a.num_queries * a.group;
  const int64_t acc_stride = padded(d), bs = pages.block_size, num_entries = tiles.num_entries();
  const bool softmax = a.mode != ScoreMode::log_ema || a.with_values;

  Q* q = reinterpret_cast<Q*>(a.scratch);
  float* logits = a.scratch + (rows * d + 15) / 16 * 16;
  BF16* weights = reinterpret_cast<BF16*>(logits + rows * kChunk);
  for (int r = 0; r < rows; ++r) {
    const int64_t token = r / a.group, head = static_cast<int64_t>(a.head) * a.group + r % a.group;
    const int64_t start = token * a.query.token_stride + head * a.query.head_stride;
    // Pairs multiply the queries as they are and scale the sum; float32 queries are scaled beforehand.
    for (int i = 0; i < d; ++i) {
      const float x = element(a.query, start + i);
      q[r * d + i] = from_float<Q>(kPairs ? x : x * a.scale);
    }
    a.maximum[r] = kLowest;
    a.sum[r] = 0.0f;
  }
  if (a.with_values)
    for (int64_t i = 0; i < rows * acc_stride; ++i) a.accumulator[i] = 0.0f;

  const int64_t key_bytes = static_cast<int64_t>(bs) * d * sizeof(T);
  const int64_t first_limit = num_entries - a.total_queries + a.first_query + 1;  // entries that row 0 sees
  for (int64_t chunk = a.tile_begin; chunk < a.tile_end; chunk += kChunkTiles) {
    const int count = static_cast<int>(min64(kChunkTiles, a.tile_end - chunk)), width = count * kTile;
    Tile tile[kChunkTiles];
    for (int j = 0; j < count; ++j) {
      tile[j] = tiles[chunk + j];
      const Tile& t = tile[j];
      const char* keys = region(pages, t.block, a.head);
      const char* values = keys + key_bytes + static_cast<int64_t>(t.offset) * d * sizeof(T);
      Prefetcher ahead{values, 64, a.with_values ? static_cast<int64_t>(t.hi * d * sizeof(T) / 64) : 0};
      TileLogits<T, Q> job{
          reinterpret_cast<const T*>(keys) + t.offset, bs, d, q, a.scale, logits + j * kTile, ahead};
      for_row_groups(rows, job);
      if (a.mode == ScoreMode::log_ema)
        for (int r = 0; r < rows; ++r)
          __builtin_memcpy(a.stored + r * a.stored_stride + (chunk + j) * kTile, logits + r * kChunk + j * kTile,
                           kTile * sizeof(float));
      if (!softmax) continue;
      if (t.front) {
        const float* votes = plane(pages, t.block, a.head, kLogVotes) + t.offset;
        for (int v = 0; v < kTile; v += kLanes) {
          if (v >= t.hi) break;
          const VF vote = load(votes + v);
          const VI dead = vote == broadcast(-kInfinity);
          for (int r = 0; r < rows; ++r) {
            float* x = logits + r * kChunk + j * kTile + v;
            store(x, select(dead, vote, load(x) + vote));
          }
        }
      }
      const bool causal = t.entry + t.hi > first_limit;
      if (t.lo > 0 || t.hi < kTile || causal)
        for (int r = 0; r < rows; ++r) {
          float* x = logits + r * kChunk + j * kTile;
          const int64_t stop = min64(t.hi, first_limit + r / a.group - t.entry);
          for (int i = 0; i < kTile; ++i)
            if (i < t.lo || i >= stop) x[i] = -kInfinity;
        }
    }
    if (!softmax) continue;
    for (int r = 0; r < rows; ++r) {
      float* x = logits + r * kChunk;
      VF largest = load(x);
      for (int i = kLanes; i < width; i += kLanes) largest = maximum(largest, load(x + i));
      const float chunk_maximum = horizontal_max(largest), old = a.maximum[r];
      if (chunk_maximum > old) {
        const VF factor = exp(broadcast(old - chunk_maximum));
        a.maximum[r] = chunk_maximum;
        a.sum[r] *= factor[0];
        if (a.with_values)
          for (int64_t i = 0; i < acc_stride; i += kLanes) {
            float* acc = a.accumulator + r * acc_stride + i;
            store(acc, load(acc) * factor);
          }
      }
      const VF top = broadcast(a.maximum[r]);
      VF total = {};
      for (int i = 0; i < width; i += kLanes) {
        const VF weight = exp(load(x + i) - top);
        total += weight;
        store(x + i, weight);
      }
      a.sum[r] += horizontal_sum(total);
      if (a.mode == ScoreMode::sum || a.mode == ScoreMode::mean) {
        __builtin_memcpy(a.stored + r * a.stored_stride + chunk * kTile, x, width * sizeof(float));
        a.chunk_max[r * a.chunk_stride + chunk / kChunkTiles] = a.maximum[r];
      }
#if defined(__AVX512BF16__)
      if (kPairs) to_pairs(x, width, weights + r * kChunk);
#endif
    }
    if (!a.with_values) continue;
    for (int j = 0; j < count; ++j) {
      const Tile& t = tile[j];
      const char* values = region(pages, t.block, a.head) + key_bytes;
      Prefetcher ahead{nullptr, 0, 0};
      if (chunk + kChunkTiles + j < a.tile_end) {
        const Tile next = tiles[chunk + kChunkTiles + j];
        const char* keys = region(pages, next.block, a.head) + next.offset * sizeof(T);
        ahead = Prefetcher{keys, static_cast<int64_t>(bs * sizeof(T)), d};
      }
      const T* v = reinterpret_cast<const T*>(values) + static_cast<int64_t>(t.offset) * d;
      const Q* p = kPairs ? reinterpret_cast<const Q*>(weights) : reinterpret_cast<const Q*>(logits);
      TileValues<T, Q> job{v, d, t.lo, t.hi, p + j * kTile, a.accumulator, acc_stride, ahead};
      for_row_groups(rows, job);
    }
  }
}

// Whether pairs are used; they need bfloat16 queries, because others would lose bits.
inline bool uses_pairs(const Pages& pages, DType query) {
  return kHasPairs && pages.dtype == DType::bf16 && query == DType::bf16;
}

void attend(const Attend& a) {
  if (a.pages->dtype == DType::f32) return attend_as<float, false>(a);
  if (a.pages->dtype == DType::f16) return attend_as<F16, false>(a);
  if (uses_pairs(*a.pages, a.query.dtype)) return attend_as<BF16, kHasPairs>(a);
  return attend_as<BF16, false>(a);
}

void finish(const Finish& f) {
  const int rows = f.num_queries * f.group, d = f.pages->head_size;
  const int64_t acc_stride = padded(d);
  for (int r = 0; r < rows; ++r) {
    float top = f.maximum[r], total = 0.0f;
    for (int i = 1; i < f.num_pieces; ++i) {
      const float m = f.maximum[i * f.piece_stride + r];
      top = m > top ? m : top;
    }
    alignas(64) float sum[kMaxHeadSize] = {};
    for (int i = 0; i < f.num_pieces; ++i) {
      const VF factor = exp(broadcast(f.maximum[i * f.piece_stride + r] - top));
      total += f.sum[i * f.piece_stride + r] * factor[0];
      if (f.with_values)
        for (int64_t e = 0; e < acc_stride; e += kLanes)
          store(sum + e, load(sum + e) + factor * load(f.accumulator + i * f.piece_stride + r * acc_stride + e));
    }
    f.total_maximum[r] = top;
    f.total_sum[r] = total;
    if (!f.with_values) continue;
    const float inverse = total > 0.0f ? 1.0f / total : (total == 0.0f ? 0.0f : total);
    const int64_t token = r / f.group, head = static_cast<int64_t>(f.head) * f.group + r % f.group;
    const int64_t start = token * f.output.token_stride + head * f.output.head_stride;
    const bool in_pairs = uses_pairs(*f.pages, f.query_dtype);
    for (int e = 0; e < d; ++e) {
#if defined(__AVX512BF16__)
      const float x = sum[in_pairs ? pair_order(e) : e] * inverse;
#else
      (void)in_pairs;
      const float x = sum[e] * inverse;
#endif
      if (f.output.dtype == DType::f32) static_cast<float*>(f.output.data)[start + e] = x;
      else if (f.output.dtype == DType::bf16) static_cast<BF16*>(f.output.data)[start + e] = from_float<BF16>(x);
      else static_cast<F16*>(f.output.data)[start + e] = from_float<F16>(x);
    }
  }
}

// Lanes whose index from `first` on is below `limit`.
inline VI below(int64_t first, int64_t limit) {
  const int64_t count = max64(-1, min64(kLanes, limit - first));
  return iota() < broadcast(static_cast<float>(count));
}

// scores, aux: the statistics of a tile; first: what lane 0's entry is; stored: of row 0, at the tile.
void update_tile(const Update& u, float* scores, float* aux, int64_t first, const float* stored, const float* factor,
                 int64_t num_entries) {
  const int64_t num_old = num_entries - u.total_queries;
  const float log_decay = u.log_decay, log_share = u.log_share, log_group = u.log_group;
  for (int v = 0; v < kTile; v += kLanes) {
    VF score = load(scores + v), seen = load(aux + v);
    if (u.new_start_empty && u.first_query == 0) {
      const VI old = below(first + v, num_old);
      score = select(old, score, VF{});
      seen = select(old, seen, VF{});
    }
    for (int j = 0; j < u.num_queries; ++j) {
      const float* x = stored + static_cast<int64_t>(j) * u.group * u.stored_stride + v;
      const VI visible = below(first + v, num_old + u.first_query + j + 1);
      const VF counted = select(visible, broadcast(1.0f), VF{});
      if (u.mode != ScoreMode::log_ema) {
        VF total = {};
        for (int g = 0; g < u.group; ++g)
          total += load(x + g * u.stored_stride) * broadcast(factor[j * u.group + g]);
        score = score * u.decay + total;
        if (u.mode == ScoreMode::mean) seen += counted;
        continue;
      }
      VF top = load(x), total = {};
      for (int g = 1; g < u.group; ++g) top = maximum(top, load(x + g * u.stored_stride));
      for (int g = 0; g < u.group; ++g) total += exp(load(x + g * u.stored_stride) - top);
      const VF level = top + log(total) - log_group;
      const VF past = select(seen > VF{}, score + log_decay, broadcast(-kInfinity));
      score = select(visible, log_add_exp(past, level + log_share), score);
      seen += counted;
    }
    if (u.mode == ScoreMode::log_ema) score = select(seen > VF{}, score, VF{});
    store(scores + v, score);
    store(aux + v, seen);
  }
}

void update(const Update& u) {
  const Pages& pages = *u.pages;
  const Tiles tiles(u.segments, pages.block_size);
  const int rows = u.num_queries * u.group;
  const int64_t num_entries = tiles.num_entries();
  for (int64_t i = u.tile_begin; i < u.tile_end; ++i) {
    if (u.mode != ScoreMode::log_ema && (i == u.tile_begin || i % kChunkTiles == 0))
      for (int r = 0; r < rows; ++r) {
        const float m = u.chunk_max[r * u.chunk_stride + i / kChunkTiles];
        u.scratch[r] = exp(broadcast(m - u.maximum[r]))[0] / u.sum[r];
      }
    const Tile t = tiles[i];
    float* scores = u.scores ? u.scores + t.entry : plane(pages, t.block, u.head, kScores) + t.offset;
    float* aux = u.scores ? u.aux + t.entry : plane(pages, t.block, u.head, kAux) + t.offset;
    const float* stored = u.stored + i * kTile;
    if (t.lo == 0 && t.hi == kTile) {
      update_tile(u, scores, aux, t.entry, stored, u.scratch, num_entries);
      continue;
    }
    alignas(64) float some_scores[kTile] = {}, some_aux[kTile] = {};
    for (int k = t.lo; k < t.hi; ++k) some_scores[k] = scores[k], some_aux[k] = aux[k];
    update_tile(u, some_scores, some_aux, t.entry, stored, u.scratch, num_entries);
    for (int k = t.lo; k < t.hi; ++k) scores[k] = some_scores[k], aux[k] = some_aux[k];
  }
}

}  // namespace

#define KVM_TEXT_(x) #x
#define KVM_TEXT(x) KVM_TEXT_(x)

const Kernels& kernels() {
  static constexpr Kernels table = {KVM_TEXT(KVM_LEVEL), attend_scratch, attend, finish, update};
  return table;
}

}  // namespace KVM_LEVEL
}  // namespace kvmerge
