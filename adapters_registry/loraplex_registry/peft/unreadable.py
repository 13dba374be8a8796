"""What msgspec's decoders raise of bytes that are damaged or hostile: not only its own errors."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""For bytes from storage, the network, or a process that reads what tenants wrote."""
