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
  // Length of a sum: whole registers of T, each widened.
  int64_t padded_dim() const { return (head_dim + Wide<T>::kElements - 1) / Wide<T>::kElements * Wide<T>::kElements; }
  int64_t num_units() const { return head_dim / kPerUnit<T>; }
  int64_t task_tokens() const { return std::max<int64_t>(1, kTaskRows / group()); }

  // Where in a cache the vectors of `count` positions from `base` on begin, for a task's request and KV head.
  void locate(const AttentionTask& task, int64_t base, int64_t count, int64_t* offsets) const {
    const int32_t* block = block_tables + task.request * max_blocks + base / block_size;
    int64_t within = base % block_size;
    for (int64_t i = 0; i < count; ++i, ++within) {
      if (within == block_size) {
        ++block;
        within = 0;
      }
      offsets[i] = ((int64_t(*block) * block_size + within) * num_kv_heads + task.kv_head) * head_dim;
    }
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

// Lanes without a position repeat the last one; their scores are masked.
template <class T>
inline void pack_keys(const Attention<T>& a, const int64_t* offsets, int64_t count, Units* keys) {
  const int64_t units = a.num_units();
  for (int64_t lane0 = 0; lane0 < count; lane0 += kLanes) {
    const T* rows[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) rows[i] = a.k + offsets[std::min(lane0 + i, count - 1)];
    Units* packed = keys + lane0 / kLanes * units;
    Units square[kLanes];
    int64_t unit = 0;
    for (; unit + kLanes <= units; unit += kLanes) {
      for (int64_t i = 0; i < kLanes; ++i) square[i] = load_units(rows[i] + unit * kPerUnit<T>);
      transpose(square);
      for (int64_t i = 0; i < kLanes; ++i) packed[unit + i] = square[i];
    }
    if (unit == units) continue;
    for (int64_t i = 0; i < kLanes; ++i)
      square[i] = load_units(rows[i] + unit * kPerUnit<T>, a.head_dim - unit * kPerUnit<T>);
    transpose(square);
    for (int64_t i = 0; unit + i < units; ++i) packed[unit + i] = square[i];
  }
}

template <class T>
inline void unpack_values(const Attention<T>& a, const int64_t* offsets, int64_t count, float* values) {
  const int64_t padded = a.padded_dim();
  for (int64_t i = 0; i < count; ++i)
    for (int64_t d = 0; d < padded; d += Wide<T>::kElements) {
      const Wide<T> wide = load_wide(a.v + offsets[i] + d, a.head_dim - d);
      for (int part = 0; part < Wide<T>::kVecs; ++part) store(values + i * padded + d + part * kLanes, wide.part[part]);
    }
}

// Scores of R rows against a whole tile; the caller masks the lanes of positions that a row may not see.
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

// A tile's values as registers of T, widened: once where many rows read them, else straight from the cache.
template <class T>
struct UnpackedValues {
  const float* values;
  int64_t padded;
  Wide<T> operator()(int64_t i, int64_t d) const {
    Wide<T> wide;
    for (int part = 0; part < Wide<T>::kVecs; ++part) wide.part[part] = load(values + i * padded + d + part * kLanes);
    return wide;
  }
};

template <class T>
struct CachedValues {
  const T* cache;
  const int64_t* offsets;
  Wide<T> operator()(int64_t i, int64_t d) const { return load_wide(cache + offsets[i] + d); }
};

// sums[r] = factors[r] * sums[r] + weights[r][begin:end] * values[begin:end], position by position, for V vectors.
template <int R, int V, class T, template <class> class Values>
inline void weigh_columns(const float* weights, const float* factors, Span span, const Values<T>& values, int64_t d,
                          int64_t padded, float* sums) {
  Vec acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < V; ++j) acc[r][j] = load(sums + r * padded + d + j * kLanes) * splat(factors[r]);
  for (int64_t i = span.begin; i < span.end; ++i) {
    Wide<T> value[V / Wide<T>::kVecs];
    for (int j = 0; j < V / Wide<T>::kVecs; ++j) value[j] = values(i, d + j * Wide<T>::kElements);
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(weights[r * kTile + i]);
      for (int j = 0; j < V; ++j)
        acc[r][j] = multiply_add(acc[r][j], weight, value[j / Wide<T>::kVecs].part[j % Wide<T>::kVecs]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < V; ++j) store(sums + r * padded + d + j * kLanes, acc[r][j]);
}

template <int R, class T, template <class> class Values>
inline void weigh(const float* weights, const float* factors, Span span, const Values<T>& values, int64_t padded,
                  float* sums) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= padded; d += 4 * kLanes)
    weigh_columns<R, 4>(weights, factors, span, values, d, padded, sums);
  for (; d < padded; d += Wide<T>::kElements)
    weigh_columns<R, Wide<T>::kVecs>(weights, factors, span, values, d, padded, sums);
}

// R rows, each with its own span, against one tile. Positions that all see are shared, the rest are added row by row,
// always in ascending order.
template <int R, class T, class Values>
inline void attend_rows(const Attention<T>& a, const T* const (&q)[R], const Span (&spans)[R], const Values& values,
                        int64_t row, AttentionScratch& s) {
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

template <int R, class T, class Values>
inline void attend_block(const Attention<T>& a, const AttentionTask& task, int64_t base, const Values& values,
                         int64_t row, AttentionScratch& s) {
  const T* q[R];
  Span spans[R];
  for (int r = 0; r < R; ++r) {
    q[r] = a.query(task, row + r);
    spans[r] = a.span(task, row + r, base);
  }
  attend_rows<R>(a, q, spans, values, row, s);
}

template <class T, class Values>
inline void attend_blocks(const Attention<T>& a, const AttentionTask& task, int64_t base, const Values& values,
                          int64_t row, int64_t end, AttentionScratch& s) {
  for (; row + kRowBlock <= end; row += kRowBlock) attend_block<kRowBlock>(a, task, base, values, row, s);
  if (end - row == 3) attend_block<3>(a, task, base, values, row, s);
  if (end - row == 2) attend_block<2>(a, task, base, values, row, s);
  if (end - row == 1) attend_block<1>(a, task, base, values, row, s);
}

// Where a tile's positions lie in the caches.
struct Tile {
  int64_t base = 0, count = 0;
  int64_t offsets[kTile];
};

template <class T>
inline void locate_tile(const Attention<T>& a, const AttentionTask& task, int64_t base, Tile& tile) {
  tile.base = base;
  tile.count = std::min<int64_t>(kTile, a.context_len[task.request] - base);
  a.locate(task, base, tile.count, tile.offsets);
  for (int64_t i = 0; i < tile.count; ++i) {
    prefetch(a.k + tile.offsets[i], a.head_dim);
    prefetch(a.v + tile.offsets[i], a.head_dim);
  }
}

// All rows of a task that see anything of a tile; they are neighbours, since spans move with the position.
template <class T>
inline void attend_tile(const Attention<T>& a, const AttentionTask& task, const Tile& tile, AttentionScratch& s) {
  int64_t row = 0, end = task.num_tokens * a.group();
  while (row < end && a.span(task, row, tile.base).is_empty()) ++row;
  while (row < end && a.span(task, end - 1, tile.base).is_empty()) --end;
  if (row == end) return;
  pack_keys(a, tile.offsets, tile.count, s.keys.data());
  if (end - row <= 2 * kRowBlock && a.head_dim == a.padded_dim())
    return attend_blocks(a, task, tile.base, CachedValues<T>{a.v, tile.offsets}, row, end, s);
  unpack_values(a, tile.offsets, tile.count, s.values.data());
  attend_blocks(a, task, tile.base, UnpackedValues<T>{s.values.data(), a.padded_dim()}, row, end, s);
}

template <class T>
inline void finish_row(const float* sums, float total, int64_t head_dim, T* out) {
  for (int64_t d = 0; d < head_dim; d += Wide<T>::kElements) {
    Wide<T> wide;
    for (int part = 0; part < Wide<T>::kVecs; ++part) wide.part[part] = load(sums + d + part * kLanes) / splat(total);
    store_wide(out + d, wide, head_dim - d);
  }
}

// First position of the first tile that a task looks at.
template <class T>
inline int64_t first_base(const Attention<T>& a, const AttentionTask& task) {
  const int64_t first = a.window > 0 ? std::max<int64_t>(0, task.first_position + 1 - a.window) : 0;
  return first / kTile * kTile;
}

// `next` is the task that probably follows, whose first tile is asked for while this task's last one is at work.
template <class T>
inline void run_task(const Attention<T>& a, const AttentionTask& task, const AttentionTask* next, AttentionScratch& s) {
  const int64_t num_rows = task.num_tokens * a.group(), padded = a.padded_dim();
  s.resize(num_rows, a.num_units(), padded);
  const int64_t end = task.first_position + task.num_tokens;
  Tile tiles[2];  // the one at work, and the next one on its way from memory
  int turn = 0;
  locate_tile(a, task, first_base(a, task), tiles[0]);
  for (int64_t base = tiles[0].base; base < end; base += kTile, turn ^= 1) {
    if (base + kTile < end) {
      locate_tile(a, task, base + kTile, tiles[turn ^ 1]);
    } else if (next != nullptr) {
      locate_tile(a, *next, first_base(a, *next), tiles[turn ^ 1]);
    }
    attend_tile(a, task, tiles[turn], s);
  }
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
    run_task(a, tasks[i], i + 1 < num_tasks ? &tasks[i + 1] : nullptr, scratch);
  }
}

}  // namespace loraplex
