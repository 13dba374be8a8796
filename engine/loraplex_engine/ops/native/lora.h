// Segmented LoRA over a table of pointers, each module at its own rank; and the plain linear, which shares its product.
//
// A task takes some rows of one segment through A, through B, or through both matrices of one module. A sum runs in an
// order fixed by K (shrink) or by the rank (expand), whatever the task holds beside it.
#pragma once

#include <atomic>
#include <vector>

#include "vector.h"

namespace loraplex {

constexpr int64_t kRowsPerTask = 8;
constexpr int64_t kRanksPerTask = 16;
constexpr int64_t kColumnsPerTask = 288;
constexpr int64_t kColumnUnit = 32;           // pieces of columns are multiples of it
constexpr int64_t kManyRanks = 32;            // from which B is asked for ahead within the task itself,
constexpr int64_t kRanksAhead = 20;           // by so many of its rows
constexpr int64_t kParallelProducts = 65536;  // products from which a second thread pays
constexpr int64_t kLinearColumns = 16;        // of the plain linear, per task

// What one launch needs; all arrays are borrowed.
struct LoraLaunch {
  const int64_t* entries;   // [N, L, groups, slices, 5]: addresses of A and B, rank, addresses of g and c
  const float* scalings;    // [N, L, groups, slices]
  const int64_t* features;  // [slices, 3]: first output column, output columns, input columns
  const int32_t* rows;      // [T_lora]
  const int32_t* starts;    // [S + 1]
  const int32_t* slots;     // [S]
  int64_t num_segments, slot_stride, place, num_slices;  // place: offset of (layer, group) within a slot, in slices
  int64_t max_rank, in_features, out_features, element_bytes;
  bool shrinks, expands;

  int64_t cell(int64_t segment, int64_t slice) const { return slots[segment] * slot_stride + place + slice; }
  int64_t width() const { return num_slices * max_rank; }
  int64_t products(int64_t segment, int64_t slice, int64_t num_rows) const {
    const int64_t rank = entries[cell(segment, slice) * 5 + 2], columns = features[slice * 3 + 1];
    return num_rows * (rank * (in_features + columns) + columns);
  }
};

// `num_ranks` of A, then `num_columns` of B; each may be none. Pointers and columns are those of the task's own part.
struct LoraTask {
  const char *a, *b;
  const float *g, *c;          // null: 1 and 0
  int64_t row_begin, row_end;  // positions in the sorted rows
  int64_t rank, num_ranks, num_columns;
  int64_t b_stride;            // elements from one rank's row of B to the next
  int64_t v_slice, v_column;   // in v: first column of the slice, of the ranks to compute
  int64_t y_column;
  float scaling;
  int64_t products;            // of the module for these rows

  const char* first() const { return num_ranks > 0 ? a : b; }
};

inline int64_t rounded_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

struct LoraPlan {
  std::vector<LoraTask> tasks, late;  // `late` tasks read ranks that others compute
  int64_t products = 0;

  // Where one task would keep a thread busy for longer than its share, a module's halves are cut into pieces.
  void add(const LoraLaunch& l, const LoraTask& whole, int num_threads) {
    if (l.shrinks && l.expands && whole.products * num_threads <= products) return tasks.push_back(whole);
    LoraTask part = whole;
    part.num_columns = 0;
    for (int64_t begin = 0; l.shrinks && begin < whole.num_ranks; begin += kRanksPerTask) {
      part.num_ranks = std::min(whole.num_ranks - begin, kRanksPerTask);
      part.a = whole.a + begin * l.in_features * l.element_bytes;
      part.v_column = whole.v_column + begin;
      tasks.push_back(part);
    }
    part.num_ranks = 0;
    // as many pieces for each thread
    const int64_t rounds = rounded_up(whole.num_columns, kColumnsPerTask * num_threads) / (kColumnsPerTask * num_threads);
    const int64_t width = rounded_up((whole.num_columns - 1) / (rounds * num_threads) + 1, kColumnUnit);
    for (int64_t begin = 0; l.expands && begin < whole.num_columns; begin += width) {
      part.num_columns = std::min(whole.num_columns - begin, width);
      part.b = whole.b + begin * l.element_bytes;
      part.g = whole.g ? whole.g + begin : nullptr;
      part.c = whole.c ? whole.c + begin : nullptr;
      part.y_column = whole.y_column + begin;
      late.push_back(part);
    }
  }
};

inline void plan_module(const LoraLaunch& l, int64_t segment, int64_t slice, int num_threads, LoraPlan& plan) {
  const int64_t* entry = l.entries + l.cell(segment, slice) * 5;
  const int64_t* feature = l.features + slice * 3;
  LoraTask task{};
  task.a = reinterpret_cast<const char*>(entry[0]);
  task.b = reinterpret_cast<const char*>(entry[1]);
  task.rank = task.num_ranks = entry[2];
  task.g = reinterpret_cast<const float*>(entry[3]);
  task.c = reinterpret_cast<const float*>(entry[4]);
  if (task.rank == 0 && !task.g && !task.c) return;
  task.num_columns = task.b_stride = feature[1];
  task.v_slice = task.v_column = slice * l.max_rank;
  task.y_column = feature[0];
  task.scaling = task.rank == 0 ? 0.0f : l.scalings[l.cell(segment, slice)];
  for (int64_t row = l.starts[segment]; row < l.starts[segment + 1]; row = task.row_end) {
    task.row_begin = row;
    task.row_end = std::min<int64_t>(row + kRowsPerTask, l.starts[segment + 1]);
    task.products = l.products(segment, slice, task.row_end - row);
    plan.add(l, task, num_threads);
  }
}

inline void make_plan(const LoraLaunch& l, int num_threads, LoraPlan& plan) {
  plan.tasks.clear();
  plan.late.clear();
  for (int64_t segment = 0; segment < l.num_segments; ++segment)
    for (int64_t slice = 0; slice < l.num_slices; ++slice) plan_module(l, segment, slice, num_threads, plan);
  // the largest first: threads end together, and what is asked for ahead is no larger than what is at work
  std::sort(plan.tasks.begin(), plan.tasks.end(),
            [](const LoraTask& one, const LoraTask& other) { return one.products > other.products; });
}

inline int64_t count_products(const LoraLaunch& l) {
  int64_t total = 0;
  for (int64_t segment = 0; segment < l.num_segments; ++segment)
    for (int64_t slice = 0; slice < l.num_slices; ++slice)
      total += l.products(segment, slice, l.starts[segment + 1] - l.starts[segment]);
  return total;
}

// Bytes from a task's A and B to what this thread reads next: while one place is read, the same place there is asked
// for. Past the end of a smaller matrix this asks for something else, which does no harm.
struct Ahead {
  int64_t a = 0, b = 0;
};

inline Ahead look_ahead(const LoraTask& task, const LoraTask& next) {
  const bool is_whole = next.num_ranks > 0 && next.num_columns > 0;
  return {next.first() - task.a, (is_whole ? next.b : next.first()) - task.b};
}

template <class T>
inline void prefetch_at(const T* p, int64_t bytes) {
  __builtin_prefetch(reinterpret_cast<const char*>(p) + bytes, 0, 2);
}

// v[r][c] = x[r] . a[c] over k features, for C = 1 or 4 rows of A.
template <class T, int R, int C>
inline void dot_block(const T* const* x, const T* a, int64_t k, float* v, int64_t v_stride, int64_t ahead) {
  constexpr int64_t kStep = kLanes * kPerUnit<T>;
  Vec acc[R][C] = {};
  Units left[R];
  int64_t i = 0;
  for (; i + kStep <= k; i += kStep) {
    for (int r = 0; r < R; ++r) left[r] = load_units(x[r] + i);
    for (int c = 0; c < C; ++c) {
      const Units right = load_units(a + c * k + i);
      prefetch_at(a + c * k + i, ahead);
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
inline void shrink_rows(const LoraLaunch& l, const LoraTask& task, const T* x, int64_t row, float* v, int64_t ahead) {
  const int64_t k = l.in_features;
  const T* inputs[R];
  for (int r = 0; r < R; ++r) inputs[r] = x + l.rows[row + r] * k;
  const T* a = reinterpret_cast<const T*>(task.a);
  float* out = v + row * l.width() + task.v_column;
  int64_t c = 0;
  for (; c + 4 <= task.num_ranks; c += 4) dot_block<T, R, 4>(inputs, a + c * k, k, out + c, l.width(), ahead);
  for (; c < task.num_ranks; ++c) dot_block<T, R, 1>(inputs, a + c * k, k, out + c, l.width(), ahead);
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

// y[r] = g * (y[r] + scaling * v[r] B) + c over V registers of columns; unless kWhole, over what is left of one.
template <class T, int R, int V, bool kWhole>
inline void expand_columns(const LoraTask& task, const float* v, int64_t v_stride, T* const (&y)[R], int64_t column,
                           int64_t ahead) {
  constexpr int kVecs = Wide<T>::kVecs;
  constexpr int64_t kElements = Wide<T>::kElements;
  const int64_t left = kWhole ? V * kElements : task.num_columns - column;
  const T* b = reinterpret_cast<const T*>(task.b) + column;
  Wide<T> acc[R][V] = {};
  for (int64_t j = 0; j < task.rank; ++j, b += task.b_stride) {
    Wide<T> right[V];
    for (int i = 0; i < V; ++i) {
      right[i] = kWhole ? load_wide(b + i * kElements) : load_wide(b, left);
      prefetch_at(b + i * kElements, ahead);
    }
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
      Wide<T> wide = kWhole ? load_wide(out) : load_wide(out, left);
      for (int part = 0; part < kVecs; ++part)
        wide.part[part] = multiply_add(wide.part[part], acc[r][i].part[part], splat(task.scaling));
      if (task.g || task.c) scale_and_shift<T>(task, column + i * kElements, left - i * kElements, wide);
      store_wide(out, wide, kWhole ? kElements : left);
    }
}

// All columns from `column` on, in blocks of V registers, then of half as many.
template <class T, int R, int V>
inline void expand_from(const LoraTask& task, const float* v, int64_t v_stride, T* const (&y)[R], int64_t column,
                        int64_t ahead) {
  constexpr int64_t kStep = V * Wide<T>::kElements;
  for (; column + kStep <= task.num_columns; column += kStep)
    expand_columns<T, R, V, true>(task, v, v_stride, y, column, ahead);
  if constexpr (V > 1) {
    expand_from<T, R, V / 2>(task, v, v_stride, y, column, ahead);
  } else if (column < task.num_columns) {
    expand_columns<T, R, 1, false>(task, v, v_stride, y, column, ahead);
  }
}

template <class T, int R>
inline void expand_rows(const LoraLaunch& l, const LoraTask& task, const float* v, int64_t row, T* y, int64_t ahead) {
  constexpr int kSums = R == 3 ? 4 : 16 / R;  // vectors of sums per row: half of the registers of AVX-512
  if (task.rank >= kManyRanks) ahead = kRanksAhead * task.b_stride * sizeof(T);
  T* outputs[R];
  for (int r = 0; r < R; ++r) outputs[r] = y + l.rows[row + r] * l.out_features + task.y_column;
  expand_from<T, R, kSums / Wide<T>::kVecs>(task, v + row * l.width() + task.v_slice, l.width(), outputs, 0, ahead);
}

template <class T, int R>
inline void run_rows(const LoraLaunch& l, const LoraTask& task, const T* x, float* v, T* y, int64_t row, Ahead ahead) {
  shrink_rows<T, R>(l, task, x, row, v, ahead.a);
  if (task.num_columns > 0) expand_rows<T, R>(l, task, v, row, y, ahead.b);
}

template <class T>
inline void run_task(const LoraLaunch& l, const LoraTask& task, const T* x, float* v, T* y, Ahead ahead) {
  int64_t row = task.row_begin;
  for (; row + 4 <= task.row_end; row += 4) run_rows<T, 4>(l, task, x, v, y, row, ahead);
  if (task.row_end - row == 3) run_rows<T, 3>(l, task, x, v, y, row, ahead);
  if (task.row_end - row == 2) run_rows<T, 2>(l, task, x, v, y, row, ahead);
  if (task.row_end - row == 1) run_rows<T, 1>(l, task, x, v, y, row, ahead);
}

// Shrink, expand, or one after the other. x or y is null where that half is not wanted.
template <class T>
inline void run_lora(const LoraLaunch& l, const T* x, float* v, T* y, int num_threads) {
  static thread_local LoraPlan plan;
  plan.products = count_products(l);
  if (plan.products <= kParallelProducts) num_threads = 1;
  make_plan(l, num_threads, plan);
  // claimed in order by all threads, each thread one task ahead of its work, so as to know what it will read
  const std::vector<LoraTask>&tasks = plan.tasks, &late = plan.late;
  const int64_t num_early = tasks.size(), num_tasks = num_early + int64_t(late.size());
  const auto task_at = [&](int64_t i) -> const LoraTask& { return i < num_early ? tasks[i] : late[i - num_early]; };
  std::atomic<int64_t> claimed{0};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    int64_t now = claimed++, next;
    const auto run = [&] {
      const LoraTask& task = task_at(now);
      run_task(l, task, x, v, y, next < num_tasks ? look_ahead(task, task_at(next)) : Ahead());
    };
    for (; now < num_early; now = next) {
      next = claimed++;
      run();
    }
    if (!late.empty()) {
#pragma omp barrier
      for (; now < num_tasks; now = next) {
        next = claimed++;
        run();
      }
    }
  }
}

// Columns [begin, end) of x W^T for every row, at most kLinearColumns: W is read once, x stays in the cache.
template <class T, int R>
inline void linear_rows(const T* x, const T* weight, int64_t k, int64_t begin, int64_t end, T* y, int64_t y_stride) {
  const T* inputs[R];
  const int64_t ahead = 4 * k * sizeof(T);
  for (int r = 0; r < R; ++r) inputs[r] = x + r * k;
  float sums[R][kLinearColumns] = {};
  int64_t c = begin;
  for (; c + 4 <= end; c += 4)
    dot_block<T, R, 4>(inputs, weight + c * k, k, sums[0] + c - begin, kLinearColumns, ahead);
  for (; c < end; ++c) dot_block<T, R, 1>(inputs, weight + c * k, k, sums[0] + c - begin, kLinearColumns, ahead);
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

}  // namespace loraplex
