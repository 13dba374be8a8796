"""The form in which a whole adapter is handed to the `LoraTable`: one record for each of its modules. No torch.

Made ahead, beside the steps, so that binding an adapter is arithmetic on one array.
"""

from __future__ import annotations

import numpy as np

MODULE_ROW = np.dtype([("place", "<i8", 3), ("entry", "<i8", 5), ("scaling", "<f8")])
"""`place`: layer, group, slice. `entry`: as in the table, byte offsets in the adapter's buffer for addresses, -1 for
what the module does not have."""

POINTERS = (0, 1, 3, 4)
"""Columns of an entry that are addresses: A, B, g, c; the other one is the rank."""
