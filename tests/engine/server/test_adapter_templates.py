"""The templates that adapters bring: found by digest, rendered in the sandbox only, and harmless whatever they say."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chats import Reader, reference_ids
from loraplex_engine.errors import InvalidRequestError, LoadFailedError
from loraplex_engine.server import template_library
from loraplex_engine.server.adapter_file import AdapterFiles
from loraplex_registry.wire.adapter import Manifest, ManifestFile
from loraplex_registry.wire.client import ArtifactError, ArtifactMissingError
from loraplex_registry.wire.digest import artifact_path
from template_texts import STYLES
from toy_tokenizers import CHATML, write_byte_level

CHAT = [{"role": "user", "content": "Hi"}]
PREFIXED = "X:" + CHATML


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


class Files:
    """Templates in a dictionary; counts the questions."""

    def __init__(self, templates: dict[str, str | None]) -> None:
        self.templates, self.asked = templates, list[str]()

    async def find(self, digest: str) -> str | None:
        self.asked.append(digest)
        await asyncio.sleep(0.01)
        if digest not in self.templates:
            raise LoadFailedError
        return self.templates[digest]

    def close(self) -> None:
        pass


async def test_only_the_adapter_that_brings_a_template_is_rendered_with_it(tmp_path: Path) -> None:
    files = Files({digest(1): PREFIXED, digest(2): None, digest(3): CHATML})
    prefixed = write_byte_level(tmp_path / "prefixed", PREFIXED)
    folder = write_byte_level(tmp_path / "base")
    async with Reader(folder, files) as reader:
        plain = await reader.ids(CHAT)
        assert await reader.ids(CHAT, digest(1)) == reference_ids(prefixed, CHAT) != plain
        starts = reader.sandbox.num_starts
        assert [await reader.ids(CHAT, digest(number)) for number in (2, 3)] == [plain, plain]
        assert await reader.ids(CHAT) == plain
    # what the base renders needs no sandbox, and what was found is not asked for again
    assert (starts, sorted(files.asked)) == (1, [digest(1), digest(2), digest(3)])


@pytest.mark.parametrize("style", STYLES)
async def test_an_adapters_template_renders_as_the_base_of_it_would(tmp_path: Path, style: str) -> None:
    own = write_byte_level(tmp_path / "own", STYLES[style])
    messages = [*CHAT, {"role": "assistant", "content": " a <|im_end|> b"}, {"role": "user", "content": "\U0001fae0"}]
    async with (
        Reader(own) as base,
        Reader(write_byte_level(tmp_path / "x"), Files({digest(1): STYLES[style]})) as other,
    ):
        assert await other.ids(messages, digest(1)) == await base.ids(messages)


async def test_a_base_without_template_takes_chats_of_adapters_that_bring_one(tmp_path: Path) -> None:
    async with Reader(write_byte_level(tmp_path, None), Files({digest(1): PREFIXED, digest(2): None})) as reader:
        assert await reader.ids(CHAT, digest(1))
        with pytest.raises(InvalidRequestError, match="no chat template"):
            await reader.ids(CHAT, digest(2))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(1000) %}{{ 'x' * 10000 }}{% endfor %}",
        "{% for %}",
        "{{ raise_exception('no chats') }}",
    ],
    ids=["class", "loop", "10 MB", "syntax", "refusal"],
)
async def test_a_hostile_template_is_a_refusal_and_others_go_on(tmp_path: Path, source: str) -> None:
    async with Reader(write_byte_level(tmp_path), Files({digest(1): source, digest(2): PREFIXED})) as reader:
        good = await reader.ids(CHAT, digest(2))
        for _ in range(2):
            began_at = time.monotonic()
            with pytest.raises(InvalidRequestError) as refusal:
                await reader.ids(CHAT, digest(1))
            assert refusal.value.param == "messages"
            # a second on an idle machine; one that runs tests has other things to do
            assert time.monotonic() - began_at < 30
        assert await reader.ids(CHAT, digest(2)) == good


async def test_a_template_is_looked_for_once_though_many_ask_and_some_go_away(tmp_path: Path) -> None:
    files = Files({digest(1): PREFIXED})
    async with Reader(write_byte_level(tmp_path), files) as reader:
        tasks = [asyncio.create_task(reader.ids(CHAT, digest(1))) for _ in range(8)]
        await asyncio.sleep(0.005)
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert all(result == results[1] for result in results[1:])
    assert files.asked == [digest(1)]


async def test_what_could_not_be_fetched_is_tried_again_and_what_is_kept_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_library, "_MAX_TEMPLATES", 2)
    files = Files({digest(number): None for number in range(3)})
    async with Reader(write_byte_level(tmp_path), files) as reader:
        with pytest.raises(LoadFailedError):
            await reader.ids(CHAT, digest(9))
        files.templates[digest(9)] = PREFIXED
        assert await reader.ids(CHAT, digest(9)) != await reader.ids(CHAT)
        for number in (0, 1, 0, 2, 0):
            await reader.ids(CHAT, digest(number))
        assert list(reader.templates._found) == [digest(2), digest(0)]
        assert reader.templates._searches == {}


class Client:
    """A registry's artifacts: one digest with a template, or an error."""

    def __init__(self, template: bytes | None = None, error: type[Exception] | None = None, sha256: str = "") -> None:
        self.template, self.error = template, error
        self.sha256 = sha256 or hashlib.sha256(template or b"").hexdigest()

    def manifest(self, digest: str) -> Manifest:
        if self.error is not None:
            raise self.error
        files = (ManifestFile("chat_template.jinja", len(self.template), self.sha256),) if self.template else ()
        return Manifest(digest=digest, base_fingerprint="", files=files, config={})

    def read_file(self, digest: str, name: str, max_bytes: int) -> bytes:
        assert self.template is not None
        return self.template

    def close(self) -> None:
        pass


@pytest.fixture
def files(tmp_path: Path) -> Callable[[Any], AdapterFiles]:
    def build(client: Any) -> AdapterFiles:
        built = AdapterFiles(str(tmp_path))
        built._client = client
        return built

    return build


async def test_the_registry_says_what_an_adapter_brings(files: Callable[[Any], AdapterFiles]) -> None:
    assert await files(Client(b"{{ 1 }}")).find(digest(1)) == "{{ 1 }}"
    assert await files(Client()).find(digest(1)) is None
    with pytest.raises(InvalidRequestError, match="UTF-8"):
        await files(Client(b"\xff")).find(digest(1))


@pytest.mark.parametrize(
    "client", [Client(error=ArtifactError), Client(error=ArtifactMissingError), Client(b"x", sha256="0" * 64), None]
)
async def test_the_disk_knows_while_the_registry_does_not(
    tmp_path: Path, files: Callable[[Any], AdapterFiles], client: Client | None
) -> None:
    with pytest.raises(LoadFailedError):
        await files(client).find(digest(1))
    folder = tmp_path / "adapters" / artifact_path(digest(1))
    folder.mkdir(parents=True)
    assert await files(client).find(digest(1)) is None
    (folder / "chat_template.jinja").write_text("{{ 2 }}")
    assert await files(client).find(digest(1)) == "{{ 2 }}"


async def test_a_registry_that_hangs_is_not_waited_for(
    files: Callable[[Any], AdapterFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex_engine.server.adapter_file._FETCH_S", 0.05)
    client = Client()
    monkeypatch.setattr(client, "manifest", lambda digest: time.sleep(0.3))
    with pytest.raises(LoadFailedError, match="too long"):
        await files(client).find(digest(1))
