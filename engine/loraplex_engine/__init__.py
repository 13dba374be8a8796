"""The engine: one base model, many adapters, one forward pass."""
