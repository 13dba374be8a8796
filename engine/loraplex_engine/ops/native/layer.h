// One decoder layer in one call: what models/decoder.py composes of nine ops, by the same functions in the same order,
// so with the same bits. Included by ops.cpp after the ops.
#pragma once

#include <ATen/record_function.h>
#include <torch/custom_class.h>

namespace loraplex {
namespace {

constexpr int64_t kSlices[] = {3, 1, 2, 1};  // of the groups qkv, o, gate_up, down

// What the layers of one pass share; where no row has an adapter the tensors of the table are undefined.
struct Pass : torch::CustomClassHolder {
  Tensor positions, cells, cos_sin, block_tables, query_start, context_len;
  Tensor entries, scalings, occupied, features, token_indices, starts, slots;
  int64_t max_rank = 0;
};

c10::intrusive_ptr<Pass> make_pass(const std::vector<Tensor>& rows, const std::vector<Tensor>& adapters,
                                   int64_t max_rank) {
  TORCH_CHECK(rows.size() == 6 && (adapters.empty() || adapters.size() == 7), "a pass has 6 tensors, or 13");
  auto pass = c10::make_intrusive<Pass>();
  Tensor* const shared[] = {&pass->positions,    &pass->cells,       &pass->cos_sin,
                            &pass->block_tables, &pass->query_start, &pass->context_len};
  Tensor* const table[] = {&pass->entries,       &pass->scalings, &pass->occupied, &pass->features,
                           &pass->token_indices, &pass->starts,   &pass->slots};
  for (size_t i = 0; i < rows.size(); ++i) *shared[i] = rows[i];
  for (size_t i = 0; i < adapters.size(); ++i) *table[i] = adapters[i];
  pass->max_rank = max_rank;
  return pass;
}

// Weights and facts of one layer; the linears in the order of kSlices.
struct Layer : torch::CustomClassHolder {
  std::vector<Tensor> weights;
  std::vector<std::optional<Tensor>> biases;
  std::vector<int64_t> out_features;
  int64_t index, num_heads, num_kv_heads;
  double eps, scale;
  std::optional<int64_t> window;
};

c10::intrusive_ptr<Layer> make_layer(std::vector<Tensor> weights, std::vector<std::optional<Tensor>> biases,
                                     std::vector<int64_t> out_features, int64_t index, int64_t num_heads,
                                     int64_t num_kv_heads, double eps, double scale, std::optional<int64_t> window) {
  const size_t count = std::size(kSlices);
  TORCH_CHECK(weights.size() == count && biases.size() == count && out_features.size() == count,
              "a layer has four linears");
  auto layer = c10::make_intrusive<Layer>();
  layer->weights = std::move(weights);
  layer->biases = std::move(biases);
  layer->out_features = std::move(out_features);
  layer->index = index;
  layer->num_heads = num_heads;
  layer->num_kv_heads = num_kv_heads;
  layer->eps = eps;
  layer->scale = scale;
  layer->window = window;
  return layer;
}

Tensor project(const Layer& layer, const Pass& pass, int64_t group, const Tensor& x) {
  RECORD_FUNCTION("loraplex::packed_linear", std::vector<c10::IValue>());  // a profiler sees it as if it came by itself
  Tensor y = packed_linear(x, layer.weights[group], layer.biases[group], layer.out_features[group]);
  if (pass.entries.defined())
    lora_add(x, y, pass.entries, pass.scalings, pass.occupied, pass.features, layer.index, group, kSlices[group],
             pass.max_rank, pass.token_indices, pass.starts, pass.slots);
  return y;
}

// x is normalised for this layer, and so is the result for the next. `head_gains`: none, or those of q and k.
Tensor decoder_layer(const c10::intrusive_ptr<Layer>& layer, const c10::intrusive_ptr<Pass>& pass, const Tensor& x,
                     const Tensor& residual, const Tensor& k_cache, const Tensor& v_cache, const Tensor& post_gain,
                     const Tensor& next_gain, const std::vector<Tensor>& head_gains) {
  const Layer& l = *layer;
  const Pass& p = *pass;
  const Tensor qkv = project(l, p, 0, x);
  if (!head_gains.empty())
    head_rms_norm(qkv, head_gains.at(0), head_gains.at(1), l.eps, l.num_heads, l.num_kv_heads);
  const Tensor q = rope_and_store(qkv, p.positions, p.cos_sin, k_cache, v_cache, p.cells, l.num_heads, l.num_kv_heads);
  const Tensor attended =
      paged_attention(q, k_cache, v_cache, p.block_tables, p.query_start, p.context_len, l.scale, l.window);
  const Tensor normal = add_rms_norm(project(l, p, 1, attended), residual, post_gain, l.eps);
  const Tensor inner = silu_and_mul(project(l, p, 2, normal));
  return add_rms_norm(project(l, p, 3, inner), residual, next_gain, l.eps);
}

}  // namespace
}  // namespace loraplex
