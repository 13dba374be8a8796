"""What a benchmark refuses.

ClientError
    BenchError
"""

from __future__ import annotations

from loraplex.client.errors import ClientError


class BenchError(ClientError):
    """The benchmark cannot be taken as it was asked for; the message says why."""

    code = "bench_refused"
