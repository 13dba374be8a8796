from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.report import CHECK_NAMES, Report
from loraplex_registry.peft.spec import AdapterPlan, BaseSpec

Write = Callable[..., dict[str, Path]]
Make = Callable[..., Any]
PREFIX = "base_model.model."
Q0 = "model.layers.0.self_attn.q_proj"


def failures(report: Report) -> list[tuple[str, str]]:
    return [(check.name, check.subject) for check in report.checks if check.verdict == "fail"]


def test_a_plain_adapter_becomes_a_plan_whose_ranges_are_its_tensors(
    write_adapter: Write, base: BaseSpec, tensors: dict[str, np.ndarray]
) -> None:
    files = write_adapter(weights=tensors)
    report, plan = check_adapter(files, base)
    assert plan is not None
    assert (report.verdict, report.refused, report.first_failure) == ("pass", {}, None)
    assert (plan.rank, plan.target_modules, plan.num_parameters) == (4, ("q_proj", "v_proj"), 2 * 4 * (32 + 24))
    assert [module.path for module in plan.modules] == [
        f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qv"
    ]
    data = files["adapter_model.safetensors"].read_bytes()
    for module in plan.modules:
        assert (module.rank, module.scaling) == (4, 2.0)
        for half, ref in (("A", module.a), ("B", module.b)):
            array = tensors[f"{PREFIX}{module.path}.lora_{half}.weight"]
            assert (data[ref.start : ref.stop], ref.shape, ref.dtype) == (array.tobytes(), array.shape, "F32")


def test_every_check_that_was_made_is_in_the_report_in_the_contract_s_order(
    write_adapter: Write, base: BaseSpec
) -> None:
    report, _ = check_adapter(write_adapter(), base)
    names = [check.name for check in report.checks]
    assert names == [name for name in CHECK_NAMES if name not in {"quota", "parity"}]
    assert all(check == msgspec.structs.replace(check, verdict="pass", message="") for check in report.checks)


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_an_adapter_that_changes_nothing_is_taken_with_a_warning(
    write_adapter: Write, base: BaseSpec, tensors: dict[str, np.ndarray], half: str
) -> None:
    idle = {name: array * 0 if half in name else array for name, array in tensors.items()}
    report, plan = check_adapter(write_adapter(weights=idle), base)
    assert plan is not None
    warned = [check for check in report.checks if check.verdict == "warn"]
    assert [(check.name, check.subject) for check in warned] == [("non_finite", "adapter_model.safetensors")]
    assert "All deltas are zero" in warned[0].message
    one = next(name for name in idle if half in name)
    assert check_adapter(write_adapter(weights=idle | {one: tensors[one]}), base)[0].verdict == "pass"


def test_the_plan_and_the_report_go_through_json(write_adapter: Write, base: BaseSpec) -> None:
    report, plan = check_adapter(write_adapter(alpha_pattern={"q_proj": 2.5}), base)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=AdapterPlan) == plan
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    assert msgspec.json.decode(msgspec.json.encode(base), type=BaseSpec) == base


@pytest.mark.parametrize(("dtype", "name"), [("<f4", "F32"), ("<f2", "F16"), ("<u2", "BF16")])
def test_float32_float16_and_bfloat16_are_served(
    write_adapter: Write, make_tensors: Make, base: BaseSpec, dtype: str, name: str
) -> None:
    weights = make_tensors(dtype="<f4")
    if name == "BF16":
        weights = {key: (value.view("<u4") >> 16).astype("<u2") for key, value in weights.items()}
    else:
        weights = {key: value.astype(dtype) for key, value in weights.items()}
    _, plan = check_adapter(write_adapter(weights=weights), base)
    assert plan is not None
    assert {module.a.dtype for module in plan.modules} == {name}


@pytest.mark.parametrize(
    ("kind", "bits"), [("F32", 0x7FC0_0000), ("F16", 0x7C00), ("BF16", 0xFF80)], ids=["nan", "inf", "-inf"]
)
def test_values_that_are_not_finite_are_refused_by_tensor(
    write_adapter: Write, encode: Make, make_tensors: Make, base: BaseSpec, kind: str, bits: int
) -> None:
    width = "<u4" if kind == "F32" else "<u2"
    weights = {key: np.zeros(value.shape, width) for key, value in make_tensors().items()}
    bad = f"{PREFIX}{Q0}.lora_B.weight"
    weights[bad][-1, -1] = bits
    view = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[kind]
    data = encode({key: value.view(view) for key, value in weights.items()})
    report, plan = check_adapter(write_adapter(weights=data), base)
    assert (failures(report), plan) == ([("non_finite", bad)], None)


def _drop(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.__delitem__(PREFIX + name)


def _put(name: str, *shape: int, dtype: str = "<f4") -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.__setitem__(name, np.zeros(shape, dtype))


def _drop_pair(path: str) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for half in "AB":
            del tensors[f"{PREFIX}{path}.lora_{half}.weight"]

    return change


@pytest.mark.parametrize(
    ("change", "check", "subject"),
    [
        (_drop(f"{Q0}.lora_B.weight"), "unpaired_tensors", f"{PREFIX}{Q0}.lora_B.weight"),
        (_drop(f"{Q0}.lora_A.weight"), "unpaired_tensors", f"{PREFIX}{Q0}.lora_A.weight"),
        (_drop_pair(Q0), "missing_tensors", f"{PREFIX}{Q0}.lora_A.weight"),
        (_put(f"{PREFIX}model.layers.9.x.lora_A.weight", 4, 4), "unmatched_tensors", None),
        (_put(f"{PREFIX}model.layers.0.mlp.up_proj.lora_A.weight", 4, 16), "unmatched_tensors", None),
        (_put(f"{PREFIX}{Q0}.lora_magnitude_vector", 16), "unexpected_tensor", None),
        (_put(f"{PREFIX}{Q0}.lora_magnitude_vector.weight", 16), "unexpected_tensor", None),
        (_put(f"{PREFIX}{Q0}.lora_B.bias", 16), "unexpected_tensor", None),
        (_put(f"{PREFIX}{Q0}.bias", 16), "unexpected_tensor", None),
        (_put(f"{PREFIX}{Q0}.base_layer.bias", 16), "unexpected_tensor", None),
        (_put(f"{PREFIX}{Q0}.lora_A.default.weight", 4, 16), "unexpected_tensor", None),
        (_put(f"{Q0}.lora_A.weight", 4, 16), "unexpected_tensor", None),
        (_put(f"{PREFIX}model.embed_tokens.lora_embedding_A", 4, 40), "unmatched_tensors", None),
        (_put(f"{PREFIX}lm_head.weight", 40, 16), "base_mismatch", None),
        (_put(f"{PREFIX}lm_head.base_layer.weight", 40, 16), "base_mismatch", None),
        (_put(f"{PREFIX}model.norm.weight", 16), "unexpected_tensor", None),
        (_put("hello", 1), "unexpected_tensor", None),
        (_put(f"{PREFIX}lm_head.weight", 42, 16), "shape", None),
        (_put(f"{PREFIX}model.embed_tokens.weight", 5, 16), "shape", None),
        (_put(f"{PREFIX}{Q0}.lora_A.weight", 4, 17), "shape", None),
        (_put(f"{PREFIX}{Q0}.lora_B.weight", 8, 4), "shape", None),
        (_put(f"{PREFIX}{Q0}.lora_A.weight", 4, 4, 4), "shape", None),
        (_put(f"{PREFIX}{Q0}.lora_A.weight", 64), "shape", None),
        (_put(f"{PREFIX}{Q0}.lora_A.weight", 5, 16), "rank_mismatch", None),
        (_put(f"{PREFIX}{Q0}.lora_B.weight", 16, 3), "rank_mismatch", None),
        (_put(f"{PREFIX}{Q0}.lora_B.weight", 16, 4, dtype="<f8"), "format", None),
        (_put(f"{PREFIX}{Q0}.lora_B.weight", 16, 4, dtype="i1"), "format", None),
    ],
)
def test_each_tensor_must_belong_and_fit(
    write_adapter: Write,
    base: BaseSpec,
    tensors: dict[str, np.ndarray],
    change: Callable[[dict[str, np.ndarray]], None],
    check: str,
    subject: str | None,
) -> None:
    before = set(tensors)
    whole = dict(tensors)
    change(tensors)
    changed = [name for name in tensors if name not in before or tensors[name] is not whole[name]]
    report, plan = check_adapter(write_adapter(weights=tensors), base)
    assert plan is None
    assert failures(report) == [(check, subject or changed[0])]
    assert all(0 < len(found.message) < 400 for found in report.checks if found.verdict == "fail")


@pytest.mark.parametrize(
    ("fields", "checks"),
    [
        ({"modules_to_save": ["lm_head"]}, ["shape"]),
        ({"modules_to_save": ["lm_head"], "use_qalora": True}, ["field_unsupported", "shape"]),
        ({"modules_to_save": ["lm_head", "mlp"]}, ["field_unsupported", "field_unsupported", "shape"]),
        ({}, ["shape"]),
    ],
)
def test_a_resized_vocabulary_is_named_although_a_field_is_refused(
    write_adapter: Write, base: BaseSpec, tensors: dict[str, np.ndarray], fields: dict[str, Any], checks: list[str]
) -> None:
    tensors[f"{PREFIX}lm_head.weight"] = np.zeros((42, 16), "<f4")
    report, _ = check_adapter(write_adapter(weights=tensors, **fields), base)
    assert [name for name, _ in failures(report)] == checks
    message = next(check.message for check in report.checks if check.name == "shape")
    assert all(text in message for text in ("[42, 16]", "[40, 16]", "40 rows"))


@pytest.mark.parametrize("fields", [{"r": 128}, {"rank_pattern": {"q_proj": 128}}])
def test_a_rank_above_the_limit_is_refused_without_reading_values(
    write_adapter: Write, make_tensors: Make, base: BaseSpec, fields: dict[str, Any]
) -> None:
    weights = make_tensors(rank=128)
    weights[f"{PREFIX}{Q0}.lora_A.weight"][0, 0] = np.nan
    report, _ = check_adapter(write_adapter(weights=weights, **fields), base)
    names = [name for name, _ in failures(report)]
    assert "rank_limit" in names
    assert "non_finite" not in names


def test_the_limit_counts_the_ranks_in_use_not_an_unused_default(
    write_adapter: Write, base: BaseSpec, tensors: dict[str, np.ndarray]
) -> None:
    report, plan = check_adapter(write_adapter(weights=tensors, r=512, rank_pattern={".*_proj": 4}), base)
    assert failures(report) == []
    assert plan is not None
    assert plan.rank == 4


def test_ranks_and_alphas_of_single_modules_reach_the_plan(
    write_adapter: Write, make_tensors: Make, base: BaseSpec
) -> None:
    weights = make_tensors(rank=4)
    for half, shape in (("A", (2, 16)), ("B", (16, 2))):
        weights[f"{PREFIX}{Q0}.lora_{half}.weight"] = np.ones(shape, "<f4")
    fields = {"rank_pattern": {"layers.0.self_attn.q_proj": 2}, "alpha_pattern": {"1.self_attn.v_proj": 64}}
    _, plan = check_adapter(write_adapter(weights=weights, use_rslora=True, **fields), base)
    assert plan is not None
    assert [(module.rank, round(module.scaling, 6)) for module in plan.modules] == [
        (2, 5.656854),
        (4, 4.0),
        (4, 4.0),
        (4, 32.0),
    ]


def test_a_wrong_base_stops_before_confusing_follow_up_failures(write_adapter: Write, base: BaseSpec) -> None:
    files = write_adapter(base_model_name_or_path="gpt2", target_modules=["c_attn"])
    report, plan = check_adapter(files, base)
    assert (failures(report), plan) == ([("base_mismatch", "base_model_name_or_path")], None)


@pytest.mark.parametrize(
    ("path", "shape", "says"),
    [
        (
            "transformer.h.0.attn.c_attn",
            (4, 16),
            'another model: the base has no "transformer.h.0.attn.c_attn"; train on',
        ),
        (Q0, (4, 4096), f"another model: {Q0} takes 4096 features there, and 16 in the base; train on"),
        (Q0, (4, 16), "; set it to"),
    ],
)
def test_another_name_is_advised_only_where_the_weights_may_be_of_the_base(
    write_adapter: Write, base: BaseSpec, path: str, shape: tuple[int, int], says: str
) -> None:
    weights = {f"{PREFIX}{path}.lora_A.weight": np.ones(shape, "<f4")}
    report, _ = check_adapter(write_adapter(base_model_name_or_path="org/other", weights=weights), base)
    [check] = [check for check in report.checks if check.name == "base_mismatch"]
    assert says in check.message
    assert ("set it to" in check.message) is (says == "; set it to")


@pytest.mark.parametrize("weights", [b"PK\x03\x04" + bytes(99), b"\x08" + bytes(7) + b"nonsense"])
def test_weights_that_cannot_be_read_say_nothing_about_the_base(
    write_adapter: Write, base: BaseSpec, weights: bytes
) -> None:
    report, _ = check_adapter(write_adapter(base_model_name_or_path="org/other", weights=weights), base)
    assert any("set it to" in check.message for check in report.checks if check.name == "base_mismatch")


def test_a_forced_base_is_accepted_with_a_warning_and_the_same_digest(write_adapter: Write, base: BaseSpec) -> None:
    _, expected = check_adapter(write_adapter(), base)
    report, plan = check_adapter(write_adapter(base_model_name_or_path=None), base, forced_base=True)
    assert report.verdict == "warn"
    assert plan == expected


def test_faults_of_config_and_weights_are_reported_together(write_adapter: Write, base: BaseSpec) -> None:
    report, _ = check_adapter(write_adapter(weights=b"PK\x03\x04" + bytes(99), r="8", use_qalora=True), base)
    assert [name for name, _ in failures(report)] == ["pickle", "format", "field_unsupported", "field_value"]


def test_missing_files_and_strangers_are_reported_without_opening_them(tmp_path: Path, base: BaseSpec) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04")
    report, plan = check_adapter({"adapter_model.bin": tmp_path / "adapter_model.bin"}, base)
    assert plan is None
    assert {name for name, _ in failures(report)} == {"file_set", "pickle"}


def test_an_oversized_config_is_not_parsed(write_adapter: Write, base: BaseSpec) -> None:
    report, _ = check_adapter(write_adapter(config=b" " * (256 * 1024 + 1)), base)
    assert failures(report) == [("file_size", "adapter_config.json")]


def test_an_own_template_passes_and_counts_in_the_digest(write_adapter: Write, base: BaseSpec) -> None:
    _, plain = check_adapter(write_adapter(), base)
    report, plan = check_adapter(write_adapter(extra={"chat_template.jinja": "{{ 'é' }}".encode()}), base)
    assert [check.name for check in report.checks if check.verdict != "pass"] == []
    assert plan is not None
    assert plain is not None
    assert plan.digest != plain.digest


def test_a_template_that_is_no_utf8_is_refused(write_adapter: Write, base: BaseSpec) -> None:
    report, _ = check_adapter(write_adapter(extra={"chat_template.jinja": b"{{ '\xe9' }}"}), base)
    assert failures(report) == [("template", "chat_template.jinja")]


@pytest.mark.parametrize(
    ("config", "is_told"),
    [(b'{"chat_template": "x"}', True), (b'{"chat_template": null}', False), (b"{}", False), (b"[", False)],
)
def test_a_template_beside_the_digest_is_told_of_and_does_not_count(
    write_adapter: Write, base: BaseSpec, config: bytes, is_told: bool
) -> None:
    _, plain = check_adapter(write_adapter(), base)
    report, plan = check_adapter(write_adapter(extra={"tokenizer_config.json": config}), base)
    assert [check.name for check in report.checks if check.verdict == "warn"] == ["template"] * is_told
    assert plan is not None
    assert plain is not None
    assert plan.digest == plain.digest


SIDE_FILES = ["README.md", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"]


@pytest.mark.parametrize("name", [*SIDE_FILES, "adapter_config.json"])
@pytest.mark.parametrize(
    ("content", "check"),
    [
        (b"\x80\x04\x95" + b"." * 64, "pickle"),
        (b"PK\x03\x04" + b"x" * 30, "pickle"),
        (b"\x1f\x8b\x08" + b"x" * 30, "format"),
        (b"GGUF\x03\0\0\0", "format"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "lfs_pointer"),
    ],
    ids=["pickle", "zip", "gzip", "gguf", "lfs"],
)
def test_text_that_is_something_else_by_its_first_bytes_is_refused(
    write_adapter: Write, base: BaseSpec, name: str, content: bytes, check: str
) -> None:
    report, plan = check_adapter(write_adapter(extra={name: content}), base)
    assert (failures(report), plan) == ([(check, name)], None)


@pytest.mark.parametrize("content", [b"", b"{}", b"<h1>GGUF</h1>", b"GGUF and BZh files", "é PK".encode()])
def test_side_files_of_any_text_are_kept(write_adapter: Write, base: BaseSpec, content: bytes) -> None:
    # an empty template is text, but writes nothing
    names = [name for name in SIDE_FILES if content or name != "chat_template.jinja"]
    report, plan = check_adapter(write_adapter(extra=dict.fromkeys(names, content)), base)
    assert failures(report) == []
    assert plan is not None


def test_a_report_stays_short_whatever_a_file_holds(write_adapter: Write, encode: Make, base: BaseSpec) -> None:
    weights = {f"{'.lora_A' * 60}.{number}": np.zeros(1, "<f4") for number in range(20_000)}
    report, _ = check_adapter(write_adapter(weights=weights), base)
    strangers = [check for check in report.checks if check.name == "unexpected_tensor"]
    assert len(strangers) == 21
    assert strangers[-1].message.startswith("19980 more")
    assert len(msgspec.json.encode(report)) < 40_000


def test_a_later_check_finds_its_place_in_the_report(write_adapter: Write, base: BaseSpec) -> None:
    from loraplex_registry.peft.report import Check

    report, _ = check_adapter(write_adapter(), base)
    later = report.with_check(Check("quota", "fail", "full", "storage")).with_check(Check("parity", "warn", "not run"))
    assert [check.name for check in later.checks[-2:]] == ["quota", "parity"]
    assert later.verdict == "fail"
    assert later.first_failure is not None
    assert later.first_failure.subject == "storage"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_any_file_raises(
    write_adapter: Write, encode: Make, make_config: Make, tensors: dict[str, np.ndarray], base: BaseSpec, data: Any
) -> None:
    contents = {"config": json.dumps(make_config()).encode(), "weights": encode(tensors)}
    which = data.draw(st.sampled_from(sorted(contents)))
    damaged = bytearray(contents[which])
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, min(len(damaged), 2000) - 1))
        damaged[position] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged))) :]
    contents[which] = bytes(damaged)
    report, plan = check_adapter(write_adapter(**contents), base)
    assert (plan is None) == (report.verdict == "fail")


def test_the_rules_need_neither_torch_nor_a_database() -> None:
    code = (
        "import sys; import loraplex_registry.peft.check; "
        "print([name for name in ('torch', 'sqlalchemy', 'litestar', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
