// Causal attention over the paged cache with an online softmax.
//
// A task is a few consecutive tokens of one request and some of its KV heads. Keys are walked in tiles of kTile
// positions anchored at position 0, so the order of a row's sums is fixed by its own position and the window, whatever
// stands beside it.
#pragma once

#include <vector>

#include "attention_tile.h"

namespace loraplex {

// (token, head) pairs per task and KV head: packing a tile costs about as much as 6 of them.
constexpr int64_t kMinTaskRows = 32, kMaxTaskRows = 192;
constexpr int64_t kTasksPerThread = 3;  // wanted at least, for an even load
constexpr int64_t kFewTokens = 4;       // of one request: memory decides, not arithmetic
constexpr int kRowBlock = 6;            // rows that share a pass over a tile's registers

struct AttentionTask {
  int64_t request;
  int64_t first_head, num_heads;  // KV heads
  int64_t first_row, num_tokens;  // rows of q
  int64_t first_position;         // of the first token
};

template <class T>
struct Attention {
  const T* q;  // [T, H, D]
  const T* k;  // [B, block_size, G, D]
  const T* v;
  T* out;                       // [T, H, D]
  const int32_t* block_tables;  // [Q, max_blocks]
  const int32_t* query_start;
  const int32_t* context_len;
  int64_t num_requests, max_blocks, block_size, num_heads, num_kv_heads, head_dim;
  int64_t window;  // 0: none
  float scale;

  int64_t group() const { return num_heads / num_kv_heads; }
  // Length of a sum: whole registers of T, each widened.
  int64_t padded_dim() const { return (head_dim + Wide<T>::kElements - 1) / Wide<T>::kElements * Wide<T>::kElements; }

  // Where in a cache the vectors of `count` positions from `base` on begin, for a request's first KV head.
  void locate(int64_t request, int64_t base, int64_t count, int64_t* offsets) const {
    const int32_t* block = block_tables + request * max_blocks + base / block_size;
    int64_t within = base % block_size;
    for (int64_t i = 0; i < count; ++i, ++within) {
      if (within == block_size) {
        ++block;
        within = 0;
      }
      offsets[i] = (int64_t(*block) * block_size + within) * num_kv_heads * head_dim;
    }
  }

  Span span(int64_t position, int64_t base) const {
    const int64_t begin = window > 0 ? std::max<int64_t>(0, position + 1 - window - base) : 0;
    return {begin, std::min<int64_t>(kTile, position + 1 - base)};
  }

  // First position of the first tile that a task looks at.
  int64_t first_base(const AttentionTask& task) const {
    const int64_t first = window > 0 ? std::max<int64_t>(0, task.first_position + 1 - window) : 0;
    return first / kTile * kTile;
  }
};

// Per-thread workspace.
template <class T>
struct AttentionScratch {
  std::vector<Units> keys, values;
  std::vector<Row<T>> rows;  // by KV head, token, head of the group
  std::vector<float> sums;   // [rows][padded_dim]

  void start(const Attention<T>& a, const AttentionTask& task) {
    const int64_t padded = a.padded_dim(), group = a.group();
    keys.resize(kTileVecs * (a.head_dim / kPerUnit<T>));
    values.resize(kTile / kPerUnit<T> * (padded / kLanes));
    rows.clear();
    for (int64_t g = task.first_head; g < task.first_head + task.num_heads; ++g)
      for (int64_t token = 0; token < task.num_tokens; ++token)
        for (int64_t h = 0; h < group; ++h) {
          const int64_t offset = ((task.first_row + token) * a.num_heads + g * group + h) * a.head_dim;
          rows.push_back({a.q + offset, a.out + offset, task.first_position + token, kNothing, Vec{}});
        }
    sums.assign(rows.size() * padded, 0.0f);
  }
};

// Where a tile's positions lie in the caches, and how far their memory has been asked for.
template <class T>
struct Tile {
  static constexpr int64_t kLine = 64 / sizeof(T);
  const T* k;  // of the task's first KV head
  const T* v;
  int64_t base = 0, count = 0;
  int64_t length = 0;                   // of one position's vectors, for all heads of the task
  int64_t asked = 0, asked_within = 0;  // positions, and elements of the next one
  int64_t offsets[kTile];

  void locate(const Attention<T>& a, const AttentionTask& task, int64_t first) {
    base = first;
    count = std::min<int64_t>(kTile, a.context_len[task.request] - base);
    length = task.num_heads * a.head_dim;
    asked = asked_within = 0;
    k = a.k + task.first_head * a.head_dim;
    v = a.v + task.first_head * a.head_dim;
    a.locate(task.request, base, count, offsets);
  }

  int64_t num_lines() const { return count * ((length + kLine - 1) / kLine); }

  // Asks for a few more lines of each cache. All at once would keep the thread waiting; this lets it work meanwhile.
  void ask(int64_t num_lines) {
    for (; num_lines > 0 && asked < count; --num_lines) {
      __builtin_prefetch(k + offsets[asked] + asked_within, 0, 2);
      __builtin_prefetch(v + offsets[asked] + asked_within, 0, 2);
      asked_within += kLine;
      if (asked_within < length) continue;
      asked_within = 0;
      ++asked;
    }
  }
};

template <int R, class T>
inline void attend_block(const Attention<T>& a, int64_t base, int64_t row, AttentionScratch<T>& s) {
  Span spans[R];
  for (int r = 0; r < R; ++r) spans[r] = a.span(s.rows[row + r].position, base);
  const int64_t padded = a.padded_dim();
  const float scale = a.scale * 1.44269504f;  // weights are powers of two
  attend_rows<R>(&s.rows[row], spans, s.keys.data(), s.values.data(), a.head_dim, padded, scale,
                 s.sums.data() + row * padded);
}

// Rows [row, end), as many at a time as R at most.
template <int R, class T>
inline void attend_blocks(const Attention<T>& a, int64_t base, int64_t row, int64_t end, AttentionScratch<T>& s) {
  for (; row + R <= end; row += R) attend_block<R>(a, base, row, s);
  if constexpr (R > 1)
    if (row < end) attend_blocks<R - 1>(a, base, row, end, s);
}

// All rows of one KV head that see anything of a tile; they are neighbours, since spans move with the position.
template <class T, class F>
inline void attend_tile(const Attention<T>& a, int64_t head, const Tile<T>& tile, int64_t row, int64_t end,
                        AttentionScratch<T>& s, const F& meanwhile) {
  while (row < end && a.span(s.rows[row].position, tile.base).is_empty()) ++row;
  while (row < end && a.span(s.rows[end - 1].position, tile.base).is_empty()) --end;
  if (row == end) return;
  const int64_t first = head * a.head_dim;
  pack_keys(tile.k + first, tile.offsets, tile.count, a.head_dim, s.keys.data(), meanwhile);
  pack_values(tile.v + first, tile.offsets, tile.count, a.head_dim, a.padded_dim(), s.values.data(), meanwhile);
  attend_blocks<kRowBlock>(a, tile.base, row, end, s);
}

// `next` is the task that probably follows, whose first tile is asked for while this task's last one is at work.
template <class T>
inline void run_task(const Attention<T>& a, const AttentionTask& task, const AttentionTask* next,
                     AttentionScratch<T>& s) {
  s.start(a, task);
  const int64_t end = task.first_position + task.num_tokens, rows = task.num_tokens * a.group();
  Tile<T> tiles[2];  // the one at work, and the next one on its way from memory
  int turn = 0;
  tiles[0].locate(a, task, a.first_base(task));
  for (int64_t base = tiles[0].base; base < end; base += kTile, turn ^= 1) {
    Tile<T>& ahead = tiles[turn ^ 1];
    ahead.count = 0;
    if (base + kTile < end) {
      ahead.locate(a, task, base + kTile);
    } else if (next != nullptr) {
      ahead.locate(a, *next, a.first_base(*next));
    }
    const int64_t step = ahead.num_lines() / (task.num_heads * num_pauses<T>(tiles[turn].count, a.head_dim)) + 1;
    for (int64_t g = 0; g < task.num_heads; ++g)
      attend_tile(a, g, tiles[turn], g * rows, (g + 1) * rows, s, [&] { ahead.ask(step); });
  }
  const int64_t padded = a.padded_dim();
  for (size_t i = 0; i < s.rows.size(); ++i)
    finish_row(s.sums.data() + i * padded, sum(s.rows[i].total), a.head_dim, s.rows[i].out);
}

// How many KV heads a task takes. A few tokens cost little but the way to memory, where the heads are neighbours, so
// they share it as far as every thread still gets work.
template <class T>
inline int64_t task_heads(const Attention<T>& a, int64_t num_tokens, int64_t num_threads) {
  if (num_tokens > kFewTokens) return 1;
  return std::min(a.num_kv_heads, (a.num_requests * a.num_kv_heads + num_threads - 1) / num_threads);
}

// Longest contexts first within a request, so that the last tasks to run are short ones.
template <class T>
inline std::vector<AttentionTask> plan_tasks(const Attention<T>& a, int64_t num_threads) {
  std::vector<AttentionTask> tasks;
  const int64_t rows = a.query_start[a.num_requests] * a.group() * a.num_kv_heads;
  const int64_t task_rows = std::clamp(rows / (kTasksPerThread * num_threads), kMinTaskRows, kMaxTaskRows);
  const int64_t max_tokens = std::max<int64_t>(1, task_rows / a.group());
  for (int64_t i = 0; i < a.num_requests; ++i) {
    const int64_t begin = a.query_start[i], num_tokens = a.query_start[i + 1] - begin;
    const int64_t num_parts = (num_tokens + max_tokens - 1) / max_tokens;
    const int64_t heads = task_heads(a, num_tokens, num_threads);
    for (int64_t part = num_parts - 1; part >= 0; --part) {
      const int64_t first = num_tokens * part / num_parts, last = num_tokens * (part + 1) / num_parts;
      const int64_t position = a.context_len[i] - num_tokens + first;
      for (int64_t g = 0; g < a.num_kv_heads; g += heads)
        tasks.push_back({i, g, std::min(heads, a.num_kv_heads - g), begin + first, last - first, position});
    }
  }
  return tasks;
}

template <class T>
inline void run_attention(const Attention<T>& a, int num_threads) {
  const std::vector<AttentionTask> tasks = plan_tasks(a, num_threads);
  const int64_t num_tasks = int64_t(tasks.size());
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1 && num_tasks > 1)
  for (int64_t i = 0; i < num_tasks; ++i) {
    static thread_local AttentionScratch<T> scratch;
    // the tasks between are probably those of the other threads
    run_task(a, tasks[i], i + num_threads < num_tasks ? &tasks[i + num_threads] : nullptr, scratch);
  }
}

}  // namespace loraplex
