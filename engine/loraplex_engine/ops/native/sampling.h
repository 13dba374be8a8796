// The next token of a row: its peak, the log-probabilities it asks for, and a draw from its filtered distribution.
//
// Nothing is sorted. Where a row filters by rank, its likely tokens are gathered once, in the order of their ids, and
// `select` narrows them down around a count or a mass, by halves of their range of scores. Masses are float32, their
// sums float64, always in the same order, so a token depends on the row alone.
#pragma once

#include <limits>
#include <numeric>
#include <vector>

#include "dense.h"

namespace loraplex {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 1024;  // elements whose mass is summed, and whose peak is found, together
constexpr int64_t kFew = 24;      // candidates that are sorted rather than narrowed down

typedef float HalfVec __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));

// Bit i: lane i is set.
inline uint32_t lanes_of(Mask m) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask(cast<__m512i>(m), cast<__m512i>(m));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= uint32_t(m[i] != 0) << i;
  return bits;
#endif
}

// Eight sums of float32 lanes in float64.
struct Sums {
  Doubles low = {}, high = {};

  void add(Vec v) {
    struct Pair {
      HalfVec low, high;
    };
    const Pair halves = cast<Pair>(v);
    low = low + __builtin_convertvector(halves.low, Doubles);
    high = high + __builtin_convertvector(halves.high, Doubles);
  }

  double total() const {
    const Doubles d = low + high;
    return ((d[0] + d[4]) + (d[2] + d[6])) + ((d[1] + d[5]) + (d[3] + d[7]));
  }
};

struct Peak {
  float score;
  int64_t index;  // the first of the highest
  bool is_valid;  // neither NaN nor infinity among the scores, and one above minus infinity
};

// The first `n` elements, minus infinity after them.
template <class T>
inline Vec load_scores(const T* p, int64_t n) {
  if (n >= kLanes) return load(p);
  Vec v = splat(-kInfinity);
  for (int64_t i = 0; i < n; ++i) v[i] = to_float(p[i]);
  return v;
}

template <class T>
Peak find_peak(const T* x, int64_t n) {
  Peak peak{-kInfinity, 0, false};
  Mask nan = {};
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    Vec high[2] = {splat(-kInfinity), splat(-kInfinity)};
    for (int64_t i = begin, turn = 0; i < end; i += kLanes, ++turn) {
      const Vec v = load_scores(x + i, end - i);
      nan = nan | (v != v);
      high[turn % 2] = max(high[turn % 2], v);
    }
    const float score = max(max(high[0], high[1]));
    if (score > peak.score) peak = {score, begin, false};
  }
  if (lanes_of(nan) != 0 || std::abs(peak.score) == kInfinity) return peak;
  while (to_float(x[peak.index]) != peak.score) ++peak.index;
  peak.is_valid = true;
  return peak;
}

// As float32, with minus infinity up to a whole number of vectors.
template <class T>
inline void widen_row(const T* x, int64_t n, float* z) {
  for (int64_t i = 0; i < n; i += kLanes) store(z + i, load_scores(x + i, n - i));
}

// Tokens whose scores a row changes, with a number for each.
struct Changes {
  const int64_t* ids = nullptr;
  const float* values = nullptr;
  int64_t count = 0;
};

struct RowSettings {
  double temperature, top_p, min_p, number;
  float presence, frequency, repetition;
  int64_t top_k, num_top;  // 0: all; below 0: no log-probabilities
  Changes edits, seen;     // added to the scores; penalised by how often each is in the output
  const int32_t* allowed;  // a bit per token; null: all

  bool is_ordered() const { return top_k > 0 || top_p < 1; }
  bool is_edited() const { return edits.count + seen.count > 0 || allowed != nullptr; }
};

// Minus infinity for tokens whose bit is not set; writes whole vectors.
inline void allow_row(const int32_t* words, int64_t n, float* z) {
  constexpr Units kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t i = 0; i < n; i += kLanes) {
    const uint32_t lanes = (uint32_t(words[i / 32]) >> (i % 32)) & 0xffff;
    if (lanes == 0xffff) continue;
    const Mask is_allowed = cast<Mask>(((splat(lanes) >> kLane) & splat(uint32_t(1))) != Units{});
    store(z + i, is_allowed ? load(z + i) : splat(-kInfinity));
  }
}

inline void edit_row(const RowSettings& row, int64_t n, float* z) {
  for (int64_t i = 0; i < row.edits.count; ++i) z[row.edits.ids[i]] += row.edits.values[i];
  for (int64_t i = 0; i < row.seen.count; ++i) {
    const float times = row.seen.values[i];
    float& score = z[row.seen.ids[i]];
    score = score > 0 ? score / row.repetition : score * row.repetition;
    score -= row.frequency * times;
    if (times > 0) score -= row.presence;
  }
  if (row.allowed != nullptr) allow_row(row.allowed, n, z);
}

inline double sum_exp(const float* z, int64_t n, float best) {
  Sums sums;
  for (int64_t i = 0; i < n; i += kLanes) sums.add(exp(load(z + i) - splat(best)));
  return sums.total();
}

// The `count` highest, the lower id first among equals; what is left over of them is minus infinity.
inline void find_top(const float* z, int64_t n, int64_t count, float* scores, int64_t* ids) {
  std::fill(scores, scores + count, -kInfinity);
  std::fill(ids, ids + count, 0);
  if (count == 0) return;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec v = load(z + i);
    for (uint32_t lanes = lanes_of(v > splat(scores[count - 1])); lanes != 0; lanes &= lanes - 1) {
      const int64_t id = i + __builtin_ctz(lanes);
      if (!(z[id] > scores[count - 1])) continue;
      int64_t place = count - 1;
      for (; place > 0 && z[id] > scores[place - 1]; --place) {
        scores[place] = scores[place - 1];
        ids[place] = ids[place - 1];
      }
      scores[place] = z[id];
      ids[place] = id;
    }
  }
}

// Tokens in the order of their ids, with the range of their scores.
struct Candidates {
  std::vector<float> scores, masses;
  std::vector<int32_t> ids;
  int64_t size = 0;
  float low = 0, high = 0;

  void clear(int64_t capacity) {
    if (int64_t(ids.size()) < capacity + kLanes) {
      scores.resize(capacity + kLanes);
      masses.resize(capacity + kLanes);
      ids.resize(capacity + kLanes);
    }
    size = 0;
  }

  // NOTE: writes whole vectors; the vectors after the last one hold leftovers.
  void append(Vec z, Vec mass, Units id, uint32_t lanes) {
#ifdef __AVX512F__
    const __mmask16 mask = lanes;
    store(&scores[size], cast<Vec>(_mm512_maskz_compress_ps(mask, cast<__m512>(z))));
    store(&masses[size], cast<Vec>(_mm512_maskz_compress_ps(mask, cast<__m512>(mass))));
    const __m512i packed = _mm512_maskz_compress_epi32(mask, cast<__m512i>(id));
    std::memcpy(&ids[size], &packed, sizeof(packed));
    size += __builtin_popcount(lanes);
#else
    for (; lanes != 0; lanes &= lanes - 1, ++size) {
      const int lane = __builtin_ctz(lanes);
      scores[size] = z[lane];
      masses[size] = mass[lane];
      ids[size] = id[lane];
    }
#endif
  }

  // Lanes of vector i that are candidates.
  uint32_t lanes_at(int64_t i) const { return size - i >= kLanes ? 0xffff : (1u << (size - i)) - 1; }

  void find_range() {
    Vec least = splat(kInfinity), most = splat(-kInfinity);
    for (int64_t i = 0; i < size; i += kLanes) {
      const Vec v = load_scores(&scores[i], size - i);
      most = max(most, v);
      const Vec lifted = v == splat(-kInfinity) ? splat(kInfinity) : v;
      least = least < lifted ? least : lifted;
    }
    low = -max(-least);
    high = max(most);
  }
};

struct Place {
  float score, mass;
  int64_t id;
  double before;  // weight of all candidates ahead of it

  bool is_after(const Place& other) const {
    return score < other.score || (score == other.score && id > other.id);
  }
};

enum class Weight { kOne, kMass };
enum class Reach { kAtLeast, kPast };

// The first candidate, in falling order of score, with which the weight so far is at least, or past, the target; else
// the last one. `from` must not be empty; `kept` are two that it may use.
template <Weight kWeight, Reach kReach>
Place select(const Candidates& from, double target, Candidates (&kept)[2]) {
  const auto reaches = [target](double weight) { return kReach == Reach::kPast ? weight > target : weight >= target; };
  const Candidates* all = &from;
  double before = 0;
  for (int turn = 0; all->size > kFew && all->low < all->high; turn ^= 1) {
    float pivot = all->low + (all->high - all->low) * 0.5f;
    if (!(pivot > all->low)) pivot = all->high;
    Sums mass;
    int64_t count = 0;
    for (int64_t i = 0; i < all->size; i += kLanes) {
      const Mask is_above = load(&all->scores[i]) >= splat(pivot);
      const uint32_t lanes = lanes_of(is_above) & all->lanes_at(i);
      count += __builtin_popcount(lanes);
      if constexpr (kWeight == Weight::kMass)
        mass.add(cast<Vec>(cast<Units>(is_above) & cast<Units>(load(&all->masses[i], all->size - i))));
    }
    const double weight = kWeight == Weight::kOne ? double(count) : mass.total();
    const bool is_above = reaches(before + weight);
    if (!is_above) before += weight;
    Candidates& next = kept[turn];
    next.clear(all->size);
    for (int64_t i = 0; i < all->size; i += kLanes) {
      const Vec z = load(&all->scores[i]);
      const uint32_t above = lanes_of(z >= splat(pivot));
      Units id;
      std::memcpy(&id, &all->ids[i], sizeof(id));
      next.append(z, load(&all->masses[i]), id, (is_above ? above : ~above) & all->lanes_at(i));
    }
    next.find_range();
    all = &next;
  }
  int32_t order[kFew];
  const bool is_sorted = !(all->low < all->high);  // equal scores are in the order of their ids
  if (!is_sorted) {
    std::iota(order, order + all->size, 0);
    std::stable_sort(order, order + all->size, [&](int32_t a, int32_t b) { return all->scores[a] > all->scores[b]; });
  }
  for (int64_t i = 0;; ++i) {
    const int64_t j = is_sorted ? i : order[i];
    const double weight = kWeight == Weight::kOne ? 1.0 : double(all->masses[j]);
    if (i + 1 == all->size || reaches(before + weight)) return {all->scores[j], all->masses[j], all->ids[j], before};
    before += weight;
  }
}

// Memory of one thread, kept from row to row.
struct SamplingScratch {
  std::vector<float> scores, masses;
  std::vector<double> block_masses;
  Candidates candidates, kept[2];

  void resize(int64_t n) {
    const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
    if (int64_t(scores.size()) < padded) {
      scores.resize(padded);
      masses.resize(padded);
    }
    block_masses.assign((n + kBlock - 1) / kBlock, 0);
  }
};

// The least float32 that is not below `bound`.
inline float round_up(double bound) {
  const float rounded = float(bound);
  return rounded < bound ? std::nextafter(rounded, kInfinity) : rounded;
}

// exp((z - best) / temperature) of what is not below the bound; returns their sum.
inline double find_masses(int64_t n, float best, double temperature, float bound, SamplingScratch& s) {
  const Vec scale = splat(float(1 / temperature));
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    Sums sums;
    for (int64_t i = begin; i < std::min(n, begin + kBlock); i += kLanes) {
      const Vec z = load(&s.scores[i]);
      const Vec mass = exp((z - splat(best)) * scale);
      const Vec kept = z >= splat(bound) ? mass : Vec{};
      store(&s.masses[i], kept);
      sums.add(kept);
    }
    s.block_masses[begin / kBlock] = sums.total();
    total += s.block_masses[begin / kBlock];
  }
  return total;
}

// The first token, by id, at which the mass so far is past the target.
inline int64_t draw_by_id(int64_t n, double target, const SamplingScratch& s) {
  double before = 0;
  size_t block = 0;
  for (; block + 1 < s.block_masses.size() && before + s.block_masses[block] <= target; ++block)
    before += s.block_masses[block];
  int64_t last = -1;
  for (int64_t i = block * kBlock; i < n; ++i) {
    before += s.masses[i];
    if (s.masses[i] > 0) last = i;
    if (before > target) return i;
  }
  for (int64_t i = block * kBlock; last < 0; --i)
    if (s.masses[i] > 0) last = i;
  return last;
}

// The likely tokens: all that a filter by `top_p` alone can keep, or all that have mass.
inline void gather(int64_t n, float bound, SamplingScratch& s) {
  Candidates& to = s.candidates;
  to.clear(n);
  Units id = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t i = 0; i < n; i += kLanes, id = id + uint32_t(kLanes)) {
    const Vec z = load(&s.scores[i]), mass = load(&s.masses[i]);
    const uint32_t lanes = lanes_of((mass > Vec{}) & (z >= splat(bound)));
    if (lanes != 0) to.append(z, mass, id, lanes);
  }
  to.find_range();
}

inline double mass_until(const Candidates& from, const Place& place) {
  Sums sums;
  for (int64_t i = 0; i < from.size; i += kLanes) {
    const Vec z = load(&from.scores[i]), mass = load(&from.masses[i], from.size - i);
    Units id;
    std::memcpy(&id, &from.ids[i], sizeof(id));
    const Mask is_kept = (z > splat(place.score)) | ((z == splat(place.score)) & (id <= splat(uint32_t(place.id))));
    sums.add(cast<Vec>(cast<Units>(is_kept) & cast<Units>(mass)));
  }
  return sums.total();
}

inline int64_t draw_by_rank(int64_t n, float best, double total, const RowSettings& row, SamplingScratch& s) {
  // tokens under this have less mass together than top_p leaves out, by a margin for rounding
  const double tail = 0.5 * (1 - row.top_p) * total / double(n);
  const float bound = std::nextafter(float(best + row.temperature * std::log(tail)), -kInfinity);
  gather(n, row.top_k > 0 ? -kInfinity : bound, s);
  const Candidates& all = s.candidates;
  Place cut{-kInfinity, 0, n, 0};
  double mass = total;
  if (row.top_k > 0 && row.top_k < all.size) {
    cut = select<Weight::kOne, Reach::kAtLeast>(all, double(row.top_k), s.kept);
    mass = mass_until(all, cut);
  }
  if (row.top_p < 1) {
    const Place last = select<Weight::kMass, Reach::kAtLeast>(all, row.top_p * mass, s.kept);
    if (!last.is_after(cut)) {
      cut = last;
      mass = last.before + last.mass;
    }
  }
  const Place drawn = select<Weight::kMass, Reach::kPast>(all, row.number * mass, s.kept);
  return drawn.is_after(cut) ? cut.id : drawn.id;
}

inline int64_t draw(int64_t n, float best, const RowSettings& row, SamplingScratch& s) {
  const float bound = row.min_p > 0 ? round_up(double(best) + row.temperature * std::log(row.min_p)) : -kInfinity;
  const double total = find_masses(n, best, row.temperature, bound, s);
  return row.is_ordered() ? draw_by_rank(n, best, total, row, s) : draw_by_id(n, row.number * total, s);
}

inline SamplingScratch& sampling_scratch(int64_t n) {
  static thread_local SamplingScratch s;
  s.resize(n);
  return s;
}

// The logarithm of the row's mass over its best; the log-probabilities of its `num_top` likeliest tokens, and those.
inline float tell_top(const float* z, int64_t n, float best, int64_t num_top, float* logprobs, int64_t* top_ids) {
  const float log_sum = float(std::log(sum_exp(z, n, best)));
  find_top(z, n, num_top, logprobs, top_ids);
  for (int64_t i = 0; i < num_top; ++i) logprobs[i] = (logprobs[i] - best) - log_sum;
  return log_sum;
}

// The log-probability of a given token, NaN where the scores are not finite, and those of `num_top` others.
template <class T>
void score_row(const T* x, int64_t n, int64_t token_id, int64_t num_top, float* logprobs, int64_t* top_ids) {
  float* z = sampling_scratch(n).scores.data();
  widen_row(x, n, z);
  const Peak peak = find_peak(z, n);
  if (!peak.is_valid) {
    std::fill(logprobs, logprobs + 1 + num_top, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  const float log_sum = tell_top(z, n, peak.score, num_top, logprobs + 1, top_ids);
  logprobs[0] = (to_float(x[token_id]) - peak.score) - log_sum;
}

// The token, or -1 where the row has none. `logprobs`, of the token and of `num_top` others, and `top_ids` are written
// where the row asks for them.
template <class T>
int64_t choose_row(const T* x, int64_t n, const RowSettings& row, float* logprobs, int64_t* top_ids) {
  const bool is_told = row.num_top >= 0;
  if (row.temperature == 0 && !is_told && !row.is_edited()) {
    const Peak peak = find_peak(x, n);
    return peak.is_valid ? peak.index : -1;
  }
  SamplingScratch& s = sampling_scratch(n);
  widen_row(x, n, s.scores.data());
  Peak peak = find_peak(s.scores.data(), n);
  if (!peak.is_valid) return -1;
  const float best = peak.score;
  float log_sum = 0;
  if (is_told) log_sum = tell_top(s.scores.data(), n, best, row.num_top, logprobs + 1, top_ids);
  if (row.is_edited()) {
    edit_row(row, n, s.scores.data());
    peak = find_peak(s.scores.data(), n);
    if (!peak.is_valid) return -1;
  }
  const int64_t token_id = row.temperature == 0 ? peak.index : draw(n, peak.score, row, s);
  if (is_told) logprobs[0] = (to_float(x[token_id]) - best) - log_sum;
  return token_id;
}

}  // namespace loraplex
