"""Cases of sections 1 to 3 that concern uploads, through the API and the checks' process, on both pairs of backends.

A refusal is more than a code: it is told with the case's check, nothing is stored or listed, the next good upload
succeeds, and the process of the checks is the same one afterwards.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import numpy as np
import pytest

from loraplex_registry.peft.spec import BaseSpec, ModuleSpec
from loraplex_registry.settings import RegistrySettings
from loraplex_registry.uploads.checker import ProcessChecker
from registry_world import BASE, ENGINE_KEY, Caller, World, build_tiny_spec

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
Q0 = "model.layers.0.self_attn.q_proj"
VOCAB, HIDDEN = 331, 80
Files = dict[str, bytes]
Tensors = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def registry_settings(dialect: str, database_url: str, tmp_path: Path, request: Any) -> RegistrySettings:
    """SQLite has its objects in a folder, Postgres in a bucket."""
    store = f"file://{tmp_path}/objects" if dialect == "sqlite" else request.getfixturevalue("s3_url")
    return RegistrySettings(database_url=database_url, object_store_url=store, engine_key=ENGINE_KEY, parity_gate="off")


@pytest.fixture
async def checker() -> AsyncIterator[ProcessChecker]:
    """The real one."""
    each = ProcessChecker(2)
    yield each
    each.close()


def build_spec() -> BaseSpec:
    spec = build_tiny_spec()
    whole = {
        "model.embed_tokens": ModuleSpec(VOCAB, HIDDEN, "embedding"),
        "lm_head": ModuleSpec(VOCAB, HIDDEN, "head"),
        "model.norm": ModuleSpec(HIDDEN, 1, "norm"),
    }
    return msgspec.structs.replace(spec, modules=spec.modules | whole)


SPEC = build_spec()


@pytest.fixture
async def world(empty_world: World) -> World:
    """The app with a base that has a head and an embedding."""
    admin = empty_world.caller(None, role="admin")
    answer = await admin("POST", "/api/v1/bases", content=msgspec.json.encode(SPEC))
    assert answer.status_code == 201, answer.text
    return empty_world


def tensors_of(rank: int | Callable[[str], int] = 4, leaves: tuple[str, ...] = ("q_proj", "v_proj")) -> Tensors:
    rng = np.random.default_rng(3)
    tensors: Tensors = {}
    for path, module in SPEC.modules.items():
        if module.kind == "linear" and path.endswith(leaves):
            r = rank if isinstance(rank, int) else rank(path)
            tensors[f"{PREFIX}{path}.lora_A.weight"] = rng.normal(size=(r, module.in_features)).astype("<f4")
            tensors[f"{PREFIX}{path}.lora_B.weight"] = rng.normal(size=(module.out_features, r)).astype("<f4")
    return tensors


def encode(tensors: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    header: dict[str, Any] = {}
    data = b""
    for name, values in tensors.items():
        raw = values.tobytes()
        dtype = {"float32": "F32", "float16": "F16", "int8": "I8"}[values.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def config_of(**changes: Any) -> dict[str, Any]:
    plain = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE,
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    return {name: value for name, value in (plain | changes).items() if value is not ...}


def adapter(tensors: Tensors | bytes | None = None, *, extra: Files | None = None, **changes: Any) -> Files:
    weights = tensors if isinstance(tensors, bytes) else encode(tensors_of() if tensors is None else tensors)
    return {CONFIG: json.dumps(config_of(**changes)).encode(), WEIGHTS: weights, **(extra or {})}


def raw_config(text: str | bytes) -> Files:
    return adapter() | {CONFIG: text.encode() if isinstance(text, str) else text}


def with_tensors(**more: np.ndarray[Any, Any]) -> Tensors:
    return tensors_of() | {PREFIX + name.replace("__", "."): values for name, values in more.items()}


def without(part: str, *, count: int = 1) -> Tensors:
    gone = [name for name in tensors_of() if part in name][:count]
    return {name: values for name, values in tensors_of().items() if name not in gone}


def zeros(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, "<f4")


def matrix(rows: int, columns: int = HIDDEN) -> np.ndarray[Any, Any]:
    return np.ones((rows, columns), "<f4")


class _Exploit:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (f"{os.environ['LORAPLEX_TEST_MARKER']}",)


def exploit() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"x": _Exploit()}))
    return content.getvalue()


def nan_weights() -> Tensors:
    tensors = tensors_of()
    next(iter(tensors.values()))[0, 0] = np.nan
    return tensors


PATTERN_RANK = {"layers.0.self_attn.q_proj": 2}
DORA = {
    f"{PREFIX}{path}.lora_magnitude_vector": np.ones(module.out_features, "<f4")
    for path, module in SPEC.modules.items()
    if module.kind == "linear" and path.endswith(("q_proj", "v_proj"))
}
LORA_BIAS = {name.replace("magnitude_vector", "B.bias"): values for name, values in DORA.items()}
HEAD, EMBEDDING = f"{PREFIX}lm_head.weight", f"{PREFIX}model.embed_tokens.weight"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1\n"
ROWS = {"trainable_token_indices": [1, 2]}

ACCEPTED: dict[str, Files] = {
    "B001 rslora": adapter(use_rslora=True),
    "B003 patterns": adapter(tensors_of(lambda path: 2 if path == Q0 else 4), rank_pattern=PATTERN_RANK),
    "B007 alpha": adapter(lora_alpha=16.5),
    "B008 dora": adapter(tensors_of() | DORA, use_dora=True),
    "B010 a saved head": adapter(with_tensors(lm_head__weight=matrix(VOCAB)), modules_to_save=["lm_head"]),
    "B014 k alone": adapter(tensors_of(leaves=("k_proj",)), target_modules=["k_proj"]),
    "B014 gate alone": adapter(tensors_of(leaves=("gate_proj",)), target_modules=["gate_proj"]),
    "B015 q alone": adapter(tensors_of(leaves=("q_proj",)), target_modules=["q_proj"]),
    "B018 lora_bias": adapter(tensors_of() | LORA_BIAS, lora_bias=True),
    "B020 fields that are off": adapter(enable_lora=None, merge_weights=False, nobody_knows=None, nor_this=[]),
    "B022 bias null": adapter(bias=None, lora_dropout=0.5),
    "E5 a regex": adapter(target_modules=r".*\.(q|v)_proj", r=4),
    "E7 null patterns": adapter(rank_pattern=None, alpha_pattern=None, init_lora_weights=True, revision="x"),
    "E8 whole names": adapter(target_modules=[path for path in SPEC.modules if path.endswith(("q_proj", "v_proj"))]),
    "E8 names that are not there": adapter(target_modules=["q_proj", "v_proj", "c_attn"]),
    "E8 token rows": adapter(
        with_tensors(model__embed_tokens__token_adapter__trainable_tokens_delta=matrix(2)), **ROWS
    ),
    "B110 a template": adapter(extra={"chat_template.jinja": b"X:{{ messages[0].content }}"}),
}

REFUSED: dict[str, tuple[Files, str, str]] = {
    "B006 alpha is missing": (adapter(lora_alpha=...), "field_value", "lora_alpha"),
    "B006 alpha is misnamed": (adapter(lora_alpha=..., alpha=16), "field_value", "lora_alpha"),
    "B008 magnitudes, flag false": (adapter(tensors_of() | DORA), "unexpected_tensor", "lora_magnitude_vector"),
    "B008 flag true, no magnitudes": (adapter(use_dora=True), "missing_tensors", "lora_magnitude_vector"),
    "B010 a claimed head": (adapter(modules_to_save=["lm_head"]), "missing_tensors", HEAD),
    "B011 added rows": (
        adapter(
            with_tensors(lm_head__weight=matrix(5, 64), model__embed_tokens__weight=matrix(5, 64)),
            modules_to_save=["lm_head", "embed_tokens"],
        ),
        "shape",
        HEAD,
    ),
    "B013 half of the layers": (adapter(without("layers.1.", count=99)), "missing_tensors", "layers.1."),
    "B013 half of a pair": (adapter(without("lora_B")), "unpaired_tensors", "lora_B"),
    "B016 fused names": (adapter(target_modules=["qkv_proj"]), "target_modules", "target_modules"),
    "B017 a bias nobody claims": (
        adapter(with_tensors(**{f"{Q0.replace('.', '__')}__bias": zeros(80)})),
        "unexpected_tensor",
        "q_proj.bias",
    ),
    "B020 a live unknown field": (adapter(nobody_knows=1), "field_unsupported", "nobody_knows"),
    "B021 AdaLoRA": (adapter(peft_type="ADALORA"), "peft_type", "peft_type"),
    "B021 IA3": (adapter(peft_type="IA3"), "peft_type", "peft_type"),
    "B021 small letters": (adapter(peft_type="lora"), "peft_type", "peft_type"),
    "B023 MLX": (raw_config('{"lora_parameters": {"rank": 8}, "fine_tune_type": "lora"}'), "peft_type", "peft_type"),
    "B023 AdapterHub": (raw_config('{"config": {}, "model_class": "x"}'), "peft_type", "peft_type"),
    "B023 a pointer as config": (raw_config(POINTER), "lfs_pointer", CONFIG),
    "B026 a padded head": (
        adapter(with_tensors(lm_head__weight=matrix(VOCAB + 2)), modules_to_save=["lm_head"]),
        "shape",
        HEAD,
    ),
    "B027 another embedding": (
        adapter(with_tensors(model__embed_tokens__weight=matrix(500)), modules_to_save=["embed_tokens"]),
        "shape",
        EMBEDDING,
    ),
    "B029 NaN": (adapter(nan_weights()), "non_finite", "lora_A"),
    "B032 five bytes less": (adapter(encode(tensors_of())[:-5]), "truncated", WEIGHTS),
    "B032 nothing": (adapter(b""), "truncated", WEIGHTS),
    "B033 five bytes more": (adapter(encode(tensors_of()) + bytes(5)), "header", WEIGHTS),
    "B035 a tar": (adapter(bytes(257) + b"ustar\0" + bytes(249)), "format", WEIGHTS),
    "B035 a tar beside": (adapter(extra={"adapter.tar": b"x"}), "file_set", "adapter.tar"),
    "B039 rank": (adapter(tensors_of(65), r=65), "rank_limit", "r"),
    "B040 rank of a thousand": (adapter(r=1000, lora_alpha=100_000), "rank_limit", "r"),
    "B040 parts": (adapter(extra={"adapter_model_part_aa": b"x"}), "file_set", "adapter_model_part_aa"),
    "B042 a lie about the rank": (adapter(r=8), "rank_mismatch", "lora_A"),
    "B045 a pointer": (adapter(POINTER), "lfs_pointer", WEIGHTS),
    "B045 a page": (adapter(b"<!DOCTYPE html>"), "format", WEIGHTS),
    "E1 pissa": (adapter(init_lora_weights="pissa_niter_4"), "field_unsupported", "init_lora_weights"),
    "E2 another base": (adapter(base_model_name_or_path="o/other"), "base_mismatch", "base_model_name_or_path"),
    "E2 a path": (adapter(base_model_name_or_path="/data/модель/"), "base_mismatch", "base_model_name_or_path"),
    "E3 NaN": (raw_config(json.dumps(config_of(lora_alpha=float("nan")))), "json", CONFIG),
    "E3 alpha 0": (adapter(lora_alpha=0), "field_value", "lora_alpha"),
    "E3 text for a number": (adapter(r="4"), "field_value", "r"),
    "E3 true for a number": (adapter(r=True), "field_value", "r"),
    "E3 text for false": (adapter(use_rslora="false"), "field_value", "use_rslora"),
    "E4 doubled key": (raw_config('{"r": 1, "r": 2}'), "json", CONFIG),
    "E4 byte order mark": (raw_config(b"\xef\xbb\xbf{}"), "json", CONFIG),
    "E4 deep": (raw_config('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), "json", CONFIG),
    "E4 a list": (raw_config("[]"), "json", CONFIG),
    "E5 a regex without end": (adapter(target_modules="(.*.*)*" * 8 + "x"), "target_modules", "target_modules"),
    "E6 a classifier": (adapter(task_type="SEQ_CLS"), "task_type", "task_type"),
    "E8 replicated layers": (adapter(layer_replication=[[0, 1], [0, 2]]), "field_unsupported", "layer_replication"),
    "B110 a template that reaches out": (
        adapter(extra={"chat_template.jinja": b"{{ ''.__class__.__mro__ }}"}),
        "template",
        "chat_template.jinja",
    ),
    "B110 a template without end": (
        adapter(
            extra={
                "chat_template.jinja": b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
            }
        ),
        "template",
        "chat_template.jinja",
    ),
    "B110 ten megabytes": (
        adapter(extra={"chat_template.jinja": b"{{ 'x' * 10000000 }}"}),
        "template",
        "chat_template.jinja",
    ),
    "int8 weights": (
        adapter({name: values.astype("int8") for name, values in tensors_of().items()}),
        "format",
        "lora_A",
    ),
}


async def upload(call: Caller, name: str, files: Mapping[str, bytes], **params: Any) -> httpx.Response:
    return await call.upload(f"/api/v1/tenants/team-a/adapters/{name}", files, params=params)


def find_fault(answer: httpx.Response, check: str, subject: str) -> str:
    """What is wrong with a refusal; empty if nothing is."""
    if answer.status_code != 422:
        return f"{answer.status_code} {answer.text[:300]}"
    body = answer.json()
    error = body["error"]
    failed = [each for each in body["report"]["checks"] if each["verdict"] == "fail"]
    if (error["code"], error["type"]) != ("adapter_rejected", "invalid_request_error"):
        return str(error)
    if error["param"] != failed[0]["subject"] or not error["message"]:
        return f"param {error['param']!r} is not the first failing subject"
    if not any(each["name"] == check and subject in each["subject"] for each in failed):
        return str([(each["name"], each["subject"]) for each in failed])
    return ""


async def count_kept(world: World, call: Caller) -> tuple[int, int]:
    """Adapters that are listed, and objects in the store."""
    listed = (await call("GET", "/api/v1/tenants/team-a/adapters")).json()
    store = world.registry.services.store
    return len(listed["data"]), len(await asyncio.to_thread(lambda: list(store.list_artifacts())))


async def test_what_can_be_served_is_ready_and_comes_back_byte_for_byte(world: World) -> None:
    call = world.caller()
    for number, (case, files) in enumerate(ACCEPTED.items()):
        answer = await upload(call, f"good-{number}", files)
        assert answer.status_code == 201, (case, answer.text)
        version = answer.json()
        assert (version["state"], version["version"]) == ("ready", 1), case
        path = f"/api/v1/tenants/team-a/adapters/good-{number}/versions/1/files/{WEIGHTS}"
        assert (await call("GET", path)).content == files[WEIGHTS], case
    again = await upload(call, "good-0", ACCEPTED["B001 rslora"])
    assert (again.status_code, again.json()["version"]) == (200, 1)


async def test_what_cannot_be_served_is_refused_and_leaves_nothing(
    world: World, checker: ProcessChecker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_TEST_MARKER", str(tmp_path / "marker"))
    pickles = {
        "B030 a pickle": ({CONFIG: adapter()[CONFIG], "adapter_model.bin": exploit()}, "pickle", "adapter_model.bin"),
        "B031 a pickle beside": (adapter(extra={"adapter_model.bin": exploit()}), "pickle", "adapter_model.bin"),
        "B031 a pickle by another name": (adapter(exploit()), "pickle", WEIGHTS),
        "B031 a pickle in a README": (adapter(extra={"README.md": exploit()}), "pickle", "README.md"),
    }
    call = world.caller()
    assert (await upload(call, "good", adapter())).status_code == 201
    pid = checker.pid
    faults = {}
    for number, (case, (files, check, subject)) in enumerate((REFUSED | pickles).items()):
        for params in ({}, {"dry_run": "true"}) if number % 5 == 0 else ({},):
            fault = find_fault(await upload(call, "bad", files, **params), check, subject)
            if fault:
                faults[case] = fault
    assert faults == {}
    assert await count_kept(world, call) == (1, 1)
    assert not (tmp_path / "marker").exists()
    assert (checker.pid, checker.num_starts) == (pid, 1)
    assert (await upload(call, "bad", adapter(lora_alpha=9))).json()["version"] == 1


NAMES = [
    "../x",
    "a/b",
    ".",
    "..",
    "a\0b",
    "%2e%2e%2fx",
    "x" * 300,
    "team-x ",
    "TEAM-X",
    "e\u0301",
    "\u00e9",
    "-a",
    "a_b",
    "a.b",
]
FILENAMES = [
    "../../evil.json",
    "C:\\x",
    f"{CONFIG}\\0.png",
    "/etc/passwd",
    f"./{CONFIG}",
    "ADAPTER_CONFIG.JSON",
    ".hidden",
]


async def test_b036_b037_names_are_plain_or_refused(world: World, tmp_path: Path) -> None:
    call = world.caller()
    for name in NAMES:
        answer = await upload(call, quote(name, safe=""), adapter())
        assert answer.status_code in (400, 404, 405), (name, answer.text)
        assert answer.json()["error"]["code"] in ("invalid_name", "not_found", "method_not_allowed"), name
    for name in FILENAMES:
        answer = await upload(call, "good", {name: b"x", **adapter()})
        assert answer.status_code in (400, 422), (name, answer.text)
        if answer.status_code == 422:
            failed = {check["name"] for check in answer.json()["report"]["checks"] if check["verdict"] == "fail"}
            assert failed & {"file_name", "file_set"}, name
    assert await count_kept(world, call) == (0, 0)
    written = await asyncio.to_thread(lambda: [path.name for path in tmp_path.rglob("*")])
    assert not {"evil.json", "x", "passwd"} & set(written)


async def test_b054_an_update_is_another_version_with_its_own_bytes(world: World) -> None:
    call = world.caller()
    second = adapter(lora_alpha=32)
    assert (await upload(call, "tone", adapter())).json()["promoted"] is True
    answer = await upload(call, "tone", second, promote="always")
    assert (answer.status_code, answer.json()["version"], answer.json()["promoted"]) == (201, 2, True)
    for number, files in ((1, adapter()), (2, second)):
        got = await call("GET", f"/api/v1/tenants/team-a/adapters/tone/versions/{number}/files/{CONFIG}")
        assert got.content == files[CONFIG]


async def test_b042_bad_uploads_hold_up_no_good_one(world: World, checker: ProcessChecker) -> None:
    call = world.caller()
    slow = adapter(extra={"chat_template.jinja": REFUSED["B110 a template without end"][0]["chat_template.jinja"]})
    answers = await asyncio.gather(
        *(upload(call, f"bad-{number}", slow) for number in range(4)),
        *(upload(call, "good", adapter(lora_alpha=number + 1)) for number in range(6)),
    )
    assert [answer.status_code for answer in answers] == [422] * 4 + [201] * 6
    assert sorted(answer.json()["version"] for answer in answers[4:]) == [1, 2, 3, 4, 5, 6]
    assert checker.num_starts == 1


CORPUS = os.environ.get("LORAPLEX_TEST_CASES")


@pytest.mark.skipif(not CORPUS, reason="LORAPLEX_TEST_CASES names no folder of cases")
async def test_every_published_config_and_weights_file_gets_a_verdict(world: World) -> None:
    call = world.caller()
    root = Path(str(CORPUS))
    folders = [path for path in sorted((root / "weights").iterdir()) if path.is_dir()]
    uploads = [{CONFIG: path.read_bytes(), WEIGHTS: encode(tensors_of())} for path in (root / "configs").glob("*.json")]
    uploads += [
        {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "INFO.json"} for folder in folders
    ]
    assert len(uploads) >= 112
    for files in uploads:
        answer = await upload(call, "found", files)
        assert answer.status_code == 422, answer.text
        report = answer.json()["report"]
        failed = [check for check in report["checks"] if check["verdict"] == "fail"]
        assert all(check["message"] and check["subject"] for check in failed)
        assert report["verdict"] == "fail"
    assert await count_kept(world, call) == (0, 0)
