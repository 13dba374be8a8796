// The fast CPU form of the ops, registered as torch.ops.loraplex.*. Checks and unpacks tensors; the arithmetic is in the
// headers, which know nothing of torch.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "attention.h"
#include "dense.h"
#include "linear.h"
#include "lora.h"
#include "sampling.h"

namespace loraplex {
namespace {

using at::Tensor;

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

void check(const Tensor& t, const char* name, at::ScalarType dtype, int64_t dim) {
  TORCH_CHECK(t.device().is_cpu() && t.is_contiguous(), name, " must be contiguous and on the CPU");
  TORCH_CHECK(t.scalar_type() == dtype, name, " must be ", dtype, ", not ", t.scalar_type());
  TORCH_CHECK(t.dim() == dim, name, " must have ", dim, " dimensions, not ", t.dim());
}

template <class F>
void by_dtype(const Tensor& t, const F& body) {
  if (t.scalar_type() == at::kFloat) return body(float{});
  TORCH_CHECK(t.scalar_type() == at::kBFloat16, "the native ops serve float32 and bfloat16, not ", t.scalar_type());
  body(bf16{});
}

// Elements from one row's gain to the next: 0 where all rows share one.
int64_t check_gain(const Tensor& weight, const char* name, const Tensor& rows, int64_t n) {
  check(weight, name, rows.scalar_type(), weight.dim() == 2 ? 2 : 1);
  TORCH_CHECK(weight.size(-1) == n, name, " has ", weight.size(-1), " entries for rows of ", n);
  if (weight.dim() == 1) return 0;
  TORCH_CHECK(weight.size(0) == rows.size(0), name, " has ", weight.size(0), " rows, not ", rows.size(0));
  return n;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check(x, "x", x.scalar_type(), 2);
  const int64_t n = x.size(1), stride = check_gain(weight, "weight", x, n);
  Tensor y = at::empty_like(x);
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    for_rows(x.size(0), n, at::get_num_threads(), [&](int64_t row) {
      rms_norm_row(data<T>(x) + row * n, data<T>(weight) + row * stride, float(eps), n, data<T>(y) + row * n);
    });
  });
  return y;
}

Tensor add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  check(x, "x", x.scalar_type(), 2);
  check(residual, "residual", x.scalar_type(), 2);
  const int64_t n = x.size(1), stride = check_gain(weight, "weight", x, n);
  TORCH_CHECK(residual.sizes() == x.sizes(), "x and residual differ in shape");
  Tensor y = at::empty_like(x);
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    for_rows(x.size(0), n, at::get_num_threads(), [&](int64_t row) {
      T* stream = data<T>(residual) + row * n;
      add_row(stream, data<T>(x) + row * n, n);
      rms_norm_row(stream, data<T>(weight) + row * stride, float(eps), n, data<T>(y) + row * n);
    });
  });
  return y;
}

int64_t head_dim_of(const Tensor& qkv, int64_t num_heads, int64_t num_kv_heads) {
  const int64_t heads = num_heads + 2 * num_kv_heads;
  TORCH_CHECK(num_kv_heads > 0 && num_heads % num_kv_heads == 0, num_heads, " heads over ", num_kv_heads, " KV heads");
  TORCH_CHECK(qkv.size(1) % (2 * heads) == 0, "qkv has ", qkv.size(1), " columns for ", heads, " even heads");
  return qkv.size(1) / heads;
}

void head_rms_norm(const Tensor& qkv, const Tensor& q_weight, const Tensor& k_weight, double eps, int64_t num_heads,
                   int64_t num_kv_heads) {
  check(qkv, "qkv", qkv.scalar_type(), 2);
  const int64_t dim = head_dim_of(qkv, num_heads, num_kv_heads);
  const int64_t q_stride = check_gain(q_weight, "q_weight", qkv, dim);
  const int64_t k_stride = check_gain(k_weight, "k_weight", qkv, dim);
  by_dtype(qkv, [&](auto zero) {
    using T = decltype(zero);
    for_rows(qkv.size(0), qkv.size(1), at::get_num_threads(), [&](int64_t row) {
      T* heads = data<T>(qkv) + row * qkv.size(1);
      for (int64_t h = 0; h < num_heads + num_kv_heads; ++h) {
        const T* weight = h < num_heads ? data<T>(q_weight) + row * q_stride : data<T>(k_weight) + row * k_stride;
        rms_norm_row(heads + h * dim, weight, float(eps), dim, heads + h * dim);
      }
    });
  });
}

Tensor silu_and_mul(const Tensor& gate_up) {
  check(gate_up, "gate_up", gate_up.scalar_type(), 2);
  TORCH_CHECK(gate_up.size(1) % 2 == 0, "gate_up has an odd number of columns");
  const int64_t n = gate_up.size(1) / 2;
  Tensor y = at::empty({gate_up.size(0), n}, gate_up.options());
  by_dtype(gate_up, [&](auto zero) {
    using T = decltype(zero);
    for_rows(gate_up.size(0), 4 * n, at::get_num_threads(), [&](int64_t row) {
      const T* gate = data<T>(gate_up) + row * 2 * n;
      silu_and_mul_row(gate, gate + n, n, data<T>(y) + row * n);
    });
  });
  return y;
}

Tensor plain_linear(const Tensor& x, const Tensor& weight) {
  check(x, "x", x.scalar_type(), 2);
  check(weight, "weight", x.scalar_type(), 2);
  const int64_t k = x.size(1), columns = weight.size(0);
  TORCH_CHECK(weight.size(1) == k, "x has ", k, " columns, weight has ", weight.size(1));
  Tensor y = at::empty({x.size(0), columns}, x.options());
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    run_linear(data<T>(x), data<T>(weight), x.size(0), k, columns, data<T>(y), at::get_num_threads());
  });
  return y;
}

// Whether `packed_linear` is the fastest product here.
bool packs_linear(at::ScalarType dtype) {
  return (dtype == at::kFloat && kPacksFloat) || (dtype == at::kBFloat16 && kPacksBf16);
}

Tensor pack_linear(const Tensor& weight) {
  check(weight, "weight", weight.scalar_type(), 2);
  TORCH_CHECK(weight.numel() > 0, "weight is empty");
  Tensor packed;
  by_dtype(weight, [&](auto zero) {
    using T = decltype(zero);
    const PackedShape<T> shape{weight.size(1), weight.size(0)};
    packed = at::empty({shape.panels(), shape.units(), kPanelColumns * kPerUnit<T>}, weight.options());
    pack_weight(data<T>(weight), shape, data<T>(packed), at::get_num_threads());
  });
  return packed;
}

Tensor packed_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t out_features) {
  check(x, "x", x.scalar_type(), 2);
  check(packed, "packed", x.scalar_type(), 3);
  if (bias) check(*bias, "bias", x.scalar_type(), 1);
  TORCH_CHECK(!bias || bias->size(0) == out_features, "bias has ", bias->size(0), " entries, not ", out_features);
  Tensor y = at::empty({x.size(0), out_features}, x.options());
  by_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const PackedShape<T> shape{x.size(1), out_features};
    TORCH_CHECK(packed.size(0) == shape.panels() && packed.size(1) == shape.units() &&
                    packed.size(2) == kPanelColumns * kPerUnit<T>,
                "packed is no weight of ", out_features, " x ", x.size(1));
    run_packed_linear(LinearLaunch<T>{data<T>(x), data<T>(packed), bias ? data<T>(*bias) : nullptr, data<T>(y),
                                      x.size(0), shape},
                      at::get_num_threads());
  });
  return y;
}

void check_cache(const Tensor& k_cache, const Tensor& v_cache, at::ScalarType dtype) {
  check(k_cache, "k_cache", dtype, 4);
  check(v_cache, "v_cache", dtype, 4);
  TORCH_CHECK(k_cache.sizes() == v_cache.sizes(), "k_cache and v_cache differ in shape");
}

void check_below(const Tensor& indices, int64_t bound, const char* name) {
  const int64_t* index = data<int64_t>(indices);
  for (int64_t i = 0; i < indices.size(0); ++i)
    TORCH_CHECK(index[i] >= 0 && index[i] < bound, name, "[", i, "] = ", index[i], " is outside [0, ", bound, ")");
}

Tensor rope_and_store(const Tensor& qkv, const Tensor& positions, const Tensor& cos_sin, const Tensor& k_cache,
                      const Tensor& v_cache, const Tensor& cells, int64_t num_heads, int64_t num_kv_heads) {
  check(qkv, "qkv", qkv.scalar_type(), 2);
  check(positions, "positions", at::kLong, 1);
  check(cells, "cells", at::kLong, 1);
  check(cos_sin, "cos_sin", at::kFloat, 2);
  check_cache(k_cache, v_cache, qkv.scalar_type());
  const int64_t dim = head_dim_of(qkv, num_heads, num_kv_heads), num_rows = qkv.size(0);
  TORCH_CHECK(cos_sin.size(1) == dim && k_cache.size(2) == num_kv_heads && k_cache.size(3) == dim,
              "cos_sin and the caches must have heads of ", dim);
  TORCH_CHECK(positions.size(0) == num_rows && cells.size(0) == num_rows, "one position and one cell per row");
  check_below(positions, cos_sin.size(0), "positions");
  check_below(cells, k_cache.size(0) * k_cache.size(1), "cells");
  Tensor q = at::empty({num_rows, num_heads * dim}, qkv.options());
  by_dtype(qkv, [&](auto zero) {
    using T = decltype(zero);
    for_rows(num_rows, qkv.size(1), at::get_num_threads(), [&](int64_t row) {
      const T* heads = data<T>(qkv) + row * qkv.size(1);
      const float* angles = data<float>(cos_sin) + data<int64_t>(positions)[row] * dim;
      const int64_t cell = data<int64_t>(cells)[row] * num_kv_heads * dim;
      for (int64_t h = 0; h < num_heads; ++h)
        rotate_head(heads + h * dim, angles, dim / 2, data<T>(q) + (row * num_heads + h) * dim);
      for (int64_t g = 0; g < num_kv_heads; ++g)
        rotate_head(heads + (num_heads + g) * dim, angles, dim / 2, data<T>(k_cache) + cell + g * dim);
      const T* values = heads + (num_heads + num_kv_heads) * dim;
      std::memcpy(data<T>(v_cache) + cell, values, num_kv_heads * dim * sizeof(T));
    });
  });
  return q;
}

// Every block that will be read must exist, and every request's rows must lie within its context.
void check_requests(const Tensor& q, const Tensor& k_cache, const Tensor& block_tables, const Tensor& query_start,
                    const Tensor& context_len) {
  const int64_t num_requests = context_len.size(0), block_size = k_cache.size(1);
  const int32_t *start = data<int32_t>(query_start), *length = data<int32_t>(context_len);
  TORCH_CHECK(query_start.size(0) == num_requests + 1 && block_tables.size(0) == num_requests,
              "query_start and block_tables do not fit ", num_requests, " requests");
  TORCH_CHECK(start[0] == 0 && start[num_requests] == q.size(0), "query_start must cover all rows");
  for (int64_t i = 0; i < num_requests; ++i) {
    TORCH_CHECK(start[i] <= start[i + 1] && start[i + 1] - start[i] <= length[i],
                "request ", i, " has more rows than context");
    const int64_t num_blocks = (length[i] + block_size - 1) / block_size;
    TORCH_CHECK(num_blocks <= block_tables.size(1), "request ", i, " needs ", num_blocks, " blocks");
    const int32_t* blocks = data<int32_t>(block_tables) + i * block_tables.size(1);
    for (int64_t j = 0; j < num_blocks; ++j)
      TORCH_CHECK(blocks[j] >= 0 && blocks[j] < k_cache.size(0), "request ", i, " names block ", blocks[j]);
  }
}

Tensor paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
                       const Tensor& query_start, const Tensor& context_len, double scale,
                       std::optional<int64_t> window) {
  check(q, "q", q.scalar_type(), 2);
  check_cache(k_cache, v_cache, q.scalar_type());
  check(block_tables, "block_tables", at::kInt, 2);
  check(query_start, "query_start", at::kInt, 1);
  check(context_len, "context_len", at::kInt, 1);
  const int64_t dim = k_cache.size(3), num_kv_heads = k_cache.size(2);
  TORCH_CHECK(dim % 2 == 0 && q.size(1) % (dim * num_kv_heads) == 0, "q has ", q.size(1), " columns for ",
              num_kv_heads, " KV heads of ", dim);
  TORCH_CHECK(!window.has_value() || *window > 0, "window must be positive");
  check_requests(q, k_cache, block_tables, query_start, context_len);
  Tensor out = at::empty_like(q);
  by_dtype(q, [&](auto zero) {
    using T = decltype(zero);
    const Attention<T> attention{
        data<T>(q), data<T>(k_cache), data<T>(v_cache), data<T>(out),
        data<int32_t>(block_tables), data<int32_t>(query_start), data<int32_t>(context_len),
        context_len.size(0), block_tables.size(1), k_cache.size(1), q.size(1) / dim, num_kv_heads, dim,
        window.value_or(0), float(scale)};
    run_attention(attention, at::get_num_threads());
  });
  return out;
}

void check_segments(const Tensor& rows, const Tensor& starts, const Tensor& slots, const Tensor& occupied,
                    int64_t num_rows) {
  check(rows, "token_indices", at::kInt, 1);
  check(starts, "starts", at::kInt, 1);
  check(slots, "slots", at::kInt, 1);
  const int64_t num_segments = slots.size(0);
  const int32_t *start = data<int32_t>(starts), *slot = data<int32_t>(slots), *row = data<int32_t>(rows);
  TORCH_CHECK(starts.size(0) == num_segments + 1 && start[0] == 0 && start[num_segments] == rows.size(0),
              "starts do not fit the rows");
  for (int64_t i = 0; i < num_segments; ++i) {
    TORCH_CHECK(start[i] <= start[i + 1], "starts fall");
    TORCH_CHECK_INDEX(slot[i] >= 0 && slot[i] < occupied.size(0) && data<int8_t>(occupied)[slot[i]],
                      "slot ", slot[i], " is empty; a row must never point to it");
  }
  for (int64_t i = 0; i < rows.size(0); ++i)
    TORCH_CHECK(row[i] >= 0 && row[i] < num_rows, "token_indices[", i, "] = ", row[i]);
}

void check_features(const Tensor& x, const Tensor& y, const int64_t* features, int64_t num_slices) {
  const int64_t* last = features + (num_slices - 1) * 3;
  TORCH_CHECK(!x.defined() || x.size(1) == last[2], "x has ", x.size(1), " columns, A has ", last[2]);
  TORCH_CHECK(!y.defined() || y.size(1) == last[0] + last[1], "y has ", y.size(1), " columns");
}

// What one call needs for itself, kept for the next.
float* scratch(int64_t size) {
  static thread_local std::vector<float> kept;
  if (int64_t(kept.size()) < size) kept.resize(size);
  return kept.data();
}

// x, v, y: undefined where the op has none of it.
void launch_lora(const Tensor& x, const Tensor& v, const Tensor& y, const Tensor& entries, const Tensor& scalings,
                 const Tensor& occupied, const Tensor& features, int64_t layer, int64_t group, int64_t num_slices,
                 int64_t max_rank, const Tensor& rows, const Tensor& starts, const Tensor& slots) {
  const Tensor& model = x.defined() ? x : y;
  if (x.defined()) check(x, "x", x.scalar_type(), 2);
  if (y.defined()) check(y, "y", model.scalar_type(), 2);
  if (v.defined()) check(v, "v", at::kFloat, 2);
  check(entries, "entries", at::kLong, 5);
  check(scalings, "scalings", at::kFloat, 4);
  check(features, "features", at::kLong, 3);
  check_segments(rows, starts, slots, occupied, model.size(0));
  const int64_t layers = entries.size(1), groups = entries.size(2), slices = entries.size(3);
  TORCH_CHECK(0 <= layer && layer < layers && 0 <= group && group < groups && num_slices <= slices, "no such place");
  TORCH_CHECK(num_slices > 0 && max_rank > 0, "v must have columns");
  const int64_t width = num_slices * max_rank;
  TORCH_CHECK(!v.defined() || (v.size(0) == rows.size(0) && v.size(1) == width), "v has the wrong shape");
  float* const ranks = v.defined() ? data<float>(v) : scratch(rows.size(0) * width);
  check_features(x, y, data<int64_t>(features) + group * slices * 3, num_slices);
  const LoraLaunch launch{data<int64_t>(entries),
                          data<float>(scalings),
                          data<int64_t>(features) + group * slices * 3,
                          data<int32_t>(rows),
                          data<int32_t>(starts),
                          data<int32_t>(slots),
                          slots.size(0),
                          layers * groups * slices,
                          (layer * groups + group) * slices,
                          num_slices,
                          max_rank,
                          x.defined() ? x.size(1) : 0,
                          y.defined() ? y.size(1) : 0,
                          model.element_size(),
                          x.defined(),
                          y.defined()};
  by_dtype(model, [&](auto zero) {
    using T = decltype(zero);
    run_lora(launch, x.defined() ? data<T>(x) : nullptr, ranks, y.defined() ? data<T>(y) : nullptr,
             at::get_num_threads());
  });
}

Tensor lora_shrink(const Tensor& x, const Tensor& entries, const Tensor& scalings, const Tensor& occupied,
                   const Tensor& features, int64_t layer, int64_t group, int64_t num_slices, int64_t max_rank,
                   const Tensor& rows, const Tensor& starts, const Tensor& slots) {
  Tensor v = at::empty({rows.size(0), num_slices * max_rank}, x.options().dtype(at::kFloat));
  launch_lora(x, v, Tensor(), entries, scalings, occupied, features, layer, group, num_slices, max_rank, rows, starts,
              slots);
  return v;
}

void lora_expand(const Tensor& v, const Tensor& y, const Tensor& entries, const Tensor& scalings,
                 const Tensor& occupied, const Tensor& features, int64_t layer, int64_t group, int64_t num_slices,
                 int64_t max_rank, const Tensor& rows, const Tensor& starts, const Tensor& slots) {
  launch_lora(Tensor(), v, y, entries, scalings, occupied, features, layer, group, num_slices, max_rank, rows, starts,
              slots);
}

void lora_add(const Tensor& x, const Tensor& y, const Tensor& entries, const Tensor& scalings, const Tensor& occupied,
              const Tensor& features, int64_t layer, int64_t group, int64_t num_slices, int64_t max_rank,
              const Tensor& rows, const Tensor& starts, const Tensor& slots) {
  launch_lora(x, Tensor(), y, entries, scalings, occupied, features, layer, group, num_slices, max_rank, rows, starts,
              slots);
}

Tensor choose_greedy(const Tensor& logits) {
  check(logits, "logits", logits.scalar_type(), 2);
  const int64_t n = logits.size(1);
  TORCH_CHECK(n > 0, "logits has no columns");
  Tensor token_ids = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
  by_dtype(logits, [&](auto zero) {
    using T = decltype(zero);
    for_rows(logits.size(0), n, at::get_num_threads(), [&](int64_t row) {
      const Peak peak = find_peak(data<T>(logits) + row * n, n);
      data<int64_t>(token_ids)[row] = peak.is_valid ? peak.index : -1;
    });
  });
  return token_ids;
}

// Row i of two lists with one tensor per row; nothing where there are no lists.
Changes read_changes(at::TensorList ids, at::TensorList values, size_t i, int64_t vocab_size, const char* name) {
  if (ids.empty()) return {};
  check(ids[i], name, at::kLong, 1);
  check(values[i], name, at::kFloat, 1);
  TORCH_CHECK(ids[i].size(0) == values[i].size(0), name, " must have one value per id");
  check_below(ids[i], vocab_size, name);
  return {data<int64_t>(ids[i]), data<float>(values[i]), ids[i].size(0)};
}

const int32_t* read_allowed(at::TensorList allowed, size_t i, int64_t vocab_size) {
  if (allowed.empty() || allowed[i].numel() == 0) return nullptr;
  check(allowed[i], "allowed", at::kInt, 1);
  TORCH_CHECK(allowed[i].size(0) == (vocab_size + 31) / 32, "allowed must have a bit per token");
  return data<int32_t>(allowed[i]);
}

std::vector<RowSettings> read_settings(at::ArrayRef<double> settings, at::TensorList edit_ids,
                                       at::TensorList edit_values, at::TensorList seen_ids,
                                       at::TensorList seen_counts, at::TensorList allowed, size_t num_rows,
                                       int64_t vocab_size) {
  constexpr size_t kFields = 9;
  TORCH_CHECK(settings.size() == num_rows * kFields, "settings has ", settings.size(), " entries");
  for (const auto& list : {edit_ids, edit_values, seen_ids, seen_counts, allowed})
    TORCH_CHECK(list.empty() || list.size() == num_rows, "a list must have one tensor per row, or none");
  TORCH_CHECK(edit_ids.size() == edit_values.size() && seen_ids.size() == seen_counts.size(), "ids without values");
  std::vector<RowSettings> rows;
  for (size_t i = 0; i < num_rows; ++i) {
    const double* row = settings.data() + i * kFields;
    TORCH_CHECK(row[0] >= 0 && row[0] <= 1e30 && row[2] >= 0 && row[3] <= 1 && row[7] >= 0 && row[7] < 1,
                "temperature, top_p, min_p or number of row ", i, " is out of range");
    rows.push_back({.temperature = row[0],
                    .top_p = row[2],
                    .min_p = row[3],
                    .number = row[7],
                    .presence = float(row[4]),
                    .frequency = float(row[5]),
                    .repetition = float(row[6]),
                    .top_k = int64_t(std::min(row[1], double(vocab_size))),
                    .num_top = int64_t(std::min(row[8], double(vocab_size))),
                    .edits = read_changes(edit_ids, edit_values, i, vocab_size, "edits"),
                    .seen = read_changes(seen_ids, seen_counts, i, vocab_size, "seen"),
                    .allowed = read_allowed(allowed, i, vocab_size)});
  }
  return rows;
}

std::tuple<Tensor, Tensor, Tensor> choose_tokens(const Tensor& logits, at::ArrayRef<double> settings,
                                                 at::TensorList edit_ids, at::TensorList edit_values,
                                                 at::TensorList seen_ids, at::TensorList seen_counts,
                                                 at::TensorList allowed) {
  check(logits, "logits", logits.scalar_type(), 2);
  const int64_t num_rows = logits.size(0), n = logits.size(1);
  TORCH_CHECK(n > 0 && n < (int64_t(1) << 31), "logits has ", n, " columns");
  const auto rows = read_settings(settings, edit_ids, edit_values, seen_ids, seen_counts, allowed, num_rows, n);
  int64_t num_top = -1;
  for (const RowSettings& row : rows) num_top = std::max(num_top, row.num_top);
  Tensor token_ids = at::empty({num_rows}, logits.options().dtype(at::kLong));
  Tensor logprobs = at::zeros({num_rows, 1 + num_top}, logits.options().dtype(at::kFloat));
  Tensor top_ids = at::zeros({num_rows, std::max<int64_t>(0, num_top)}, token_ids.options());
  by_dtype(logits, [&](auto zero) {
    using T = decltype(zero);
    for_rows(num_rows, n, at::get_num_threads(), [&](int64_t row) {
      data<int64_t>(token_ids)[row] =
          choose_row(data<T>(logits) + row * n, n, rows[row], data<float>(logprobs) + row * logprobs.size(1),
                     data<int64_t>(top_ids) + row * top_ids.size(1));
    });
  });
  return {token_ids, logprobs, top_ids};
}

std::tuple<Tensor, Tensor> score_tokens(const Tensor& logits, const Tensor& token_ids, int64_t num_top) {
  check(logits, "logits", logits.scalar_type(), 2);
  check(token_ids, "token_ids", at::kLong, 1);
  const int64_t num_rows = logits.size(0), n = logits.size(1);
  TORCH_CHECK(n > 0 && n < (int64_t(1) << 31), "logits has ", n, " columns");
  TORCH_CHECK(token_ids.size(0) == num_rows, "token_ids must have one per row");
  check_below(token_ids, n, "token_ids");
  TORCH_CHECK(num_top >= 0, "num_top is ", num_top);
  const int64_t width = std::min(num_top, n);
  Tensor logprobs = at::zeros({num_rows, 1 + width}, logits.options().dtype(at::kFloat));
  Tensor top_ids = at::zeros({num_rows, width}, token_ids.options());
  by_dtype(logits, [&](auto zero) {
    using T = decltype(zero);
    for_rows(num_rows, n, at::get_num_threads(), [&](int64_t row) {
      score_row(data<T>(logits) + row * n, n, data<int64_t>(token_ids)[row], width,
                data<float>(logprobs) + row * (1 + width), data<int64_t>(top_ids) + row * width);
    });
  });
  return {logprobs, top_ids};
}

}  // namespace

}  // namespace loraplex

// uses the ops above
#include "layer.h"

namespace loraplex {

#define LORAPLEX_TABLE                                                                                               \
  "Tensor entries, Tensor scalings, Tensor occupied, Tensor features, int layer, int group, int num_slices, "         \
  "int max_rank, Tensor token_indices, Tensor starts, Tensor slots"

TORCH_LIBRARY(loraplex, m) {
  m.class_<Pass>("Pass").def(torch::init(make_pass));
  m.class_<Layers>("Layers").def(torch::init(make_layers));
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> Tensor");
  m.def(
      "head_rms_norm(Tensor(a!) qkv, Tensor q_weight, Tensor k_weight, float eps, int num_heads, int num_kv_heads) "
      "-> ()");
  m.def("silu_and_mul(Tensor gate_up) -> Tensor");
  m.def("plain_linear(Tensor x, Tensor weight) -> Tensor");
  m.def("packs_linear(ScalarType dtype) -> bool", TORCH_FN(packs_linear));
  m.def("pack_linear(Tensor weight) -> Tensor");
  m.def("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor");
  m.def(
      "rope_and_store(Tensor qkv, Tensor positions, Tensor cos_sin, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor cells, int num_heads, int num_kv_heads) -> Tensor");
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor query_start, "
      "Tensor context_len, float scale, int? window) -> Tensor");
  m.def(
      "decoder_layers(__torch__.torch.classes.loraplex.Layers layers, __torch__.torch.classes.loraplex.Pass shared, "
      "Tensor x, Tensor(a!) residual, Tensor[] k_caches, Tensor[] v_caches, Tensor[] gains, Tensor[] head_gains) "
      "-> Tensor");
  m.def("lora_shrink(Tensor x, " LORAPLEX_TABLE ") -> Tensor");
  m.def("lora_expand(Tensor v, Tensor(a!) y, " LORAPLEX_TABLE ") -> ()");
  m.def("lora_add(Tensor x, Tensor(a!) y, " LORAPLEX_TABLE ") -> ()");
  m.def("choose_greedy(Tensor logits) -> Tensor");
  m.def(
      "choose_tokens(Tensor logits, float[] settings, Tensor[] edit_ids, Tensor[] edit_values, Tensor[] seen_ids, "
      "Tensor[] seen_counts, Tensor[] allowed) -> (Tensor, Tensor, Tensor)");
  m.def("score_tokens(Tensor logits, Tensor token_ids, int num_top) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(loraplex, CPU, m) {
  m.impl("rms_norm", TORCH_FN(rms_norm));
  m.impl("add_rms_norm", TORCH_FN(add_rms_norm));
  m.impl("head_rms_norm", TORCH_FN(head_rms_norm));
  m.impl("silu_and_mul", TORCH_FN(silu_and_mul));
  m.impl("plain_linear", TORCH_FN(plain_linear));
  m.impl("pack_linear", TORCH_FN(pack_linear));
  m.impl("packed_linear", TORCH_FN(packed_linear));
  m.impl("rope_and_store", TORCH_FN(rope_and_store));
  m.impl("paged_attention", TORCH_FN(paged_attention));
  m.impl("decoder_layers", TORCH_FN(decoder_layers));
  m.impl("lora_shrink", TORCH_FN(lora_shrink));
  m.impl("lora_expand", TORCH_FN(lora_expand));
  m.impl("lora_add", TORCH_FN(lora_add));
  m.impl("choose_greedy", TORCH_FN(choose_greedy));
  m.impl("choose_tokens", TORCH_FN(choose_tokens));
  m.impl("score_tokens", TORCH_FN(score_tokens));
}

}  // namespace loraplex
