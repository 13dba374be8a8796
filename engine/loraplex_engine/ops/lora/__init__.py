"""Segmented LoRA: `shrink` to rank and `expand` to features, for rows that use different adapters in one step.

`table` is where the kernels find each slot's weights, `segment` says which rows use which slot, `lora` holds the ops.
"""
