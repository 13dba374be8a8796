"""What the routes work with, composed once in `app`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from litestar import Request
from litestar.di import NamedDependency
from litestar.params import FromPath

from loraplex_registry.adapters.base_model import BaseModels
from loraplex_registry.adapters.lifecycle import Lifecycle
from loraplex_registry.aliases import Aliases
from loraplex_registry.db.database import Database
from loraplex_registry.parity.gate import ParityGate
from loraplex_registry.settings import RegistrySettings
from loraplex_registry.storage.store import Store
from loraplex_registry.uploads.admission import Admission
from loraplex_registry.uploads.large import LargeUploads
from loraplex_registry.uploads.upload import Uploads


@dataclass(frozen=True)
class Services:
    """The registry's services."""

    settings: RegistrySettings
    database: Database
    store: Store
    bases: BaseModels
    lifecycle: Lifecycle
    aliases: Aliases
    gate: ParityGate
    admission: Admission
    uploads: Uploads
    large_uploads: LargeUploads


Call: TypeAlias = Request[Any, Any, Any]
Work: TypeAlias = NamedDependency[Services]
Name: TypeAlias = FromPath[str]
Number: TypeAlias = FromPath[str]
"""A version's number as the path spells it; `read_number` reads it."""
