// Norms, gated activation, rotary embedding with the store into the cache: one function per row, rows in parallel.
#pragma once

#include "vector.h"

namespace loraplex {

// Rows are worth a second thread from about this many elements on.
constexpr int64_t kParallelElements = 16384;

template <class F>
inline void for_rows(int64_t num_rows, int64_t row_elements, int num_threads, const F& body) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows * row_elements > kParallelElements)
  for (int64_t row = 0; row < num_rows; ++row) body(row);
}

template <class T>
inline float sum_of_squares(const T* x, int64_t n) {
  Vec acc[4] = {};
  for (int64_t i = 0, turn = 0; i < n; i += kLanes, ++turn) {
    const Vec v = load(x + i, n - i);
    acc[turn % 4] = multiply_add(acc[turn % 4], v, v);
  }
  return sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

template <class T>
inline void rms_norm_row(const T* x, const T* weight, float eps, int64_t n, T* y) {
  const Vec scale = splat(1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + eps));
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec normal = round_to(load(x + i, n - i) * scale, x);
    store(y + i, normal * load(weight + i, n - i), n - i);
  }
}

template <class T>
inline void add_row(T* residual, const T* x, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes)
    store(residual + i, load(residual + i, n - i) + load(x + i, n - i), n - i);
}

template <class T>
inline void silu_and_mul_row(const T* gate, const T* up, int64_t n, T* y) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec g = load(gate + i, n - i);
    const Vec silu = round_to(g / (splat(1.0f) + exp(-g)), gate);
    store(y + i, silu * load(up + i, n - i), n - i);
  }
}

// cos_sin holds `half` cosines, then `half` sines.
template <class T>
inline void rotate_head(const T* x, const float* cos_sin, int64_t half, T* y) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const Vec cos = load(cos_sin + i, left), sin = load(cos_sin + half + i, left);
    const Vec a = load(x + i, left), b = load(x + half + i, left);
    store(y + i, multiply_add(a * cos, -b, sin), left);
    store(y + half + i, multiply_add(b * cos, a, sin), left);
  }
}

}  // namespace loraplex
