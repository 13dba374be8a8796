// The product of rows with a packed weight, y = x W^T + bias: every base linear of a step.
//
// A weight is packed once as panels of 48 columns, [panel][units of K][48]: a unit is 32 bits, one float32 or a pair of
// bfloat16 along K. What is missing at the end of K or of the columns is zero.
//
// NOTE: a sum adds its units one after the other along K, whatever tile it is in: a row's bits depend on nothing beside
// it. Padded columns multiply with every row but are never stored.
#pragma once

#include <atomic>

#include "vector.h"

namespace loraplex {

constexpr int kPanelVecs = 3;
constexpr int64_t kPanelColumns = kPanelVecs * kLanes;
constexpr int64_t kTileRows = 8;  // times 3 vectors: 24 sums, three of weights and one of x fill 28 of 32 registers
// What a thread holds in its second-level cache of 1 MiB: at most 393 KB of x, 147 KB of a panel and as much of the next.
constexpr int64_t kBlockTiles = 16;
constexpr int64_t kBlockUnits = 768;
constexpr int64_t kParallelMultiplies = 65536;  // products from which a second thread pays

#if defined(__AVX512F__)
constexpr bool kPacksFloat = true;
#else
constexpr bool kPacksFloat = false;
#endif
#if defined(__AVX512BF16__)
constexpr bool kPacksBf16 = true;
#else
constexpr bool kPacksBf16 = false;
#endif

inline int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How a weight [columns, k] lies when packed.
template <class T>
struct PackedShape {
  int64_t k, columns;

  int64_t units() const { return div_up(k, kPerUnit<T>); }
  int64_t panels() const { return div_up(columns, kPanelColumns); }
  int64_t panel_elements() const { return units() * kPanelColumns * kPerUnit<T>; }
};

// Sixteen columns' units from `element` on, one vector per unit.
template <class T>
inline void pack_lanes(const T* weight, int64_t k, int64_t num_columns, int64_t element, T* packed) {
  const int64_t left = std::min(k - element, int64_t(Wide<T>::kElements));
  Units lanes[kLanes] = {};
  for (int64_t c = 0; c < num_columns; ++c) lanes[c] = load_units(weight + c * k + element, left);
  transpose(lanes);
  for (int64_t u = 0; u < div_up(left, kPerUnit<T>); ++u)
    std::memcpy(packed + u * kPanelColumns * kPerUnit<T>, &lanes[u], sizeof(Units));
}

template <class T>
inline void pack_weight(const T* weight, PackedShape<T> shape, T* packed, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
  for (int64_t panel = 0; panel < shape.panels(); ++panel)
    for (int64_t element = 0; element < shape.k; element += Wide<T>::kElements)
      for (int v = 0; v < kPanelVecs; ++v) {
        const int64_t column = panel * kPanelColumns + v * kLanes;
        const int64_t num_columns = std::clamp<int64_t>(shape.columns - column, 0, kLanes);
        pack_lanes(weight + std::min(column, shape.columns) * shape.k, shape.k, num_columns, element,
                   packed + panel * shape.panel_elements() + element * kPanelColumns + v * Wide<T>::kElements);
      }
}

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

// Everything of one call; pointers are borrowed.
template <class T>
struct LinearLaunch {
  const T *x, *packed, *bias;  // [num_rows, k], packed, [columns] or null
  T* y;                        // [num_rows, columns]
  int64_t num_rows;
  PackedShape<T> shape;

  int64_t num_tiles() const { return div_up(num_rows, kTileRows); }
  // Rows are spread evenly, since a tile of a few rows takes longer for each.
  int64_t tile_begin(int64_t tile) const { return tile * num_rows / num_tiles(); }
};

template <class T>
inline void finish_rows(const LinearLaunch<T>& l, const float* sums, int64_t begin, int64_t end, int64_t column) {
  const int64_t width = std::min(l.shape.columns - column, kPanelColumns);
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t n = width - i;
    const Vec bias = l.bias ? load(l.bias + column + i, n) : Vec{};
    for (int64_t row = begin; row < end; ++row) {
      const Vec sum = load(sums + (row - begin) * kPanelColumns + i);
      store(l.y + row * l.shape.columns + column + i, l.bias ? sum + bias : sum, n);
    }
  }
}

// One panel for the tiles [begin, end); `next` is the panel that comes after it, or null.
template <class T>
inline void run_panel(const LinearLaunch<T>& l, int64_t panel, int64_t begin, int64_t end, const T* next) {
  alignas(64) float sums[kBlockTiles * kTileRows * kPanelColumns];
  const int64_t first_row = l.tile_begin(begin), num_elements = kBlockUnits * kPerUnit<T>;
  const T* const weights = l.packed + panel * l.shape.panel_elements();
  for (int64_t element = 0; element < l.shape.k; element += num_elements) {
    const bool is_last = element + num_elements >= l.shape.k;
    const T* const block = weights + element * kPanelColumns;
    const T* const ahead = is_last ? next : block + num_elements * kPanelColumns;
    LinearTile<T> tile{nullptr, block, l.shape.k, std::min(l.shape.k - element, num_elements), nullptr, element > 0};
    tile.ahead_step = ahead ? div_up(kPanelColumns * 4, end - begin) : 0;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = l.tile_begin(t), next_row = l.tile_begin(t + 1);
      tile.x = l.x + row * l.shape.k + element;
      tile.sums = sums + (row - first_row) * kPanelColumns;
      tile.ahead = reinterpret_cast<const char*>(ahead ? ahead : block) +
                   (t - begin) * tile.ahead_step * div_up(tile.num_elements, kPerUnit<T>);
      run_linear_tile(tile, next_row - row);
      if (is_last) finish_rows(l, tile.sums, row, next_row, panel * kPanelColumns);
    }
  }
}

template <class T>
inline void run_packed_linear(const LinearLaunch<T>& l, int num_threads) {
  if (l.num_rows * l.shape.k * l.shape.columns <= kParallelMultiplies) num_threads = 1;
  const int64_t panels = l.shape.panels(), tiles = l.num_tiles();
  const int64_t enough = num_threads > 1 ? div_up(2 * num_threads, panels) : 1;
  const int64_t blocks = std::min(tiles, std::max(div_up(tiles, kBlockTiles), enough));
  const int64_t num_items = blocks * panels;
  // claimed in order by all threads, each thread one ahead of its work, so as to know what it will read
  std::atomic<int64_t> claimed{0};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  for (int64_t now = claimed++, next; now < num_items; now = next) {
    next = claimed++;
    const int64_t block = now / panels;
    run_panel(l, now % panels, block * tiles / blocks, (block + 1) * tiles / blocks,
              next < num_items ? l.packed + next % panels * l.shape.panel_elements() : nullptr);
  }
}

}  // namespace loraplex
