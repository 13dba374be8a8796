// All decoder layers in one call: what models/decoder.py composes of nine ops a layer, by the same functions in the same
// order, so with the same bits. Included by ops.cpp after the ops.
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

// Weights and facts of the layers of one model; the linears in the order of kSlices, layer by layer.
struct Layers : torch::CustomClassHolder {
  std::vector<Tensor> weights;
  std::vector<std::optional<Tensor>> biases;
  std::vector<int64_t> out_features;  // of one layer
  std::vector<std::optional<int64_t>> windows;
  int64_t num_heads, num_kv_heads;
  double eps, scale;

  int64_t size() const { return int64_t(windows.size()); }
};

c10::intrusive_ptr<Layers> make_layers(std::vector<Tensor> weights, std::vector<std::optional<Tensor>> biases,
                                       std::vector<int64_t> out_features, std::vector<std::optional<int64_t>> windows,
                                       int64_t num_heads, int64_t num_kv_heads, double eps, double scale) {
  const size_t count = std::size(kSlices);
  TORCH_CHECK(weights.size() == count * windows.size() && biases.size() == weights.size(), "a layer has four linears");
  TORCH_CHECK(out_features.size() == count, "a layer has four linears");
  auto layers = c10::make_intrusive<Layers>();
  layers->weights = std::move(weights);
  layers->biases = std::move(biases);
  layers->out_features = std::move(out_features);
  layers->windows = std::move(windows);
  layers->num_heads = num_heads;
  layers->num_kv_heads = num_kv_heads;
  layers->eps = eps;
  layers->scale = scale;
  return layers;
}

Tensor project(const Layers& layers, const Pass& pass, int64_t index, int64_t group, const Tensor& x) {
  RECORD_FUNCTION("loraplex::packed_linear", std::vector<c10::IValue>());  // a profiler sees it as if it came by itself
  const int64_t place = index * int64_t(std::size(kSlices)) + group;
  Tensor y = packed_linear(x, layers.weights[place], layers.biases[place], layers.out_features[group]);
  if (pass.entries.defined())
    lora_add(x, y, pass.entries, pass.scalings, pass.occupied, pass.features, index, group, kSlices[group],
             pass.max_rank, pass.token_indices, pass.starts, pass.slots);
  return y;
}

// x is normalised for the first layer, and so is the result for what follows the last. `gains`: of each layer's norm
// after attention and of the norm that follows the layer; `head_gains`: none, or those of q and k of each layer.
Tensor decoder_layers(const c10::intrusive_ptr<Layers>& layers, const c10::intrusive_ptr<Pass>& pass, const Tensor& x,
                      const Tensor& residual, const std::vector<Tensor>& k_caches, const std::vector<Tensor>& v_caches,
                      const std::vector<Tensor>& gains, const std::vector<Tensor>& head_gains) {
  const Layers& l = *layers;
  const Pass& p = *pass;
  const size_t count = l.windows.size();
  TORCH_CHECK(k_caches.size() == count && v_caches.size() == count && gains.size() == 2 * count, "one of each a layer");
  TORCH_CHECK(head_gains.empty() || head_gains.size() == 2 * count, "two head gains a layer");
  Tensor normal = x;
  for (int64_t i = 0; i < l.size(); ++i) {
    const Tensor &k_cache = k_caches[i], &v_cache = v_caches[i];
    const Tensor qkv = project(l, p, i, 0, normal);
    if (!head_gains.empty())
      head_rms_norm(qkv, head_gains[2 * i], head_gains[2 * i + 1], l.eps, l.num_heads, l.num_kv_heads);
    const Tensor q = rope_and_store(qkv, p.positions, p.cos_sin, k_cache, v_cache, p.cells, l.num_heads, l.num_kv_heads);
    const Tensor attended =
        paged_attention(q, k_cache, v_cache, p.block_tables, p.query_start, p.context_len, l.scale, l.windows[i]);
    normal = add_rms_norm(project(l, p, i, 1, attended), residual, gains[2 * i], l.eps);
    const Tensor inner = silu_and_mul(project(l, p, i, 2, normal));
    normal = add_rms_norm(project(l, p, i, 3, inner), residual, gains[2 * i + 1], l.eps);
  }
  return normal;
}

}  // namespace
}  // namespace loraplex
