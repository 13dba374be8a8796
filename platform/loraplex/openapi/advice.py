"""The operation that gives advice, and what it answers."""

from __future__ import annotations

import msgspec

from loraplex.advise.finding import Finding
from loraplex.openapi.operation import Answer, Operation
from loraplex.openapi.parameter import OF_TENANT
from loraplex.openapi.schema import list_of

ADVICE_MESSAGES: tuple[type[msgspec.Struct], ...] = (Finding,)

ADVICE: tuple[Operation, ...] = (
    Operation(
        method="get",
        path="/api/v1/advice",
        name="showAdvice",
        tag="reports",
        summary="Say what to change, and why; of the key's own tenant, for platform keys of all",
        answers=(Answer(200, "What each rule found out, advice first", list_of("Finding")),),
        codes=("not_found",),
        parameters=(OF_TENANT,),
    ),
)
