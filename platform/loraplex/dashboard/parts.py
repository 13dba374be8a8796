"""What the pages are made of: the parts of the gateway that they ask, handed over by the composition root."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from loraplex.dashboard.port import AdapterConsole
from loraplex.db.database import Database
from loraplex.escalations.service import EscalationService
from loraplex.fleet.fleet import Fleet
from loraplex.fleet.reconciler import Reconciler
from loraplex.gateway.advising import Advising
from loraplex.gateway.authentication import Authenticator
from loraplex.gateway.directory import Directory
from loraplex.gateway.drain import Drain
from loraplex.gateway.inference import Inference
from loraplex.gateway.names import NameIndex
from loraplex.gateway.tries import TryLimit
from loraplex.quotas.limiter import Limiter
from loraplex.stats.recorder import StatsRecorder
from loraplex.tenants.service import TenantService


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The gateway's parts; `freshen_keys` takes in what was changed at other gateways.

    `registry` is the registry of this process, called as its routes call it.
    """

    database: Database
    directory: Directory
    authenticator: Authenticator
    freshen_keys: Callable[[], Awaitable[None]]
    names: NameIndex
    fleet: Fleet
    reconciler: Reconciler
    limiter: Limiter
    stats: StatsRecorder
    tenants: TenantService
    escalations: EscalationService
    inference: Inference
    drain: Drain
    registry: Any
    adapters: AdapterConsole
    advising: Advising
    logins: TryLimit
