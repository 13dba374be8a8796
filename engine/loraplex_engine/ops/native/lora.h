// Segmented LoRA over a table of pointers, each module at its own rank.
//
// Work is cut into tasks of some rows of one segment and some ranks (shrink) or columns (expand) of one slice. A sum runs
// in an order fixed by K (shrink) or by the rank (expand), whatever the task holds beside it.
#pragma once

#include <vector>

#include "vector.h"

namespace loraplex {

constexpr int64_t kRowsPerTask = 32;
constexpr int64_t kRanksPerTask = 16;
constexpr int64_t kColumnsPerTask = 512;
constexpr int64_t kParallelProducts = 32768;  // products from which a second thread pays

// What one launch needs; all arrays are borrowed.
struct LoraLaunch {
  const int64_t* entries;   // [N, L, groups, slices, 5]: addresses of A and B, rank, addresses of g and c
  const float* scalings;    // [N, L, groups, slices]
  const int64_t* features;  // [slices, 3]: first output column, output columns, input columns
  const int32_t* rows;      // [T_lora]
  const int32_t* starts;    // [S + 1]
  const int32_t* slots;     // [S]
  int64_t num_segments, slot_stride, place, num_slices;  // place: offset of (layer, group) within a slot, in slices
  int64_t max_rank, in_features, out_features;

  int64_t cell(int64_t segment, int64_t slice) const { return slots[segment] * slot_stride + place + slice; }
  int64_t width() const { return num_slices * max_rank; }
};

struct LoraTask {
  const void* matrix;           // A or B of the module
  int64_t rank;
  int64_t row_begin, row_end;   // positions in the sorted rows
  int64_t begin, end;           // ranks (shrink) or columns of the slice (expand)
  int64_t v_column;             // first column of the slice in v
  int64_t y_column, width;      // of the slice in y
  float scaling;
  const float *g, *c;           // of the module, null: 1 and 0
};

struct LoraPlan {
  std::vector<LoraTask> shrink, expand;
  int64_t products = 0;  // of the shrink, to judge whether threads pay
};

inline void plan_module(const LoraLaunch& l, int64_t segment, int64_t slice, LoraPlan& plan) {
  const int64_t cell = l.cell(segment, slice);
  const int64_t* entry = l.entries + cell * 5;
  const int64_t rank = entry[2], width = l.features[slice * 3 + 1];
  const float *g = reinterpret_cast<const float*>(entry[3]), *c = reinterpret_cast<const float*>(entry[4]);
  if (rank == 0 && !g && !c) return;
  const float scaling = rank == 0 ? 0.0f : l.scalings[cell];
  LoraTask task{nullptr, rank, 0, 0, 0, 0, slice * l.max_rank, l.features[slice * 3], width, scaling, g, c};
  for (int64_t row = l.starts[segment]; row < l.starts[segment + 1]; row += kRowsPerTask) {
    task.row_begin = row;
    task.row_end = std::min<int64_t>(row + kRowsPerTask, l.starts[segment + 1]);
    plan.products += (task.row_end - row) * (rank * l.in_features + width);
    task.matrix = reinterpret_cast<const void*>(entry[0]);
    for (task.begin = 0; task.begin < rank; task.begin += kRanksPerTask) {
      task.end = std::min(rank, task.begin + kRanksPerTask);
      plan.shrink.push_back(task);
    }
    task.matrix = reinterpret_cast<const void*>(entry[1]);
    for (task.begin = 0; task.begin < width; task.begin += kColumnsPerTask) {
      task.end = std::min(width, task.begin + kColumnsPerTask);
      plan.expand.push_back(task);
    }
  }
}

inline void make_plan(const LoraLaunch& l, LoraPlan& plan) {
  plan.shrink.clear();
  plan.expand.clear();
  plan.products = 0;
  for (int64_t segment = 0; segment < l.num_segments; ++segment)
    for (int64_t slice = 0; slice < l.num_slices; ++slice) plan_module(l, segment, slice, plan);
}

// v[r][c] = x[r] . a[c] over k features, for C = 1 or 4 rows of A.
template <class T, int R, int C>
inline void dot_block(const T* const* x, const T* a, int64_t k, float* v, int64_t v_stride) {
  constexpr int64_t kStep = kLanes * kPerUnit<T>;
  Vec acc[R][C] = {};
  Units left[R];
  int64_t i = 0;
  for (; i + kStep <= k; i += kStep) {
    for (int r = 0; r < R; ++r) left[r] = load_units(x[r] + i);
    for (int c = 0; c < C; ++c) {
      const Units right = load_units(a + c * k + i);
      __builtin_prefetch(a + (C + c) * k + i, 0, 2);
      for (int r = 0; r < R; ++r) acc[r][c] = multiply_add(acc[r][c], left[r], right, a);
    }
  }
  if (i < k) {
    for (int r = 0; r < R; ++r) left[r] = load_units(x[r] + i, k - i);
    for (int c = 0; c < C; ++c) {
      const Units right = load_units(a + c * k + i, k - i);
      for (int r = 0; r < R; ++r) acc[r][c] = multiply_add(acc[r][c], left[r], right, a);
    }
  }
  for (int r = 0; r < R; ++r) {
    if constexpr (C == 4) {
      sum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3], v + r * v_stride);
    } else {
      v[r * v_stride] = sum(acc[r][0]);
    }
  }
}

template <class T, int R>
inline void shrink_rows(const LoraLaunch& l, const LoraTask& task, const T* x, int64_t row, float* v) {
  const T* inputs[R];
  for (int r = 0; r < R; ++r) inputs[r] = x + l.rows[row + r] * l.in_features;
  const T* a = static_cast<const T*>(task.matrix);
  float* out = v + row * l.width() + task.v_column;
  const int64_t k = l.in_features;
  int64_t c = task.begin;
  for (; c + 4 <= task.end; c += 4) dot_block<T, R, 4>(inputs, a + c * k, k, out + c, l.width());
  for (; c < task.end; ++c) dot_block<T, R, 1>(inputs, a + c * k, k, out + c, l.width());
}

// g * y + c at T's register of columns from `column` on.
template <class T>
inline void scale_and_shift(const LoraTask& task, int64_t column, int64_t left, Wide<T>& y) {
  const T* order = nullptr;
  for (int part = 0; part < Wide<T>::kVecs; ++part) {
    const Vec g = task.g ? spread(task.g + column, left, order).part[part] : splat(1.0f);
    const Vec c = task.c ? spread(task.c + column, left, order).part[part] : Vec{};
    y.part[part] = multiply_add(c, g, y.part[part]);
  }
}

// y[r] = g * (y[r] + scaling * v[r] B) + c over V registers of columns, the last one cut to `left` columns.
template <class T, int R, int V>
inline void expand_columns(const LoraTask& task, const float* v, int64_t v_stride, const T* b, T* const (&y)[R],
                           int64_t column, int64_t left) {
  constexpr int kVecs = Wide<T>::kVecs;
  constexpr int64_t kElements = Wide<T>::kElements;
  Wide<T> acc[R][V] = {};
  for (int64_t j = 0; j < task.rank; ++j) {
    Wide<T> right[V];
    // the next columns of this row of B; it is the stride from row to row that hardware does not foresee
    prefetch(b + j * task.width + column + V * kElements, V * kElements);
    for (int i = 0; i < V; ++i) right[i] = load_wide(b + j * task.width + column + i * kElements, left - i * kElements);
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(v[r * v_stride + j]);
      for (int i = 0; i < V; ++i)
        for (int part = 0; part < kVecs; ++part)
          acc[r][i].part[part] = multiply_add(acc[r][i].part[part], weight, right[i].part[part]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < V; ++i) {
      T* out = y[r] + column + i * kElements;
      Wide<T> wide = load_wide(out, left - i * kElements);
      for (int part = 0; part < kVecs; ++part)
        wide.part[part] = multiply_add(wide.part[part], acc[r][i].part[part], splat(task.scaling));
      if (task.g || task.c) scale_and_shift<T>(task, column + i * kElements, left - i * kElements, wide);
      store_wide(out, wide, left - i * kElements);
    }
}

template <class T, int R>
inline void expand_rows(const LoraLaunch& l, const LoraTask& task, const float* v, int64_t row, T* y) {
  constexpr int kRegisters = 4 / Wide<T>::kVecs;
  constexpr int64_t kStep = kRegisters * Wide<T>::kElements;
  const T* b = static_cast<const T*>(task.matrix);
  const float* ranks = v + row * l.width() + task.v_column;
  T* outputs[R];
  for (int r = 0; r < R; ++r) outputs[r] = y + l.rows[row + r] * l.out_features + task.y_column;
  int64_t column = task.begin;
  for (; column + kStep <= task.end; column += kStep)
    expand_columns<T, R, kRegisters>(task, ranks, l.width(), b, outputs, column, kStep);
  for (; column < task.end; column += Wide<T>::kElements)
    expand_columns<T, R, 1>(task, ranks, l.width(), b, outputs, column, task.end - column);
}

template <class T>
inline void run_shrink(const LoraLaunch& l, const LoraTask& task, const T* x, float* v) {
  int64_t row = task.row_begin;
  for (; row + 4 <= task.row_end; row += 4) shrink_rows<T, 4>(l, task, x, row, v);
  if (task.row_end - row == 3) shrink_rows<T, 3>(l, task, x, row, v);
  if (task.row_end - row == 2) shrink_rows<T, 2>(l, task, x, row, v);
  if (task.row_end - row == 1) shrink_rows<T, 1>(l, task, x, row, v);
}

template <class T>
inline void run_expand(const LoraLaunch& l, const LoraTask& task, const float* v, T* y) {
  int64_t row = task.row_begin;
  for (; row + 4 <= task.row_end; row += 4) expand_rows<T, 4>(l, task, v, row, y);
  if (task.row_end - row == 3) expand_rows<T, 3>(l, task, v, row, y);
  if (task.row_end - row == 2) expand_rows<T, 2>(l, task, v, row, y);
  if (task.row_end - row == 1) expand_rows<T, 1>(l, task, v, row, y);
}

constexpr int64_t kLinearColumns = 16;

// Columns [begin, end) of x W^T for every row, at most kLinearColumns: W is read once, x stays in the cache.
template <class T, int R>
inline void linear_rows(const T* x, const T* weight, int64_t k, int64_t begin, int64_t end, T* y, int64_t y_stride) {
  const T* inputs[R];
  for (int r = 0; r < R; ++r) inputs[r] = x + r * k;
  float sums[R][kLinearColumns] = {};
  int64_t c = begin;
  for (; c + 4 <= end; c += 4) dot_block<T, R, 4>(inputs, weight + c * k, k, sums[0] + c - begin, kLinearColumns);
  for (; c < end; ++c) dot_block<T, R, 1>(inputs, weight + c * k, k, sums[0] + c - begin, kLinearColumns);
  for (int r = 0; r < R; ++r) store(y + r * y_stride + begin, load(sums[r]), end - begin);
}

template <class T>
inline void run_linear(const T* x, const T* weight, int64_t num_rows, int64_t k, int64_t columns, T* y,
                         int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows * k * columns > kParallelProducts)
  for (int64_t begin = 0; begin < columns; begin += kLinearColumns) {
    const int64_t end = std::min(columns, begin + kLinearColumns);
    int64_t row = 0;
    for (; row + 4 <= num_rows; row += 4)
      linear_rows<T, 4>(x + row * k, weight, k, begin, end, y + row * columns, columns);
    for (; row < num_rows; ++row) linear_rows<T, 1>(x + row * k, weight, k, begin, end, y + row * columns, columns);
  }
}

// Shrink, expand, or one after the other in one parallel region. x or y is null where that half is not wanted.
template <class T>
inline void run_lora(const LoraLaunch& l, const T* x, float* v, T* y, int num_threads) {
  static thread_local LoraPlan plan;
  make_plan(l, plan);
  const LoraPlan& tasks = plan;
  const int64_t num_shrink = x ? int64_t(tasks.shrink.size()) : 0;
  const int64_t num_expand = y ? int64_t(tasks.expand.size()) : 0;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && tasks.products > kParallelProducts)
  {
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_shrink; ++i) run_shrink(l, tasks.shrink[i], x, v);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_expand; ++i) run_expand(l, tasks.expand[i], v, y);
  }
}

}  // namespace loraplex
