"""Random acts on uploads in parts, deaths and sweeps among them: a model in memory agrees with rows and store."""

from __future__ import annotations

import asyncio
import base64
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from loraplex_registry.adapters.base_model import BaseModels
from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.db.database import Database
from loraplex_registry.db.model import UploadRow, VersionRow
from loraplex_registry.errors import ConflictError, NotFoundError, RegistryError, UnavailableError
from loraplex_registry.parity.gate import ParityGate
from loraplex_registry.settings import RegistrySettings
from loraplex_registry.storage.memory import MemoryStore
from loraplex_registry.storage.store import PartPlace
from loraplex_registry.uploads import admission as admission_module
from loraplex_registry.uploads.admission import Admission
from loraplex_registry.uploads.announcement import UploadAnnouncement
from loraplex_registry.uploads.large import LargeUploads
from loraplex_registry.uploads.order import UploadOrder
from loraplex_registry.uploads.promotion import promote_ready
from loraplex_registry.uploads.sweep import Sweeper
from loraplex_registry.uploads.upload_row import UploadRows
from loraplex_registry.wire.identity import Identity
from part_world import announce, sha256
from registry_world import ThreadChecker, build_tiny_spec, read_folder
from support import tiny_llama_config, write_adapter, write_base

BY = Identity(role="tenant", tenant_id="id", tenant="team-a", scopes=(), key_id="k", actor="a", request_id="r")
ADMIN = msgspec.structs.replace(BY, role="admin")
ORDER = UploadOrder(tenant=TenantRef("id", "team-a"), adapter="style", by=BY)
NUM_CONTENTS = 3
uploads = st.integers(0, 5)
ends = st.sampled_from(["", "fails", "dies", "dies after the transaction"])


class DiedError(BaseException):
    """The process is gone."""


@dataclass
class Model:
    """What an upload should be."""

    content: int
    public_id: str
    state: str = "open"
    received: set[int] = field(default_factory=set)
    version: int | None = None


class UploadMachine(RuleBasedStateMachine):
    template: Path
    contents: list[dict[str, bytes]]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="loraplex-uploads-"))
        shutil.copyfile(self.template, self.folder / "db")
        self.database = Database(f"sqlite+aiosqlite:///{self.folder}/db")
        self.store = MemoryStore()
        rules = RegistrySettings(database_url="", object_store_url="", parity_gate="off", orphan_grace_s=-1)
        gate = ParityGate(self.database, rules, promote_ready)
        admission = Admission(self.database, self.store, ThreadChecker(), rules, gate)
        self.large = LargeUploads(self.database, self.store, admission)
        self.sweeper = Sweeper(self.database, self.store, rules)
        self.models: list[Model] = []
        self.version_of: dict[int, int] = {}

    def teardown(self) -> None:
        self.run(self.database.close())
        self.store.close()
        self.loop.close()
        shutil.rmtree(self.folder)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def find(self, at: int) -> Model | None:
        return self.models[at % len(self.models)] if self.models else None

    @initialize()
    def begin(self) -> None:
        self.run(BaseModels(self.database).register(build_tiny_spec(), ADMIN))

    @rule(content=st.integers(0, NUM_CONTENTS - 1))
    def create(self, content: int) -> None:
        if len(self.models) < 6:
            body = msgspec.convert(announce(self.contents[content]), UploadAnnouncement)
            self.models.append(Model(content, self.run(self.large.create(ORDER, body, "")).id))

    @rule(at=uploads, file=st.integers(0, 1), is_whole=st.booleans())
    def send(self, at: int, file: int, is_whole: bool) -> None:
        model = self.find(at)
        if model is None:
            return
        sent = list(self.contents[model.content].values())[file]
        checksum = base64.b64encode(bytes.fromhex(sha256(sent))).decode()

        async def chunks() -> AsyncIterator[bytes]:
            yield sent if is_whole else sent[:-1] + bytes([sent[-1] ^ 1])

        writing = self.large.write_part(ORDER, model.public_id, PartPlace(file, 0), checksum, chunks())
        if model.state == "open" and is_whole:
            self.run(writing)
            model.received.add(file)
        else:
            with pytest.raises(RegistryError):
                self.run(writing)

    @rule(content=st.integers(0, NUM_CONTENTS - 1))
    def create_and_send_all(self, content: int) -> None:
        self.create(content)
        for file in range(2):
            self.send(len(self.models) - 1, file, is_whole=True)

    @rule(at=uploads, end=ends)
    def complete(self, at: int, end: str) -> None:
        model = self.find(at)
        if model is None:
            return
        with pytest.MonkeyPatch.context() as patch:
            if model.state == "open" and len(model.received) == 2:
                _let_end(patch, end)
            completing = self.large.complete(ORDER, model.public_id)
            if model.state == "gone":
                self.expect(NotFoundError, completing)
            elif model.state == "completing" or (model.state == "open" and len(model.received) < 2):
                self.expect(ConflictError, completing)
            elif model.state == "completed" or not end:
                self.check_published(model, self.run(completing))
            else:
                self.expect(UnavailableError if end == "fails" else DiedError, completing)
                self.note_end(model, end)

    @rule(content=st.integers(0, NUM_CONTENTS - 1), end=ends, is_swept=st.booleans())
    def upload_whole(self, content: int, end: str, is_swept: bool) -> None:
        self.create_and_send_all(content)
        newest = len(self.models) - 1
        self.complete(newest, end)
        if is_swept:
            self.sweep()
        self.complete(newest, "")

    def note_end(self, model: Model, end: str) -> None:
        if end == "dies":
            model.state = "completing"
        elif end == "dies after the transaction":
            model.state = "completed"
            model.version = self.version_of.setdefault(model.content, len(self.version_of) + 1)

    def check_published(self, model: Model, result: Any) -> None:
        expected = self.version_of.setdefault(model.content, len(self.version_of) + 1)
        body = msgspec.json.decode(result.encode())
        assert (body["version"], body["state"]) == (expected, "ready")
        model.state, model.version = "completed", expected

    @rule(at=uploads)
    def delete(self, at: int) -> None:
        model = self.find(at)
        if model is None:
            return
        deleting = self.large.abort(ORDER, model.public_id)
        if model.state == "open":
            self.run(deleting)
            model.state = "gone"
        else:
            self.expect(NotFoundError if model.state == "gone" else ConflictError, deleting)

    @rule()
    def a_minute_passes(self) -> None:
        then = datetime.now(UTC) - timedelta(seconds=61)
        self.write(sa.update(UploadRow).values(touched_at=then))
        for model in self.models:
            model.state = "open" if model.state == "completing" else model.state

    @rule(at=uploads)
    def a_day_passes(self, at: int) -> None:
        model = self.find(at)
        if model is not None and model.state != "completing":
            then = datetime.now(UTC) - timedelta(days=2)
            values = {"created_at": then, "expires_at": then + timedelta(days=1)}
            self.write(sa.update(UploadRow).where(UploadRow.public_id == model.public_id).values(values))
            model.state = "gone"

    @rule()
    def sweep(self) -> None:
        self.run(self.sweeper.sweep())
        alive = {model.public_id for model in self.models if model.state in ("open", "completing") and model.received}
        assert {upload for upload, _ in self.store.list_uploads()} == alive

    def expect(self, error: type[BaseException], work: Any) -> None:
        with pytest.raises(error):
            self.run(work)

    def write(self, statement: Any) -> None:
        self.run(self.database.write(lambda session: session.execute(statement)))

    @invariant()
    def rows_are_those_of_the_model(self) -> None:
        async def read() -> list[int]:
            async with self.database.read() as session:
                return list((await session.execute(sa.select(VersionRow.number).order_by(VersionRow.number))).scalars())

        assert self.run(read()) == list(range(1, len(self.version_of) + 1))

    @invariant()
    def uploads_show_what_has_arrived(self) -> None:
        for model in self.models:
            showing = self.large.show(ORDER, model.public_id, "")
            if model.state == "gone":
                self.expect(NotFoundError, showing)
                continue
            view = self.run(showing)
            if model.state == "completed":
                assert (view.state, view.received_bytes) == ("completed", view.size_bytes)
            else:
                assert {at for at, part in enumerate(view.parts) if part.received} == model.received


def _let_end(patch: pytest.MonkeyPatch, end: str) -> None:
    async def fail(*args: Any) -> Any:
        raise UnavailableError

    async def die(*args: Any) -> Any:
        raise DiedError

    async def forget(*args: Any) -> None:
        return None

    real = Admission.admit

    async def admit_and_die(self: Admission, *args: Any) -> Any:
        await real(self, *args)
        raise DiedError

    if end == "fails":
        patch.setattr(admission_module, "publish", fail)
    elif end:
        patch.setattr(UploadRows, "reopen", forget)
        if end == "dies":
            patch.setattr(admission_module, "publish", die)
        else:
            patch.setattr(Admission, "admit", admit_and_die)


def test_uploads_in_parts_do_as_the_model(sqlite_template: Path, tmp_path: Path) -> None:
    base = write_base(tmp_path / "tiny-llama", tiny_llama_config())
    UploadMachine.template = sqlite_template
    UploadMachine.contents = [
        read_folder(write_adapter(tmp_path / f"a{seed}", base, seed=seed)) for seed in range(NUM_CONTENTS)
    ]
    run_state_machine_as_test(UploadMachine, settings=settings(max_examples=6, stateful_step_count=20, deadline=None))
