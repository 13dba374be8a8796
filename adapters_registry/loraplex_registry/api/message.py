"""The types of the bodies that the registry's routes take and answer, for whoever describes the whole API."""

from __future__ import annotations

import msgspec

from loraplex_registry.adapters.view import BaseView
from loraplex_registry.api.adapters import AdapterPatch
from loraplex_registry.api.aliases import NewTargets
from loraplex_registry.api.bases import NewBase
from loraplex_registry.uploads.announcement import UploadAnnouncement
from loraplex_registry.uploads.order import DryRunView
from loraplex_registry.wire.adapter import AdapterView, AliasChangeView, AliasView, VersionView
from loraplex_registry.wire.upload import UploadView

MESSAGES: tuple[type[msgspec.Struct], ...] = (
    AdapterPatch,
    AdapterView,
    AliasChangeView,
    AliasView,
    BaseView,
    DryRunView,
    NewBase,
    NewTargets,
    UploadAnnouncement,
    UploadView,
    VersionView,
)
