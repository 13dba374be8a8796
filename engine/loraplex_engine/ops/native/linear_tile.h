// One tile of the base linears: a few rows of x times one packed panel, over a block of K.
#pragma once

#include "vector.h"

namespace loraplex {

constexpr int kPanelVecs = 3;
constexpr int64_t kPanelColumns = kPanelVecs * kLanes;

inline int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A block of K: some rows' units times a panel's.
template <class T>
struct LinearTile {
  const T *x, *panel;
  int64_t x_stride, num_elements;  // `num_elements` along K
  float* sums;                     // [rows, 48]
  bool continues;                  // adds to what is in `sums`
  const char* ahead;               // asked for meanwhile, `ahead_step` bytes a unit
  int64_t ahead_step;
};

template <class T>
inline uint32_t unit_at(const T* x, int64_t n) {
  uint32_t unit = 0;
  std::memcpy(&unit, x, n * sizeof(T));
  return unit;
}

template <class T, int R>
inline void add_unit(Vec (&acc)[R][kPanelVecs], const T* x, int64_t x_stride, int64_t num_elements, const T* panel) {
  Units weights[kPanelVecs];
#pragma GCC unroll 3
  for (int v = 0; v < kPanelVecs; ++v) weights[v] = load_units(panel + v * Wide<T>::kElements);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Units row = splat(unit_at(x + r * x_stride, num_elements));
#pragma GCC unroll 3
    for (int v = 0; v < kPanelVecs; ++v) acc[r][v] = multiply_add(acc[r][v], row, weights[v], panel);
  }
}

template <class T, int R>
void run_linear_tile(const LinearTile<T>& tile) {
  constexpr int64_t kStep = kPanelColumns * kPerUnit<T>;
  Vec acc[R][kPanelVecs] = {};
  const T *x = tile.x, *panel = tile.panel;
  const char* ahead = tile.ahead;
  const int64_t x_stride = tile.x_stride, ahead_step = tile.ahead_step;
  for (const T* end = x + tile.num_elements / kPerUnit<T> * kPerUnit<T>; x < end; x += kPerUnit<T>, panel += kStep) {
    for (int v = 0; v < kPanelVecs; ++v) __builtin_prefetch(ahead + v * 64, 0, 2);
    ahead += ahead_step;
    add_unit<T, R>(acc, x, x_stride, kPerUnit<T>, panel);
  }
  if (kPerUnit<T> > 1 && tile.num_elements % kPerUnit<T>) add_unit<T, R>(acc, x, x_stride, 1, panel);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kPanelVecs; ++v) {
      float* const sum = tile.sums + r * kPanelColumns + v * kLanes;
      store(sum, tile.continues ? load(sum) + acc[r][v] : acc[r][v]);
    }
}

template <class T>
inline void run_linear_tile(const LinearTile<T>& tile, int64_t num_rows) {
  switch (num_rows) {
    case 1: return run_linear_tile<T, 1>(tile);
    case 2: return run_linear_tile<T, 2>(tile);
    case 3: return run_linear_tile<T, 3>(tile);
    case 4: return run_linear_tile<T, 4>(tile);
    case 5: return run_linear_tile<T, 5>(tile);
    case 6: return run_linear_tile<T, 6>(tile);
    case 7: return run_linear_tile<T, 7>(tile);
    default: return run_linear_tile<T, 8>(tile);
  }
}

// Tiles on vector registers. What a thread holds in its second-level cache of 1 MiB: at most 393 KB of x, 147 KB of a
// panel and as much of the next.
template <class T>
struct VectorTiles {
  static constexpr int64_t kRows = 8;  // times 3 vectors: 24 sums, three of weights and one of x fill 28 of 32 registers
  static constexpr int64_t kBlockTiles = 16;
  static constexpr int64_t kBlockUnits = 768;

  void run(const LinearTile<T>& tile, int64_t num_rows) { run_linear_tile(tile, num_rows); }
};

}  // namespace loraplex
