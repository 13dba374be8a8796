// One tile of keys and values against a few rows: scores, weights, weighted values. Knows nothing of pages, requests or
// threads.
//
// A row takes part with exactly the positions that it may see, and all of its sums run in ascending order of positions
// (values) or elements (scores), so its bits do not depend on the rows beside it.
#pragma once

#include "vector.h"

namespace loraplex {

constexpr int kTile = 64;  // positions per tile
constexpr int kTileVecs = kTile / kLanes;
constexpr float kHeadroom = 8.0f;   // powers of two by which weights may outgrow 1 before a row's sums are scaled down
constexpr float kNothing = -1e30f;  // a row's reference before its first tile: below any score

template <class T>
inline Units load_padded(const T* p, int64_t n) {
  return n >= Wide<T>::kElements ? load_units(p) : load_units(p, n);
}

// Positions [begin, end) of a tile that one row may see.
struct Span {
  int64_t begin, end;
  bool is_empty() const { return begin >= end; }
};

// One row of queries and what it has summed up so far.
template <class T>
struct Row {
  const T* q;
  T* out;
  int64_t position;
  float reference;  // weights are 2^(score - reference)
  Vec total;        // of the weights, lane by lane
};

// How often packing `count` positions calls `meanwhile`.
template <class T>
inline int64_t num_pauses(int64_t count, int64_t head_dim) {
  constexpr int64_t kEvery = 2 * kPerUnit<T>;
  const int64_t squares = (head_dim / kPerUnit<T> + kLanes - 1) / kLanes;
  return (count + kLanes - 1) / kLanes * squares + (count + kEvery - 1) / kEvery;
}

// Lanes are positions. Those without one repeat the last; the caller gives them no weight. Between groups of positions,
// `meanwhile` may ask for other memory.
template <class T, class F>
inline void pack_keys(const T* cache, const int64_t* offsets, int64_t count, int64_t head_dim, Units* keys,
                      const F& meanwhile) {
  const int64_t units = head_dim / kPerUnit<T>;
  for (int64_t lane0 = 0; lane0 < count; lane0 += kLanes, keys += units) {
    const T* rows[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) rows[i] = cache + offsets[std::min(lane0 + i, count - 1)];
    for (int64_t unit = 0; unit < units; unit += kLanes) {
      Units square[kLanes];
      const int64_t d = unit * kPerUnit<T>;
      for (int64_t i = 0; i < kLanes; ++i) square[i] = load_padded(rows[i] + d, head_dim - d);
      transpose(square);
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, units - unit); ++i) keys[unit + i] = square[i];
      meanwhile();
    }
  }
}

// Lanes are elements, in the order of Wide<T>; a unit holds as many positions as T has elements per unit.
inline void pack_unit(const float* cache, const int64_t* offsets, int64_t, int64_t head_dim, Units* values) {
  for (int64_t d = 0; d < head_dim; d += kLanes) *values++ = load_padded(cache + offsets[0] + d, head_dim - d);
}

inline void pack_unit(const bf16* cache, const int64_t* offsets, int64_t count, int64_t head_dim, Units* values) {
  for (int64_t d = 0; d < head_dim; d += 2 * kLanes) {
    const Units first = load_padded(cache + offsets[0] + d, head_dim - d);
    const Units second = count > 1 ? load_padded(cache + offsets[1] + d, head_dim - d) : Units{};
    *values++ = (first & 0xffffu) | (second << 16);
    *values++ = (first >> 16) | (second & 0xffff0000u);
  }
}

template <class T, class F>
inline void pack_values(const T* cache, const int64_t* offsets, int64_t count, int64_t head_dim, int64_t padded,
                        Units* values, const F& meanwhile) {
  for (int64_t i = 0; i < count; i += kPerUnit<T>, values += padded / kLanes) {
    pack_unit(cache, offsets + i, count - i, head_dim, values);
    if (i % (2 * kPerUnit<T>) == 0) meanwhile();
  }
}

inline Units splat_unit(const void* p) {
  uint32_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return splat(bits);
}

template <class T, int R>
inline void score(const Row<T>* rows, const Units* keys, int64_t units, Vec (&scores)[R][kTileVecs]) {
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kTileVecs; ++j) scores[r][j] = Vec{};
  for (int64_t unit = 0; unit < units; ++unit) {
    Units key[kTileVecs];
    for (int j = 0; j < kTileVecs; ++j) key[j] = keys[j * units + unit];
    for (int r = 0; r < R; ++r) {
      const Units q = splat_unit(rows[r].q + unit * kPerUnit<T>);
      for (int j = 0; j < kTileVecs; ++j) scores[r][j] = multiply_add(scores[r][j], q, key[j], rows[r].q);
    }
  }
}

inline Vec mask_outside(Vec v, int64_t first, Span span) {
  Mask lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  lane = lane + int32_t(first);
  const Mask inside = (lane >= int32_t(span.begin)) & (lane < int32_t(span.end));
  return inside ? v : splat(-INFINITY);
}

// Turns one row's scores into weights, zeros outside its span. `scale` counts in powers of two. A tile with a score far
// above the row's reference raises it, which scales down what was summed before.
template <class T>
inline void soften(const Vec (&scores)[kTileVecs], float scale, bool is_whole, Span span, Row<T>& row, float* sums,
                   int64_t padded, T* weights) {
  Vec power[kTileVecs];
  const auto refer = [&](float reference) {
    for (int j = 0; j < kTileVecs; ++j) {
      power[j] = multiply_add(splat(-reference), scores[j], splat(scale));
      if (!is_whole) power[j] = mask_outside(power[j], j * kLanes, span);
    }
    return max(max(power[0], power[1]), max(power[2], power[3]));
  };
  if (is_any_above(refer(row.reference), kHeadroom)) {
    const float peak = max(refer(0.0f));
    const Vec factor = exp2(splat(row.reference - peak), static_cast<const float*>(nullptr));
    for (int64_t d = 0; d < padded; d += kLanes) store(sums + d, load(sums + d) * factor);
    row.total = row.total * factor;
    row.reference = peak;
    refer(peak);
  }
  for (int j = 0; j < kTileVecs; ++j) {
    power[j] = exp2(power[j], weights);
    store(weights + j * kLanes, power[j]);
  }
  row.total = row.total + ((power[0] + power[1]) + (power[2] + power[3]));
}

// sums[r] += weights[r] * values over units [begin, end), unit by unit, for R rows and V vectors.
template <int R, int V, class T>
inline void weigh_columns(const T* weights, const Units* values, int64_t begin, int64_t end, int64_t padded,
                          float* sums) {
  const int64_t vecs = padded / kLanes;
  Vec acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < V; ++j) acc[r][j] = load(sums + r * padded + j * kLanes);
  for (int64_t unit = begin; unit < end; ++unit) {
    Units value[V];
    for (int j = 0; j < V; ++j) value[j] = values[unit * vecs + j];
    for (int r = 0; r < R; ++r) {
      const Units weight = splat_unit(weights + r * kTile + unit * kPerUnit<T>);
      for (int j = 0; j < V; ++j) acc[r][j] = multiply_add(acc[r][j], weight, value[j], weights);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < V; ++j) store(sums + r * padded + j * kLanes, acc[r][j]);
}

template <int R, class T>
inline void weigh(const T* weights, const Units* values, int64_t begin, int64_t end, int64_t padded, float* sums) {
  if (begin >= end) return;
  int64_t vec = 0;
  const int64_t vecs = padded / kLanes;
  for (; vec + 4 <= vecs; vec += 4)
    weigh_columns<R, 4>(weights, values + vec, begin, end, padded, sums + vec * kLanes);
  for (; vec < vecs; ++vec) weigh_columns<R, 1>(weights, values + vec, begin, end, padded, sums + vec * kLanes);
}

// The same for one row at an end of its span, where a unit may hold a position that the row must not see: its value is
// hidden too, since it may be anything.
template <class T>
inline void weigh_edge(const T* weights, const Units* values, int64_t begin, int64_t end, Span span, int64_t padded,
                       float* sums) {
  for (int64_t unit = begin; unit < end; ++unit) {
    uint32_t keep = 0xffffffffu;
    if (kPerUnit<T> == 2 && 2 * unit < span.begin) keep &= 0xffff0000u;
    if (kPerUnit<T> == 2 && 2 * unit + 2 > span.end) keep &= 0xffffu;
    const Units weight = splat_unit(weights + unit * kPerUnit<T>);
    const Units* value = values + unit * (padded / kLanes);
    for (int64_t d = 0; d < padded; d += kLanes)
      store(sums + d, multiply_add(load(sums + d), weight, *value++ & keep, weights));
  }
}

// R neighbouring rows, each with its own span, against one tile. Units that all see whole are shared, the others are
// added row by row.
template <int R, class T>
inline void attend_rows(Row<T>* rows, const Span (&spans)[R], const Units* keys, const Units* values, int64_t head_dim,
                        int64_t padded, float scale, float* sums) {
  constexpr int64_t kPer = kPerUnit<T>;
  Vec scores[R][kTileVecs];
  score<T, R>(rows, keys, head_dim / kPer, scores);
  Span all{0, kTile};
  for (int r = 0; r < R; ++r) all = {std::max(all.begin, spans[r].begin), std::min(all.end, spans[r].end)};
  const bool is_whole = all.begin == 0 && all.end == kTile;
  alignas(64) T weights[R * kTile];
  for (int r = 0; r < R; ++r)
    soften(scores[r], scale, is_whole, spans[r], rows[r], sums + r * padded, padded, weights + r * kTile);
  if (is_whole) return weigh<R>(weights, values, 0, kTile / kPer, padded, sums);
  const Span shared{(all.begin + kPer - 1) / kPer, all.end / kPer};
  for (int r = 0; r < R; ++r)
    weigh_edge(weights + r * kTile, values, spans[r].begin / kPer,
               std::min(shared.begin, (spans[r].end + kPer - 1) / kPer), spans[r], padded, sums + r * padded);
  weigh<R>(weights, values, shared.begin, shared.end, padded, sums);
  for (int r = 0; r < R; ++r)
    weigh_edge(weights + r * kTile, values, std::max(shared.begin, shared.end), (spans[r].end + kPer - 1) / kPer,
               spans[r], padded, sums + r * padded);
}

template <class T>
inline void finish_row(const float* sums, float total, int64_t head_dim, T* out) {
  for (int64_t d = 0; d < head_dim; d += Wide<T>::kElements) {
    Wide<T> wide;
    for (int part = 0; part < Wide<T>::kVecs; ++part) wide.part[part] = load(sums + d + part * kLanes) / splat(total);
    store_wide(out + d, wide, head_dim - d);
  }
}

}  // namespace loraplex
