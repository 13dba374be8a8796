"""Tensors of a base through the mapping of its safetensors files."""
