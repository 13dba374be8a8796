// Causal attention over the paged cache with an online softmax.
//
// A task is a few consecutive tokens of one request and one KV head. Keys are walked in tiles of kTile positions anchored
// at position 0; a row takes part in a tile with exactly the positions it may see, so the order of its sums is fixed by
// its own position and the window, whatever stands beside it.
#pragma once

#include <vector>

#include "vector.h"

namespace loraplex {

constexpr int kTile = 64;                    // positions per KV tile
constexpr int kTileVecs = kTile / kLanes;
constexpr int kTaskRows = 64;                // (token, head) pairs per task, at most, where a group has no more heads
constexpr int kRowBlock = 4;                 // rows that share a pass over a tile's registers

struct AttentionTask {
  int64_t request, kv_head;
  int64_t first_row, num_tokens;  // rows of q
  int64_t first_position;         // of the first token
};

// Positions [begin, end) of a tile that one row may see.
struct Span {
  int64_t begin, end;
  bool is_empty() const { return begin >= end; }
};

template <class T>
struct Attention {
  const T* q;  // [T, H, D]
  const T* k;  // [B, block_size, G, D]
  const T* v;
  T* out;                      // [T, H, D]
  const int32_t* block_tables;  // [Q, max_blocks]
  const int32_t* query_start;
  const int32_t* context_len;
  int64_t num_requests, max_blocks, block_size, num_heads, num_kv_heads, head_dim;
  int64_t window;  // 0: none
  float scale;

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t padded_dim() const { return (head_dim + kLanes - 1) / kLanes * kLanes; }
  int64_t num_units() const { return head_dim / kPerUnit<T>; }
  int64_t task_tokens() const { return std::max<int64_t>(1, kTaskRows / group()); }

  // First element of one position's vector in a cache.
  const T* at(const T* cache, int64_t request, int64_t position, int64_t kv_head) const {
    const int64_t block = block_tables[request * max_blocks + position / block_size];
    const int64_t cell = block * block_size + position % block_size;
    return cache + (cell * num_kv_heads + kv_head) * head_dim;
  }

  // Offset of a task's row in q and out; rows count the heads of a group within a token.
  int64_t offset(const AttentionTask& task, int64_t row) const {
    const int64_t token = task.first_row + row / group(), head = task.kv_head * group() + row % group();
    return (token * num_heads + head) * head_dim;
  }
  const T* query(const AttentionTask& task, int64_t row) const { return q + offset(task, row); }

  Span span(const AttentionTask& task, int64_t row, int64_t base) const {
    const int64_t position = task.first_position + row / group();
    const int64_t begin = window > 0 ? std::max<int64_t>(0, position + 1 - window - base) : 0;
    return {begin, std::min<int64_t>(kTile, position + 1 - base)};
  }
};

// Per-thread workspace.
struct AttentionScratch {
  std::vector<Units> keys;    // [kTileVecs][units][kLanes]: transposed, so that lanes are positions
  std::vector<float> values;  // [kTile][padded_dim]
  std::vector<float> sums;    // [rows][padded_dim]
  std::vector<float> peak, total;

  void resize(int64_t num_rows, int64_t num_units, int64_t padded_dim) {
    keys.resize(kTileVecs * num_units);
    values.resize(kTile * padded_dim);
    sums.assign(num_rows * padded_dim, 0.0f);
    peak.assign(num_rows, -INFINITY);
    total.assign(num_rows, 0.0f);
  }
};

template <class T>
inline void pack_keys(const Attention<T>& a, const AttentionTask& task, int64_t base, int64_t count, Units* keys) {
  const int64_t units = a.num_units();
  for (int64_t lane0 = 0; lane0 < kTile; lane0 += kLanes) {
    const T* rows[kLanes];
    for (int64_t i = 0; i < kLanes; ++i)
      rows[i] = lane0 + i < count ? a.at(a.k, task.request, base + lane0 + i, task.kv_head) : nullptr;
    Units* packed = keys + lane0 / kLanes * units;
    for (int64_t unit = 0; unit < units; unit += kLanes) {
      Units square[kLanes];
      for (int64_t i = 0; i < kLanes; ++i)
        square[i] = rows[i] ? load_units(rows[i] + unit * kPerUnit<T>, a.head_dim - unit * kPerUnit<T>) : Units{};
      transpose(square);
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, units - unit); ++i) packed[unit + i] = square[i];
    }
  }
}

template <class T>
inline void unpack_values(const Attention<T>& a, const AttentionTask& task, int64_t base, int64_t count, float* values) {
  const int64_t padded = a.padded_dim();
  for (int64_t i = 0; i < count; ++i) {
    const T* row = a.at(a.v, task.request, base + i, task.kv_head);
    for (int64_t d = 0; d < a.head_dim; d += kLanes) store(values + i * padded + d, load(row + d, a.head_dim - d));
  }
}

// Scores of R rows against a whole tile; lanes past the context hold zeros times q and are masked by the caller.
template <class T, int R>
inline void score(const T* const (&q)[R], const Units* keys, int64_t units, Vec (&scores)[R][kTileVecs]) {
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kTileVecs; ++j) scores[r][j] = Vec{};
  for (int64_t unit = 0; unit < units; ++unit) {
    Units key[kTileVecs];
    for (int j = 0; j < kTileVecs; ++j) key[j] = keys[j * units + unit];
    for (int r = 0; r < R; ++r) {
      uint32_t bits;
      std::memcpy(&bits, q[r] + unit * kPerUnit<T>, sizeof(bits));
      for (int j = 0; j < kTileVecs; ++j) scores[r][j] = multiply_add(scores[r][j], splat(bits), key[j], q[r]);
    }
  }
}

inline Vec mask_outside(Vec v, int64_t first, Span span) {
  Mask lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  lane = lane + int32_t(first);
  const Mask inside = (lane >= int32_t(span.begin)) & (lane < int32_t(span.end));
  return inside ? v : splat(-INFINITY);
}

// Turns one row's scores into weights against the row's running peak; returns the factor for what was summed before.
inline float soften(Vec (&scores)[kTileVecs], float scale, Span span, float& peak, float& total, float* weights) {
  for (int j = 0; j < kTileVecs; ++j) scores[j] = mask_outside(scores[j] * splat(scale), j * kLanes, span);
  const float tile_peak = max(max(max(scores[0], scores[1]), max(scores[2], scores[3])));
  const float new_peak = std::max(peak, tile_peak);
  for (int j = 0; j < kTileVecs; ++j) {
    scores[j] = exp(scores[j] - splat(new_peak));
    store(weights + j * kLanes, scores[j]);
  }
  const float factor = exp(splat(peak - new_peak))[0];
  total = total * factor + sum((scores[0] + scores[1]) + (scores[2] + scores[3]));
  peak = new_peak;
  return factor;
}

// sums[r] = factors[r] * sums[r] + weights[r][begin:end] * values[begin:end], position by position.
template <int R, int V>
inline void weigh_columns(const float* weights, const float* factors, Span span, const float* values, int64_t padded,
                          float* sums) {
  Vec acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < V; ++j) acc[r][j] = load(sums + r * padded + j * kLanes) * splat(factors[r]);
  for (int64_t i = span.begin; i < span.end; ++i) {
    Vec value[V];
    for (int j = 0; j < V; ++j) value[j] = load(values + i * padded + j * kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(weights[r * kTile + i]);
      for (int j = 0; j < V; ++j) acc[r][j] = multiply_add(acc[r][j], weight, value[j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < V; ++j) store(sums + r * padded + j * kLanes, acc[r][j]);
}

template <int R>
inline void weigh(const float* weights, const float* factors, Span span, const float* values, int64_t padded,
                  float* sums) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= padded; d += 4 * kLanes)
    weigh_columns<R, 4>(weights, factors, span, values + d, padded, sums + d);
  for (; d < padded; d += kLanes) weigh_columns<R, 1>(weights, factors, span, values + d, padded, sums + d);
}

// R rows, each with its own span, against one tile. Positions that all see are shared, the rest are added row by row,
// always in ascending order.
template <class T, int R>
inline void attend_rows(const Attention<T>& a, const T* const (&q)[R], const Span (&spans)[R], AttentionScratch& s,
                        int64_t row) {
  const int64_t padded = a.padded_dim();
  Vec scores[R][kTileVecs];
  score<T, R>(q, s.keys.data(), a.num_units(), scores);
  float weights[R * kTile], factors[R], ones[R];
  Span shared{0, kTile};
  for (int r = 0; r < R; ++r) {
    ones[r] = 1.0f;
    factors[r] = soften(scores[r], a.scale, spans[r], s.peak[row + r], s.total[row + r], weights + r * kTile);
    shared = {std::max(shared.begin, spans[r].begin), std::min(shared.end, spans[r].end)};
  }
  const float* values = s.values.data();
  float* sums = s.sums.data() + row * padded;
  for (int r = 0; r < R; ++r) {
    const Span before{spans[r].begin, std::min(shared.begin, spans[r].end)};
    if (!before.is_empty()) {
      weigh<1>(weights + r * kTile, factors + r, before, values, padded, sums + r * padded);
      factors[r] = 1.0f;
    }
  }
  weigh<R>(weights, factors, shared, values, padded, sums);
  for (int r = 0; r < R; ++r) {
    const Span after{std::max(shared.begin, shared.end), spans[r].end};
    if (!after.is_empty()) weigh<1>(weights + r * kTile, ones, after, values, padded, sums + r * padded);
  }
}

template <class T, int R>
inline void attend_block(const Attention<T>& a, const AttentionTask& task, int64_t base, int64_t row,
                         AttentionScratch& s) {
  const T* q[R];
  Span spans[R];
  for (int r = 0; r < R; ++r) {
    q[r] = a.query(task, row + r);
    spans[r] = a.span(task, row + r, base);
  }
  attend_rows<T, R>(a, q, spans, s, row);
}

// All rows of a task that see anything of the tile at `base`; they are neighbours, since spans move with the position.
template <class T>
inline void attend_tile(const Attention<T>& a, const AttentionTask& task, int64_t base, AttentionScratch& s) {
  int64_t row = 0, end = task.num_tokens * a.group();
  while (row < end && a.span(task, row, base).is_empty()) ++row;
  while (row < end && a.span(task, end - 1, base).is_empty()) --end;
  if (row == end) return;
  const int64_t count = std::min<int64_t>(kTile, a.context_len[task.request] - base);
  pack_keys(a, task, base, count, s.keys.data());
  unpack_values(a, task, base, count, s.values.data());
  for (; row + kRowBlock <= end; row += kRowBlock) attend_block<T, kRowBlock>(a, task, base, row, s);
  if (end - row == 3) attend_block<T, 3>(a, task, base, row, s);
  if (end - row == 2) attend_block<T, 2>(a, task, base, row, s);
  if (end - row == 1) attend_block<T, 1>(a, task, base, row, s);
}

template <class T>
inline void finish_row(const float* sums, float total, int64_t head_dim, T* out) {
  for (int64_t d = 0; d < head_dim; d += kLanes)
    store(out + d, load(sums + d) / splat(total), head_dim - d);
}

template <class T>
inline void run_task(const Attention<T>& a, const AttentionTask& task, AttentionScratch& s) {
  const int64_t num_rows = task.num_tokens * a.group(), padded = a.padded_dim();
  s.resize(num_rows, a.num_units(), padded);
  const int64_t first = a.window > 0 ? std::max<int64_t>(0, task.first_position + 1 - a.window) : 0;
  const int64_t end = task.first_position + task.num_tokens;
  for (int64_t base = first / kTile * kTile; base < end; base += kTile) attend_tile(a, task, base, s);
  for (int64_t row = 0; row < num_rows; ++row)
    finish_row(s.sums.data() + row * padded, s.total[row], a.head_dim, a.out + a.offset(task, row));
}

// Longest contexts first within a request, so that the last tasks to run are short ones.
template <class T>
inline std::vector<AttentionTask> plan_tasks(const Attention<T>& a) {
  std::vector<AttentionTask> tasks;
  const int64_t step = a.task_tokens();
  for (int64_t i = 0; i < a.num_requests; ++i) {
    const int64_t begin = a.query_start[i], end = a.query_start[i + 1];
    for (int64_t row = begin + (end - begin - 1) / step * step; row >= begin && begin < end; row -= step)
      for (int64_t g = 0; g < a.num_kv_heads; ++g)
        tasks.push_back({i, g, row, std::min(step, end - row), a.context_len[i] - (end - row)});
  }
  return tasks;
}

template <class T>
inline void run_attention(const Attention<T>& a, int num_threads) {
  const std::vector<AttentionTask> tasks = plan_tasks(a);
  const int64_t num_tasks = int64_t(tasks.size());
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1 && num_tasks > 1)
  for (int64_t i = 0; i < num_tasks; ++i) {
    static thread_local AttentionScratch scratch;
    run_task(a, tasks[i], scratch);
  }
}

}  // namespace loraplex
