"""Next tokens from scores, all rows of a step in one call: naive, PyTorch and C++ forms (`choose`)."""
