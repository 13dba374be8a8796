"""Next tokens from scores, and how likely given ones are, all rows of a step in one call: naive, PyTorch, C++ forms."""
