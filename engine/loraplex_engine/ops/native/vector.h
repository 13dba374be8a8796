// Sixteen lanes of float32 and how the two storage types, float32 and bfloat16, get into and out of them.
//
// Written in the compiler's vector extensions, so one source serves any width of registers.
//
// NOTE: a row's bits must not depend on how many rows are computed beside it. So products and sums are fused by
// multiply_add alone, never where the compiler likes it (-ffp-contract=off), and -ffast-math is out of the question.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace loraplex {

constexpr int kLanes = 16;

typedef float Vec __attribute__((vector_size(64)));
typedef uint32_t Units __attribute__((vector_size(64)));  // raw 32-bit units: one float32 or a pair of bfloat16
typedef int32_t Mask __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

template <class T>
constexpr int kPerUnit = 4 / sizeof(T);

inline Vec splat(float s) { return Vec{s, s, s, s, s, s, s, s, s, s, s, s, s, s, s, s}; }
inline Units splat(uint32_t s) { return Units{s, s, s, s, s, s, s, s, s, s, s, s, s, s, s, s}; }

template <class To, class From>
inline To cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return cast<float>(uint32_t(x.bits) << 16); }

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline Vec load(const bf16* p) {
  Halves h;
  std::memcpy(&h, p, sizeof(h));
  return cast<Vec>(__builtin_convertvector(h, Units) << 16);
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }

#ifdef __AVX512BF16__
inline Halves round_to_halves(Vec v) { return cast<Halves>(_mm512_cvtneps_pbh(cast<__m512>(v))); }
inline Units round_to_bf16(Vec v) { return __builtin_convertvector(round_to_halves(v), Units); }
#else
inline Units round_to_bf16(Vec v) {
  const Units bits = cast<Units>(v);
  const Units rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return v == v ? rounded : splat(0x7fc0u);
}
inline Halves round_to_halves(Vec v) { return __builtin_convertvector(round_to_bf16(v), Halves); }
#endif

inline void store(bf16* p, Vec v) {
  const Halves h = round_to_halves(v);
  std::memcpy(p, &h, sizeof(h));
}

// The first `n` elements, zeros after them; nothing past them is read.
template <class T>
inline Vec load(const T* p, int64_t n) {
  if (n >= kLanes) return load(p);
  T part[kLanes] = {};
  std::memcpy(part, p, n * sizeof(T));
  return load(part);
}

template <class T>
inline void store(T* p, Vec v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  T part[kLanes];
  store(part, v);
  std::memcpy(p, part, n * sizeof(T));
}

// What is left after a trip through the storage type.
inline Vec round_to(Vec v, const float*) { return v; }
inline Vec round_to(Vec v, const bf16*) { return cast<Vec>(round_to_bf16(v) << 16); }

template <class T>
inline Units load_units(const T* p) {
  Units u;
  std::memcpy(&u, p, sizeof(u));
  return u;
}

// The first `n` elements as raw units, zeros after them.
template <class T>
inline Units load_units(const T* p, int64_t n) {
  Units u = {};
  std::memcpy(&u, p, n * sizeof(T));
  return u;
}

// A register of T widened to float32: one vector for float32; for bfloat16 two, of the even and of the odd elements,
// which costs one operation each where splitting into halves would cost two. Sums may stay in that order.
template <class T>
struct Wide {
  static constexpr int kVecs = kPerUnit<T>;
  static constexpr int64_t kElements = kLanes * kVecs;
  Vec part[kVecs];
};

inline Wide<float> widen(Units u, const float*) { return {{cast<Vec>(u)}}; }
inline Wide<bf16> widen(Units u, const bf16*) { return {{cast<Vec>(u << 16), cast<Vec>(u & 0xffff0000u)}}; }

inline Units narrow(const Wide<float>& w) { return cast<Units>(w.part[0]); }
inline Units narrow(const Wide<bf16>& w) { return round_to_bf16(w.part[0]) | (round_to_bf16(w.part[1]) << 16); }

template <class T>
inline Wide<T> load_wide(const T* p) {
  return widen(load_units(p), p);
}

template <class T>
inline Wide<T> load_wide(const T* p, int64_t n) {
  return widen(n >= Wide<T>::kElements ? load_units(p) : load_units(p, n), p);
}

// Float32 values in the order in which T's register holds its elements.
inline Wide<float> spread(const float* p, int64_t n, const float*) { return {{load(p, n)}}; }
inline Wide<bf16> spread(const float* p, int64_t n, const bf16*) {
  const Vec low = load(p, n), high = n > kLanes ? load(p + kLanes, n - kLanes) : Vec{};
  return {{__builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
           __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)}};
}

template <class T>
inline void store_wide(T* p, const Wide<T>& w, int64_t n = Wide<T>::kElements) {
  const Units u = narrow(w);
  if (n >= Wide<T>::kElements) {
    std::memcpy(p, &u, sizeof(u));
  } else {
    std::memcpy(p, &u, n * sizeof(T));
  }
}

// acc + x * y, lane by lane; fused where the machine can.
inline Vec multiply_add(Vec acc, Vec x, Vec y) {
#if defined(__AVX512F__)
  return cast<Vec>(_mm512_fmadd_ps(cast<__m512>(x), cast<__m512>(y), cast<__m512>(acc)));
#elif defined(__FMA__)
  struct Pair {
    __m256 low, high;
  };
  const Pair a = cast<Pair>(x), b = cast<Pair>(y), c = cast<Pair>(acc);
  return cast<Vec>(Pair{_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)});
#else
  return acc + x * y;
#endif
}

// The same over raw units; a pair of bfloat16 adds both products to its lane.
inline Vec multiply_add(Vec acc, Units x, Units y, const float*) {
  return multiply_add(acc, cast<Vec>(x), cast<Vec>(y));
}

inline Vec multiply_add(Vec acc, Units x, Units y, const bf16*) {
#ifdef __AVX512BF16__
  return cast<Vec>(_mm512_dpbf16_ps(cast<__m512>(acc), cast<__m512bh>(x), cast<__m512bh>(y)));
#else
  acc = multiply_add(acc, cast<Vec>(x & 0xffff0000u), cast<Vec>(y & 0xffff0000u));
  return multiply_add(acc, cast<Vec>(x << 16), cast<Vec>(y << 16));
#endif
}

// Lanes that differ in bit S of their number change places between a and b: after it, a holds the lanes of both whose bit
// is clear, b those whose bit is set.
template <int S, class V, int... L>
inline void swap_lanes(V& a, V& b, std::integer_sequence<int, L...>) {
  const V first = __builtin_shufflevector(a, b, ((L & S) ? kLanes + L - S : L)...);
  const V second = __builtin_shufflevector(a, b, ((L & S) ? kLanes + L : L + S)...);
  a = first;
  b = second;
}

template <int S, class V>
inline void swap_lanes(V& a, V& b) {
  swap_lanes<S>(a, b, std::make_integer_sequence<int, kLanes>());
}

// Lane by lane, v of lanes whose number differs in bit S.
template <int S, int... L>
inline Vec partner(Vec v, std::integer_sequence<int, L...>) {
  return __builtin_shufflevector(v, v, (L ^ S)...);
}

template <int S>
inline Vec partner(Vec v) {
  return partner<S>(v, std::make_integer_sequence<int, kLanes>());
}

// Always the same tree: lanes 8 apart, then 4, 2, 1.
inline float sum(Vec v) {
  v = v + partner<8>(v);
  v = v + partner<4>(v);
  v = v + partner<2>(v);
  return (v + partner<1>(v))[0];
}

// Four sums for little more than the price of one, each by the tree of `sum`.
inline void sum4(Vec a, Vec b, Vec c, Vec d, float* sums) {
  swap_lanes<8>(a, b);
  swap_lanes<8>(c, d);
  Vec ab = a + b, cd = c + d;
  swap_lanes<4>(ab, cd);
  Vec all = ab + cd;  // lanes 0-3 of a, 4-7 of c, 8-11 of b, 12-15 of d
  all = all + partner<2>(all);
  all = all + partner<1>(all);
  sums[0] = all[0];
  sums[1] = all[8];
  sums[2] = all[4];
  sums[3] = all[12];
}

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

inline float max(Vec v) {
  v = max(v, partner<8>(v));
  v = max(v, partner<4>(v));
  v = max(v, partner<2>(v));
  return max(v, partner<1>(v))[0];
}

inline bool is_any_above(Vec v, float bound) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask(cast<__m512>(v), _mm512_set1_ps(bound), _CMP_GT_OQ) != 0;
#else
  return max(v) > bound;
#endif
}

// p * 2^n for whole n, exactly 0 where x, which n rounds, is below -126; NaN stays NaN.
inline Vec scale_by_power(Vec p, Vec n, Vec x) {
#ifdef __AVX512F__
  const __mmask16 is_normal = _mm512_cmp_ps_mask(cast<__m512>(x), _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return cast<Vec>(_mm512_maskz_scalef_ps(is_normal, cast<__m512>(p), cast<__m512>(n)));
#else
  const Units power = cast<Units>(__builtin_convertvector(n, Mask) + 127) << 23;
  const Vec result = x == x ? p * cast<Vec>(power) : x;
  return x < splat(-126.0f) ? Vec{} : result;
#endif
}

inline Vec round_to_whole(Vec x) {
#ifdef __AVX512F__
  return cast<Vec>(_mm512_roundscale_ps(cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23
  return (x + magic) - magic;
#endif
}

// 2^x for x up to 127: to 2 ulp for float32, to 1e-4 for bfloat16, whose own half ulp is 2e-3; exactly 1 at 0. The
// polynomials have the least relative error on [-0.5, 0.5] of those that are 1 at 0.
inline Vec exp2(Vec x, const float*) {
  const Vec n = round_to_whole(x), r = x - n;
  Vec p = multiply_add(splat(9.6715126986e-3f), r, splat(1.3264727255e-3f));
  p = multiply_add(splat(5.5507337437e-2f), p, r);
  p = multiply_add(splat(2.4022242084e-1f), p, r);
  p = multiply_add(splat(6.9314697760e-1f), p, r);
  return scale_by_power(multiply_add(splat(1.0f), p, r), n, x);
}

inline Vec exp2(Vec x, const bf16*) {
  const Vec n = round_to_whole(x), r = x - n;
  Vec p = multiply_add(splat(2.4221096283e-1f), r, splat(5.5008931464e-2f));
  p = multiply_add(splat(6.9328292745e-1f), p, r);
  return scale_by_power(multiply_add(splat(1.0f), p, r), n, x);
}

// exp to 2 ulp in [-87, 88]; below it exactly 0, above it exp(88). NaN stays NaN. Polynomial of Cephes (Moshier).
inline Vec exp(Vec x) {
  const Vec low = splat(-87.0f), high = splat(88.0f);
  const Vec clamped = x < low ? low : (x > high ? high : x);
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Vec shifted = multiply_add(magic, clamped, splat(1.44269504f));
  const Vec n = shifted - magic;
  const Vec r = multiply_add(multiply_add(clamped, n, splat(-0.693359375f)), n, splat(2.12194440e-4f));
  Vec p = multiply_add(splat(1.3981999507e-3f), r, splat(1.9875691500e-4f));
  p = multiply_add(splat(8.3334519073e-3f), p, r);
  p = multiply_add(splat(4.1665795894e-2f), p, r);
  p = multiply_add(splat(1.6666665459e-1f), p, r);
  p = multiply_add(splat(5.0000001201e-1f), p, r);
  p = multiply_add(r, p, r * r) + splat(1.0f);
  const Units exponent = (cast<Units>(shifted) - cast<Units>(magic) + 127) << 23;
  const Vec result = p * cast<Vec>(exponent);
  return x < low ? Vec{} : result;
}

template <int S>
inline void transpose_step(Units (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; ++i)
    if (!(i & S)) swap_lanes<S>(rows[i], rows[i + S]);
}

inline void transpose(Units (&rows)[kLanes]) {
  transpose_step<1>(rows);
  transpose_step<2>(rows);
  transpose_step<4>(rows);
  transpose_step<8>(rows);
}

}  // namespace loraplex
