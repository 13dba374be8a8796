// The product of rows with a packed weight, y = x W^T + bias: every base linear of a step.
//
// A weight is packed once as panels of 48 columns, [panel][units of K][48]: a unit is 32 bits, one float32 or a pair of
// bfloat16 along K. What is missing at the end of K or of the columns is zero.
//
// NOTE: the order of a sum is that of K alone, whatever tile it is in: a row's bits depend on nothing beside it. Padded
// columns multiply with every row but are never stored.
#pragma once

#include <atomic>

#include "linear_amx.h"
#include "linear_tile.h"

namespace loraplex {

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

// Everything of one call; pointers are borrowed.
template <class T>
struct LinearLaunch {
  const T *x, *packed, *bias;  // [num_rows, k], packed, [columns] or null
  T* y;                        // [num_rows, columns]
  int64_t num_rows;
  PackedShape<T> shape;
};

// Rows are spread evenly, since a tile of a few rows takes longer for each.
template <class Tiles>
struct Spread {
  int64_t num_rows;

  int64_t num_tiles() const { return div_up(num_rows, Tiles::kRows); }
  int64_t begin(int64_t tile) const { return tile * num_rows / num_tiles(); }
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
template <class Tiles, class T>
inline void run_panel(const LinearLaunch<T>& l, Tiles& tiles, int64_t panel, int64_t begin, int64_t end,
                      const T* next) {
  alignas(64) float sums[Tiles::kBlockTiles * Tiles::kRows * kPanelColumns];
  const Spread<Tiles> rows{l.num_rows};
  const int64_t first_row = rows.begin(begin), num_elements = Tiles::kBlockUnits * kPerUnit<T>;
  const T* const weights = l.packed + panel * l.shape.panel_elements();
  for (int64_t element = 0; element < l.shape.k; element += num_elements) {
    const bool is_last = element + num_elements >= l.shape.k;
    const T* const block = weights + element * kPanelColumns;
    const T* const ahead = is_last ? next : block + num_elements * kPanelColumns;
    LinearTile<T> tile{nullptr, block, l.shape.k, std::min(l.shape.k - element, num_elements), nullptr, element > 0};
    tile.ahead_step = ahead ? div_up(kPanelColumns * 4, end - begin) : 0;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = rows.begin(t), next_row = rows.begin(t + 1);
      tile.x = l.x + row * l.shape.k + element;
      tile.sums = sums + (row - first_row) * kPanelColumns;
      tile.ahead = reinterpret_cast<const char*>(ahead ? ahead : block) +
                   (t - begin) * tile.ahead_step * div_up(tile.num_elements, kPerUnit<T>);
      tiles.run(tile, next_row - row);
      if (is_last) finish_rows(l, tile.sums, row, next_row, panel * kPanelColumns);
    }
  }
}

template <class Tiles, class T>
inline void run_packed_linear_on(const LinearLaunch<T>& l, int num_threads) {
  if (l.num_rows * l.shape.k * l.shape.columns <= kParallelMultiplies) num_threads = 1;
  const int64_t panels = l.shape.panels(), num_tiles = Spread<Tiles>{l.num_rows}.num_tiles();
  const int64_t enough = num_threads > 1 ? div_up(2 * num_threads, panels) : 1;
  const int64_t blocks = std::min(num_tiles, std::max(div_up(num_tiles, Tiles::kBlockTiles), enough));
  const int64_t num_items = blocks * panels;
  // claimed in order by all threads, each thread one ahead of its work, so as to know what it will read
  std::atomic<int64_t> claimed{0};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Tiles tiles;
    for (int64_t now = claimed++, next; now < num_items; now = next) {
      next = claimed++;
      const int64_t block = now / panels;
      run_panel(l, tiles, now % panels, block * num_tiles / blocks, (block + 1) * num_tiles / blocks,
                next < num_items ? l.packed + next % panels * l.shape.panel_elements() : nullptr);
    }
  }
}

// NOTE: which tiles serve a dtype is settled once for a process, whatever the number of rows: they round differently.
template <class T>
inline void run_packed_linear(const LinearLaunch<T>& l, int num_threads) {
  run_packed_linear_on<VectorTiles<T>>(l, num_threads);
}

inline void run_packed_linear(const LinearLaunch<bf16>& l, int num_threads) {
  if (may_use_amx()) return run_packed_linear_on<AmxTiles>(l, num_threads);
  run_packed_linear_on<VectorTiles<bf16>>(l, num_threads);
}

}  // namespace loraplex
