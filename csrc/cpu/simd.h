// Vectors of floats as wide as the level's registers, over GCC's vector extensions (which Clang has too).
// Included into each level's own namespace.

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float VF __attribute__((vector_size(kLanes * 4)));
typedef int32_t VI __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VU __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VH __attribute__((vector_size(kLanes * 2)));
typedef uint8_t VB __attribute__((vector_size(kLanes)));

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
// 8 bits, with 3 or 2 of mantissa (OCP FP8). E4M3 has no infinity; 0x7f is read as 480, as vLLM does.
struct E4M3 {
  uint8_t bits;
};
struct E5M2 {
  uint8_t bits;
};
// A whole number from -127 to 127.
struct I8 {
  int8_t bits;
};
// Two whole numbers from 0 to 15, the first in the lower bits.
struct I4 {
  uint8_t bits;
};
typedef int8_t VC __attribute__((vector_size(kLanes)));

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLowest = -3.402823466e+38f;

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

inline VF broadcast(float x) { return x - VF{}; }
inline VF load(const float* p) {
  VF x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
inline void store(float* p, VF x) { __builtin_memcpy(p, &x, sizeof x); }

// One instruction each, where compilers make several of a conversion of vectors.
inline VU widen(const uint16_t* p) {
#if defined(__AVX512F__)
  return bit_cast<VU>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__)
  return bit_cast<VU>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  VH x;
  __builtin_memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, VU);
#endif
}

inline VF load(const BF16* p) { return bit_cast<VF>(widen(&p->bits) << 16); }

// Exponent and mantissa moved into place are the value times 2^-112 (also where it is subnormal).
inline VF of_half(VU half) {
  const VU magnitude = (half & 0x7fff) << 13;
  const VU finite = bit_cast<VU>(bit_cast<VF>(magnitude) * 5.192296858534828e33f);
  const VU special = bit_cast<VU>(magnitude >= 0x0f800000u) & 0x7f800000u;
  return bit_cast<VF>(finite | special | (half & 0x8000) << 16);
}

inline VF load(const F16* p) {
#if defined(__AVX512F__)
  return bit_cast<VF>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__)
  return bit_cast<VF>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  return of_half(widen(&p->bits));
#endif
}

inline VU widen(const uint8_t* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return bit_cast<VU>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  VB x;
  __builtin_memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, VU);
#endif
}

inline VF load(const E4M3* p) {
  // By float16 where processors know it: its subnormal numbers do not depend on how the thread treats them.
#if defined(__AVX512F__)
  // The sign is there twice, of which the second one is cleared.
  const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i half = _mm256_andnot_si256(_mm256_set1_epi16(0x4000), _mm256_slli_epi16(x, 7));
  return bit_cast<VF>(_mm512_cvtph_ps(half)) * 256.0f;
#elif defined(__F16C__)
  const __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i half = _mm_andnot_si128(_mm_set1_epi16(0x4000), _mm_slli_epi16(x, 7));
  return bit_cast<VF>(_mm256_cvtph_ps(half)) * 256.0f;
#else
  // Exponent and mantissa moved into place are the value times 2^-120.
  const VU wide = widen(&p->bits);
  const VF magnitude = bit_cast<VF>((wide & 0x7f) << 20) * 1.329227995784916e36f;
  return bit_cast<VF>(bit_cast<VU>(magnitude) | (wide & 0x80) << 24);
#endif
}

inline VF load(const E5M2* p) {  // the upper half of a float16
#if defined(__AVX512F__)
  const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return bit_cast<VF>(_mm512_cvtph_ps(_mm256_slli_epi16(x, 8)));
#elif defined(__F16C__)
  const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return bit_cast<VF>(_mm256_cvtph_ps(_mm_slli_epi16(x, 8)));
#else
  return of_half(widen(&p->bits) << 8);
#endif
}

inline VF load(const I8* p) {
#if defined(__AVX512F__)
  return bit_cast<VF>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
#elif defined(__AVX2__)
  return bit_cast<VF>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))));
#else
  VC x;
  __builtin_memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, VF);
#endif
}

inline float to_float(float x) { return x; }
inline float to_float(BF16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(F16 x) {
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13, sign = (x.bits & 0x8000u) << 16;
  const uint32_t finite = bit_cast<uint32_t>(bit_cast<float>(magnitude) * 5.192296858534828e33f);
  return bit_cast<float>(finite | (magnitude >= 0x0f800000u ? 0x7f800000u : 0u) | sign);
}

inline float to_float(E4M3 x) {
  const float magnitude = bit_cast<float>((x.bits & 0x7fu) << 20) * 1.329227995784916e36f;
  return x.bits & 0x80 ? -magnitude : magnitude;
}
inline float to_float(I8 x) { return x.bits; }
inline float to_float(E5M2 x) { return to_float(F16{static_cast<uint16_t>(x.bits << 8)}); }

// Rounds to nearest, ties to even; NaN stays NaN. What is beyond the largest number of 8 bits becomes that.
template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline BF16 from_float<BF16>(float x) {
  const uint32_t u = bit_cast<uint32_t>(x);
  if (x != x) return BF16{0x7fc0};
  return BF16{static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
template <>
inline F16 from_float<F16>(float x) {
  const uint32_t u = bit_cast<uint32_t>(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // 65520: rounds to infinity
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // below 2^-14: the sum's last bit is 2^-24
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<uint32_t>(0.5f);
  } else {
    half = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  }
  return F16{static_cast<uint16_t>(half | sign)};
}

// Of 8 bits: `drop` bits of float32's mantissa go. least: the smallest normal number; unit: 2^23 times the smallest one.
inline uint8_t byte_of(float x, int drop, uint32_t bias, float largest, uint8_t largest_bits, float least, float unit) {
  const uint32_t u = bit_cast<uint32_t>(x), sign = u >> 24 & 0x80;
  if (x != x) return static_cast<uint8_t>(sign | 0x7f);
  const float magnitude = bit_cast<float>(u & 0x7fffffff);
  uint32_t bits = largest_bits;
  if (magnitude < least) bits = bit_cast<uint32_t>(magnitude + unit) - bit_cast<uint32_t>(unit);
  else if (magnitude < largest) {
    const uint32_t m = u & 0x7fffffff;
    bits = ((m + (1u << (drop - 1)) - 1 + (m >> drop & 1)) >> drop) - (bias << (23 - drop));
  }
  return static_cast<uint8_t>(sign | bits);
}
template <>
inline E4M3 from_float<E4M3>(float x) {
  return E4M3{byte_of(x, 20, 120, 448.0f, 0x7e, 0.015625f, 16384.0f)};
}
template <>
inline E5M2 from_float<E5M2>(float x) {
  return E5M2{byte_of(x, 21, 112, 57344.0f, 0x7b, 6.103515625e-5f, 128.0f)};
}

// a where mask is set, else b. The ternary operator on vectors compiles to a blend.
inline VF select(VI mask, VF a, VF b) { return mask ? a : b; }
inline VF maximum(VF a, VF b) { return a > b ? a : b; }

// One number of all lanes, of which `join` makes one of two vectors.
template <class F>
inline float joined(VF x, const F& join) {
#if defined(__AVX512F__)
  const auto as_m512 = [](VF y) { return bit_cast<__m512>(y); };
  const __mmask16 all = 0xffff;
  x = join(x, bit_cast<VF>(_mm512_maskz_shuffle_f32x4(all, as_m512(x), as_m512(x), 0x4e)));
  x = join(x, bit_cast<VF>(_mm512_maskz_shuffle_f32x4(all, as_m512(x), as_m512(x), 0xb1)));
  x = join(x, bit_cast<VF>(_mm512_maskz_permute_ps(all, as_m512(x), 0x4e)));
  x = join(x, bit_cast<VF>(_mm512_maskz_permute_ps(all, as_m512(x), 0xb1)));
#else
  for (int i = 1; i < kLanes; ++i) x[0] = join(broadcast(x[0]), broadcast(x[i]))[0];
#endif
  return x[0];
}

inline float horizontal_max(VF x) {
  return joined(x, [](VF a, VF b) { return maximum(a, b); });
}
inline float horizontal_sum(VF x) {
  return joined(x, [](VF a, VF b) { return a + b; });
}

// As `joined`, where whole numbers would not always stay what they are: as floats, they may be taken for zero.
inline int32_t horizontal_sum(VI x) {
#if defined(__AVX512F__)
  const auto as_m512i = [](VI y) { return bit_cast<__m512i>(y); };
  const __mmask16 all = 0xffff;
  x += bit_cast<VI>(_mm512_maskz_shuffle_i32x4(all, as_m512i(x), as_m512i(x), 0x4e));
  x += bit_cast<VI>(_mm512_maskz_shuffle_i32x4(all, as_m512i(x), as_m512i(x), 0xb1));
  x += bit_cast<VI>(_mm512_maskz_shuffle_epi32(all, as_m512i(x), _MM_PERM_BADC));
  x += bit_cast<VI>(_mm512_maskz_shuffle_epi32(all, as_m512i(x), _MM_PERM_CDAB));
  return x[0];
#else
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
#endif
}

inline VF iota() {
  VF x;
  for (int i = 0; i < kLanes; ++i) x[i] = static_cast<float>(i);
  return x;
}

// e^(x - n ln 2) where that is at most half of ln 2 from 0.
inline VF exp_of_rest(VF x, VF n) {
  VF r = x - n * 0.693145752f;  // ln 2 in two parts
  r = r - n * 1.42860677e-6f;
  VF p = r * (1.0f / 720) + (1.0f / 120);
  p = p * r + (1.0f / 24);
  p = p * r + (1.0f / 6);
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p;
}

// e^x for x <= 88, exactly 0 below -87.33 (where the result would be subnormal), to about 2 ulp.
inline VF exp(VF x) {
#if defined(__AVX512F__)
  const VF n = bit_cast<VF>(_mm512_roundscale_ps(bit_cast<__m512>(x * 1.44269504f), _MM_FROUND_TO_NEAREST_INT));
  const VF p = exp_of_rest(x, n);
  const __mmask16 normal = _mm512_cmp_ps_mask(bit_cast<__m512>(x), _mm512_set1_ps(-87.33f), _CMP_NLT_UQ);
  return bit_cast<VF>(_mm512_maskz_scalef_ps(normal, bit_cast<__m512>(p), bit_cast<__m512>(n)));
#else
  const VF shifter = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const VF clamped = maximum(broadcast(-88.0f), x);  // in this order NaN stays NaN
  const VF shifted = clamped * 1.44269504f + shifter;
  const VF n = shifted - shifter;
  const VF p = exp_of_rest(clamped, n);
  const VI exponent = (bit_cast<VI>(shifted) - bit_cast<VI>(shifter)) << 23;
  const VF result = bit_cast<VF>(bit_cast<VI>(p) + exponent);
  return select(x < broadcast(-87.33f), VF{}, result);
#endif
}

// 2^x for x < 128, 0 where that would be subnormal. To 2e-7 of the result as far as x is exact: what rounds e^y's y log2(e)
// is y 1e-7 of it, which is nothing where y is near 0 and the result is where it is not.
inline VF exp2(VF x) {
#if defined(__AVX512F__)
  const VF rest = bit_cast<VF>(_mm512_reduce_ps(bit_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
  const VF n = x - rest;
#else
  const VF shifter = broadcast(12582912.0f);  // as in exp
  const VF clamped = maximum(broadcast(-127.0f), x);
  const VF shifted = clamped + shifter;
  const VF rest = clamped - (shifted - shifter);
#endif
  VF p = rest * 0.0013264714507386088f + 0.009671512991189957f;
  p = p * rest + 0.05550733953714371f;
  p = p * rest + 0.24022242426872253f;
  p = p * rest + 0.6931470036506653f;
  p = p * rest + 1.0f;
#if defined(__AVX512F__)
  const __mmask16 normal = _mm512_cmp_ps_mask(bit_cast<__m512>(x), _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return bit_cast<VF>(_mm512_maskz_scalef_ps(normal, bit_cast<__m512>(p), bit_cast<__m512>(n)));
#else
  const VI exponent = (bit_cast<VI>(shifted) - bit_cast<VI>(shifter)) << 23;
  return select(x < broadcast(-126.0f), VF{}, bit_cast<VF>(bit_cast<VI>(p) + exponent));
#endif
}

// ln x for positive normal x, to about 2 ulp.
inline VF log(VF x) {
  // x = m 2^e with m in [sqrt(1/2), sqrt(2)); ln m = 2 artanh((m - 1) / (m + 1)).
  const VI bits = bit_cast<VI>(x);
  const VI e = (bits - 0x3f3504f3) >> 23;
  const VF m = bit_cast<VF>(bits - (e << 23));
  const VF s = (m - 1.0f) / (m + 1.0f), t = s * s;
  VF p = t * (1.0f / 9) + (1.0f / 7);
  p = p * t + (1.0f / 5);
  p = p * t + (1.0f / 3);
  p = p * t;
  const VF log_m = 2.0f * s + 2.0f * s * p;
  return __builtin_convertvector(e, VF) * 0.693147181f + log_m;
}

// ln(e^a + e^b); -inf where both are.
inline VF log_add_exp(VF a, VF b) {
  const VF hi = maximum(a, b), lo = a > b ? b : a;
  const VF sum = hi + log(1.0f + exp(lo - hi));
  return select(hi == broadcast(-kInfinity), hi, sum);
}

inline void prefetch(const char* p) { __builtin_prefetch(p, 0, 2); }
