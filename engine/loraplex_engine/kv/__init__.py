"""The paged KV cache: host bookkeeping (`pool`) and device tensors (`cache`)."""
