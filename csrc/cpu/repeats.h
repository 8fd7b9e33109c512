// The search for newest repeats (see Repeats in kernels.h) in one head. Included into each level's own namespace.
//
// Entries are taken in panels of columns, from the newest backwards, and each panel is compared with all rows before its
// end, so that each pair is looked at once at most, for both its entries. A row leaves the search with the first panel
// that holds a repeat of it; what a panel's columns still want of rows that have left is compared after that. Products in
// a panel only say which pairs may be above the threshold; those are decided by `product`.

constexpr int kPanel = 64;  // columns: the bits of a mask
constexpr int kGroup = 6;   // rows that are compared with a panel together

enum RowState : uint8_t { kNever, kActive, kLeft };  // kNever: a key of zeros, which repeats nothing

// The sum of all lanes, half to half.
inline float total(VF x) {
#if defined(__AVX512F__)
  const __m512 wide = bit_cast<__m512>(x);
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(wide), _mm512_maskz_extractf32x8_ps(0xff, wide, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

// The same for (a, b) and (b, a), in whatever order a search comes to them.
inline float product(const float* a, const float* b, int d) {
  VF sum{};
  int e = 0;
  for (; e + kLanes <= d; e += kLanes) sum += load(a + e) * load(b + e);
  float result = total(sum);
  for (; e < d; ++e) result += a[e] * b[e];
  return result;
}

inline bool is_zero(const float* x, int d) {
  VI other{};
  int e = 0;
  for (; e + kLanes <= d; e += kLanes) other |= load(x + e) != VF{};
  bool zero = true;
  for (int i = 0; i < kLanes; ++i) zero &= other[i] == 0;
  for (; e < d; ++e) zero &= x[e] == 0.0f;
  return zero;
}

// What float32 products of vectors of these lengths may differ by from exact ones, in any order of summation.
inline double rounding(int d, double length) { return (d + 2) * 0x1p-23 * length * length; }

#if defined(__AVX512VNNI__)
// Products of 8 bits. A key x is s (q + e) with integers |q| <= 127, s one number for the head; x y differs from s^2 q r,
// where y = s (r + f), by at most |x| |s f| + |y| |s e| + |s e| |s f| (Cauchy-Schwarz), and the largest of these lengths
// are known.
class Comparison {
 public:
  static int64_t bytes(int64_t n, int64_t d) { return kPanel * steps_of(d) * 4 + n * (steps_of(d) * 4 + 4); }

  Comparison(const float* keys, int64_t n, int d, float threshold, char* scratch)
      : panel_(reinterpret_cast<uint8_t*>(scratch)), d_(d), steps_(static_cast<int>(steps_of(d))) {
    rows_ = reinterpret_cast<int8_t*>(scratch + kPanel * steps_ * 4);
    starts_ = reinterpret_cast<int32_t*>(rows_ + n * steps_ * 4);
    __m512 largest = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; ++i)
      for (int e = 0; e < d; e += 16)
        largest = _mm512_max_ps(largest, _mm512_abs_ps(known(_mm512_maskz_loadu_ps(lanes(e, d), keys + i * d + e))));
    const float most = horizontal_max(bit_cast<VF>(largest));
    const bool in_range = most < 0x1p60f;  // otherwise all pairs are candidates
    const float scale = in_range && most > 0x1p-60f ? most / 127.0f : 1.0f;
    const __m512 inverse = _mm512_set1_ps(1.0f / scale);
    float longest = 0.0f, worst = 0.0f;
    const int padded = steps_ * 4;
    for (int64_t i = 0; i < n; ++i) {
      __m512 length = _mm512_setzero_ps(), error = length, sum = length;
      for (int e = 0; e < padded; e += 16) {
        const __mmask16 mask = in_range ? lanes(e, d) : 0;
        const __m512 x = known(_mm512_maskz_loadu_ps(mask, keys + i * d + e));
        const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
        const __m512 whole = _mm512_cvtepi32_ps(q), rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(scale), x);
        length = _mm512_fmadd_ps(x, x, length);
        error = _mm512_fmadd_ps(rest, rest, error);
        sum = _mm512_add_ps(sum, whole);
        _mm512_mask_cvtsepi32_storeu_epi8(rows_ + i * padded + e, lanes(e, padded), q);
      }
      const float a = total(bit_cast<VF>(length)), b = total(bit_cast<VF>(error));
      longest = a > longest ? a : longest;
      worst = b > worst ? b : worst;
      starts_[i] = -128 * static_cast<int32_t>(total(bit_cast<VF>(sum)));
    }
    // A little more than rounding in float32 may have taken from the lengths themselves.
    const double x = __builtin_sqrt(static_cast<double>(longest)) * 1.0001;
    const double e = __builtin_sqrt(static_cast<double>(worst)) * 1.0001 + 0x1p-20 * x;
    const double bound = 2.0 * x * e + e * e + rounding(d, x);
    double least = __builtin_floor((threshold - bound) / (static_cast<double>(scale) * scale)) - 1.0;
    if (!in_range || !(least > -0x1p29)) least = -0x1p29;
    if (least > 0x1p29) least = 0x1p29;
    for (int64_t i = 0; i < n; ++i) starts_[i] -= static_cast<int32_t>(least);
  }

  // Puts the entries `columns` side by side: [steps][vectors][16 columns][4].
  void pack(const int32_t* columns, int count) {
    vectors_ = (count + 15) / 16;
    for (int v = 0; v < vectors_; ++v)
      for (int k = 0; k < steps_; ++k) {
        uint32_t* to = reinterpret_cast<uint32_t*>(panel_) + (k * vectors_ + v) * 16;
        for (int c = 0; c < 16; ++c) {
          const int at = v * 16 + c;
          uint32_t four = 0;
          if (at < count) __builtin_memcpy(&four, rows_ + (int64_t{columns[at]} * steps_ + k) * 4, 4);
          to[c] = four ^ 0x80808080u;  // + 128
        }
      }
  }

  // Sets masks[r] to the columns that may repeat rows[r]. Returns whether there are any.
  bool scan(const int32_t* rows, uint64_t* masks) const {
    if (vectors_ == 1) return scan_as<1>(rows, masks);
    if (vectors_ == 2) return scan_as<2>(rows, masks);
    if (vectors_ == 3) return scan_as<3>(rows, masks);
    return scan_as<4>(rows, masks);
  }

 private:
  static int64_t steps_of(int64_t d) { return (d + 3) / 4; }
  static __m512 known(__m512 x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, x, _CMP_EQ_OQ), x); }  // no NaN
  // Those of 16 lanes from `e` on that are before `end`.
  static __mmask16 lanes(int e, int end) {
    return end - e >= 16 ? 0xffff : end <= e ? 0 : static_cast<__mmask16>((1 << (end - e)) - 1);
  }

  // As _mm512_dpbusd_epi32, of which GCC 12 makes a copy of each sum, in memory where registers do not suffice.
  static void add_products(__m512i& sum, __m512i x, __m512i y) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
  }

  // In a function of its own, whose sums stay in registers.
  template <int V>
  __attribute__((noinline)) bool scan_as(const int32_t* rows, uint64_t* masks) const {
    __m512i acc[kGroup][V];
    const int8_t* row[kGroup];
#pragma GCC unroll 6
    for (int r = 0; r < kGroup; ++r) {
      row[r] = rows_ + int64_t{rows[r]} * steps_ * 4;
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] = _mm512_set1_epi32(starts_[rows[r]]);
    }
    const uint8_t* p = panel_;
    for (int k = 0; k < steps_; ++k, p += V * 64) {
      __m512i x[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) x[v] = _mm512_load_si512(p + v * 64);
#pragma GCC unroll 6
      for (int r = 0; r < kGroup; ++r) {
        int32_t four;
        __builtin_memcpy(&four, row[r] + k * 4, 4);
        const __m512i y = _mm512_set1_epi32(four);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) add_products(acc[r][v], x[v], y);
      }
    }
    VI most = bit_cast<VI>(acc[0][0]);
#pragma GCC unroll 6
    for (int r = 0; r < kGroup; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) most = bit_cast<VI>(acc[r][v]) > most ? bit_cast<VI>(acc[r][v]) : most;
    const __m512i zero = _mm512_setzero_si512();
    if (!_mm512_cmpgt_epi32_mask(bit_cast<__m512i>(most), zero)) return false;
#pragma GCC unroll 6
    for (int r = 0; r < kGroup; ++r) {
      masks[r] = 0;
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v)
        masks[r] |= static_cast<uint64_t>(_mm512_cmpgt_epi32_mask(acc[r][v], zero)) << (16 * v);
    }
    return true;
  }

  uint8_t* panel_;
  int8_t* rows_;
  int32_t* starts_;  // what a row's sums begin with: above 0 at the end is a candidate
  int d_, steps_, vectors_ = 0;
};
#else
class Comparison {
 public:
  static int64_t bytes(int64_t, int64_t d) { return kPanel * d * 4; }

  Comparison(const float* keys, int64_t n, int d, float threshold, char* scratch)
      : keys_(keys), panel_(reinterpret_cast<float*>(scratch)), d_(d) {
    float longest = 0.0f;
    for (int64_t i = 0; i < n; ++i) {
      const float length = product(keys + i * d, keys + i * d, d);
      if (length > longest) longest = length;
    }
    const double x = __builtin_sqrt(static_cast<double>(longest)) * 1.0001;
    least_ = static_cast<float>(threshold - 2.0 * rounding(d, x) - 0x1p-23 * threshold);
  }

  // Puts the entries `columns` side by side: [parts][d][kWidth].
  void pack(const int32_t* columns, int count) {
    parts_ = (count + kWidth - 1) / kWidth;
    for (int at = 0; at < parts_ * kWidth; ++at) {
      float* to = panel_ + at / kWidth * d_ * kWidth + at % kWidth;
      for (int e = 0; e < d_; ++e) to[e * kWidth] = at < count ? keys_[int64_t{columns[at]} * d_ + e] : 0.0f;
    }
  }

  // Sets masks[r] to the columns that may repeat rows[r]. Returns whether there are any.
  bool scan(const int32_t* rows, uint64_t* masks) const {
    for (int r = 0; r < kGroup; ++r) masks[r] = 0;
    bool any = false;
    for (int part = 0; part < parts_; ++part) any |= scan_part(rows, part, masks);
    return any;
  }

 private:
  static constexpr int kVectors = kLanes == 16 ? 4 : 2;
  static constexpr int kWidth = kVectors * kLanes;

  __attribute__((noinline)) bool scan_part(const int32_t* rows, int part, uint64_t* masks) const {
    VF acc[kGroup][kVectors] = {};
    const float* row[kGroup];
    for (int r = 0; r < kGroup; ++r) row[r] = keys_ + int64_t{rows[r]} * d_;
    const float* p = panel_ + part * d_ * kWidth;
    for (int e = 0; e < d_; ++e, p += kWidth) {
      VF x[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) x[v] = load(p + v * kLanes);
#pragma GCC unroll 6
      for (int r = 0; r < kGroup; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[r][v] += x[v] * row[r][e];
    }
    VI any{};
#pragma GCC unroll 6
    for (int r = 0; r < kGroup; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) any |= acc[r][v] > broadcast(least_);
    int32_t found = 0;
    for (int i = 0; i < kLanes; ++i) found |= any[i];
    if (!found) return false;
    for (int r = 0; r < kGroup; ++r)
      for (int v = 0; v < kVectors; ++v) {
        float sums[kLanes];
        store(sums, acc[r][v]);
        for (int i = 0; i < kLanes; ++i)
          masks[r] |= static_cast<uint64_t>(sums[i] > least_) << (part * kWidth + v * kLanes + i);
      }
    return true;
  }

  const float* keys_;
  float* panel_;
  float least_;
  int d_, parts_ = 0;
};
#endif

inline int64_t repeats_scratch(int64_t n, int64_t head_size) {
  return (Comparison::bytes(n, head_size) + n * 5 + 3) / 4 + 16;
}

class RepeatSearch {
 public:
  explicit RepeatSearch(const Repeats& x)
      : x_(x),
        n_(x.stop),
        comparison_(x.keys, x.stop, x.head_size, x.threshold, reinterpret_cast<char*>(x.scratch)) {
    active_ = reinterpret_cast<int32_t*>(reinterpret_cast<char*>(x.scratch) +
                                         (Comparison::bytes(n_, x.head_size) + 3) / 4 * 4);
    state_ = reinterpret_cast<uint8_t*>(active_ + n_);
    for (int64_t i = n_; i-- > 0;) {
      const bool zero = is_zero(x.keys + i * x.head_size, x.head_size);
      state_[i] = zero ? kNever : x.found[i] < 0 ? kActive : kLeft;
      if (state_[i] == kActive) active_[num_active_++] = static_cast<int32_t>(i);
    }
  }

  void run() {
    for (int64_t end = x_.stop, begin; end > x_.start; end = begin) {
      begin = max64(x_.start, end - kPanel);
      search_panel(begin, end);
    }
    for (int64_t i = x_.start; i < x_.stop; ++i)
      x_.similarity[i - x_.start] = x_.found[i] < 0 ? 0.0f : similarity(i, x_.found[i]);
  }

 private:
  float similarity(int64_t i, int64_t j) const {
    return product(x_.keys + i * x_.head_size, x_.keys + j * x_.head_size, x_.head_size);
  }

  // Calls use(row, candidates) for those of the rows that next() gives, until it gives -1, that have candidates.
  template <class Next, class Use>
  void compare(const Next& next, const Use& use) {
    for (bool more = true; more;) {
      int32_t rows[kGroup];
      int count = 0;
      for (; count < kGroup; ++count) {
        const int32_t row = next();
        if (row < 0) break;
        rows[count] = row;
      }
      more = count == kGroup;
      if (count == 0) return;
      for (int r = count; r < kGroup; ++r) rows[r] = rows[0];
      uint64_t masks[kGroup];
      if (!comparison_.scan(rows, masks)) continue;
      for (int r = 0; r < count; ++r)
        if (masks[r]) use(rows[r], masks[r]);
    }
  }

  void search_panel(int64_t begin, int64_t end) {
    int32_t columns[kPanel];
    int64_t older[kPanel];  // of columns without a newer repeat: the newest older one
    uint64_t usable = 0, open = 0;
    const int count = static_cast<int>(end - begin);
    for (int c = 0; c < count; ++c) {
      columns[c] = static_cast<int32_t>(begin + c);
      older[c] = -1;
      usable |= static_cast<uint64_t>(state_[begin + c] != kNever) << c;
      open |= static_cast<uint64_t>(state_[begin + c] == kActive) << c;
    }
    if (!usable) return;
    comparison_.pack(columns, count);
    uint64_t waiting = open;  // those for which no older one is known
    int64_t at = 0;
    compare(
        [&] { return at < num_active_ ? active_[at++] : -1; },
        [&](int64_t i, uint64_t mask) {
          mask &= usable;
          if (i >= begin) mask &= i - begin == kPanel - 1 ? 0 : ~uint64_t{0} << (i - begin + 1);
          while (mask) {
            const int c = 63 - __builtin_clzll(mask);
            mask ^= uint64_t{1} << c;
            if (similarity(i, begin + c) > x_.threshold) {
              if (x_.found[i] < 0) {
                x_.found[i] = begin + c;
                if (i >= begin) open &= ~(uint64_t{1} << (i - begin)), waiting &= open;
              }
              if (waiting >> c & 1) older[c] = i, waiting ^= uint64_t{1} << c;
            }
            if (x_.found[i] >= 0) mask &= waiting;
          }
        });
    if (open) search_left(begin, end, open, older);
    for (uint64_t rest = open; rest; rest &= rest - 1) {
      const int c = __builtin_ctzll(rest);
      x_.found[begin + c] = older[c];
    }
    int64_t kept = 0;
    for (int64_t k = 0; k < num_active_; ++k) {
      const int32_t i = active_[k];
      if (i >= begin || x_.found[i] >= 0) state_[i] = kLeft;
      else active_[kept++] = i;
    }
    num_active_ = kept;
  }

  // Compares the columns `open` with the rows that had left before this panel, from the newest backwards.
  void search_left(int64_t begin, int64_t end, uint64_t open, int64_t* older) {
    int32_t columns[kPanel];
    int count = 0;
    for (uint64_t rest = open; rest; rest &= rest - 1)
      columns[count++] = static_cast<int32_t>(begin + __builtin_ctzll(rest));
    comparison_.pack(columns, count);
    const auto least = [&] {  // rows before this one are of no use
      int64_t row = end;
      for (int c = 0; c < count; ++c) row = min64(row, older[columns[c] - begin]);
      return row;
    };
    int64_t last = least(), i = end;
    compare(
        [&] {
          while (--i > last)
            if (state_[i] == kLeft) return static_cast<int32_t>(i);
          return -1;
        },
        [&](int64_t row, uint64_t mask) {
          if (count < kPanel) mask &= (uint64_t{1} << count) - 1;
          for (; mask; mask &= mask - 1) {
            const int32_t column = columns[__builtin_ctzll(mask)];
            int64_t& known = older[column - begin];
            if (row >= column || row <= known || !(similarity(row, column) > x_.threshold)) continue;
            known = row;
            last = least();
          }
        });
  }

  const Repeats& x_;
  int64_t n_, num_active_ = 0;
  Comparison comparison_;
  int32_t* active_;  // rows for which no newer repeat is known, the newest first
  uint8_t* state_;
};

void newest_repeats(const Repeats& x) { RepeatSearch(x).run(); }
