"""The operations on adapters: bases, versions, uploads, aliases."""

from __future__ import annotations

from typing import Any

from loraplex.openapi.operation import Answer, Body, Operation, Parameter
from loraplex.openapi.parameter import ADAPTER, IDEMPOTENCY_KEY, NUMBER, PAGE, POSITIVE_NUMBER, SPAN, TENANT
from loraplex.openapi.schema import ALIAS, FLAG, NAME, Schema, list_of, ref

_ADAPTERS = "/api/v1/tenants/{tenant}/adapters"
_A = _ADAPTERS + "/{adapter}"
_VERSIONS = _A + "/versions"
_VERSION = _VERSIONS + "/{number}"
_UPLOADS = _A + "/uploads"
_UPLOAD = _UPLOADS + "/{upload}"
_ALIASES = _A + "/aliases"
_ALIAS = _ALIASES + "/{alias}"
_BYTES = "application/octet-stream"
_CONTENT: Schema = {"type": "string", "format": "binary"}
_OF_ADAPTER = (TENANT, ADAPTER)
_OF_VERSION = (*_OF_ADAPTER, NUMBER)
_OF_ALIAS = (*_OF_ADAPTER, Parameter("alias", "path", ALIAS))
_OF_UPLOAD = (*_OF_ADAPTER, Parameter("upload", "path", {"type": "string", "pattern": "^upl_[a-z2-7]{26}$"}))
_FILE = Parameter("file", "path", {"type": "integer", "minimum": 0, "maximum": 99_999})
_PART = Parameter("part", "path", {"type": "integer", "minimum": 0, "maximum": 99_999})
_CHECKSUM = Parameter(
    "x-amz-checksum-sha256",
    "header",
    {"type": "string", "pattern": "^[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=$"},
    "The sha256 of the part, in base64",
    is_required=True,
)
_PROMOTE = Parameter("promote", "query", {"enum": ["auto", "always", "never"], "default": "auto"})
_DRY_RUN = Parameter("dry_run", "query", FLAG, "Judge only; nothing is stored")
_WAIT = Parameter(
    "wait", "query", {"type": "integer", "minimum": 1, "maximum": 600}, "Seconds that the verdict may take"
)
_BASE = Parameter("base", "query", NAME, "For admins: judge against this base, whatever the config names")
_ETAG_TEXT: Schema = {"type": "string", "pattern": '^"[0-9]+"$'}
_IF_MATCH = Parameter("If-Match", "header", _ETAG_TEXT, "Only if the alias is at this revision")
_IF_NONE_MATCH = Parameter("If-None-Match", "header", {"const": "*"}, "Only if there is no such alias")
_ETAG = {"etag": _ETAG_TEXT}
_VERDICTS = (
    "adapter_rejected",
    "adapter_quarantined",
    "adapter_retired",
    "base_mismatch",
    "conflict",
    "idempotency_key_reused",
    "invalid_name",
    "name_reserved",
    "quota_exceeded",
    "store_unavailable",
    "unsupported_parameter",
)
_FILES: Schema = {
    "type": "object",
    "additionalProperties": False,
    "required": ["files"],
    "properties": {
        "files": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "string", "format": "binary"},
            "description": "One part for each file of the folder that PEFT wrote; its `filename` is the file's name.",
        }
    },
}
_VERSION_OR_DRY_RUN: Schema = {"anyOf": [ref("VersionView"), ref("DryRunView")]}


def _of_adapter(**fields: Any) -> Operation:
    return Operation(tag="adapters", **fields)


def _change_version(verb: str, summary: str, *codes: str) -> Operation:
    return _of_adapter(
        method="post",
        path=f"{_VERSION}/{verb}",
        name=f"{verb}Version",
        summary=summary,
        answers=(Answer(200, "The version as it is now", ref("VersionView")),),
        codes=("conflict", *codes),
        parameters=_OF_VERSION,
    )


_BASES: tuple[Operation, ...] = (
    Operation(
        method="get",
        path="/api/v1/bases",
        name="listBases",
        tag="bases",
        summary="List base models; for platform keys",
        answers=(Answer(200, "One page, newest first", list_of("BaseView")),),
        parameters=PAGE,
    ),
    Operation(
        method="post",
        path="/api/v1/bases",
        name="registerBase",
        tag="bases",
        summary="Register a base model, or learn more of one that is known; for admins",
        answers=(Answer(201, "Registered", ref("BaseView")), Answer(200, "Known by its fingerprint", ref("BaseView"))),
        codes=("conflict", "invalid_name", "name_reserved"),
        body=Body(ref("NewBase")),
    ),
)
_ADAPTER_ROWS: tuple[Operation, ...] = (
    _of_adapter(
        method="get",
        path=_ADAPTERS,
        name="listAdapters",
        summary="List a tenant's adapters",
        answers=(Answer(200, "One page, newest first", list_of("AdapterView")),),
        parameters=(TENANT, *PAGE),
    ),
    _of_adapter(
        method="get",
        path=_A,
        name="showAdapter",
        summary="Show an adapter",
        answers=(Answer(200, "The adapter", ref("AdapterView")),),
        parameters=_OF_ADAPTER,
    ),
    _of_adapter(
        method="patch",
        path=_A,
        name="changeAdapter",
        summary="Let the tenant's bare name mean this adapter; or, for admins, limit the calls of it",
        answers=(Answer(200, "The adapter as it is now", ref("AdapterView")),),
        codes=("conflict",),
        parameters=_OF_ADAPTER,
        body=Body(ref("AdapterPatch")),
    ),
    _of_adapter(
        method="delete",
        path=_A,
        name="deleteAdapter",
        summary="Delete an adapter",
        answers=(Answer(204, "Deleted"),),
        codes=("conflict",),
        parameters=_OF_ADAPTER,
    ),
)
_VERSION_ROWS: tuple[Operation, ...] = (
    _of_adapter(
        method="post",
        path=_VERSIONS,
        name="uploadVersion",
        summary="Upload a PEFT folder as the adapter's next version",
        answers=(
            Answer(201, "A new version", ref("VersionView")),
            Answer(200, "The same content as a version that is there, or a dry run", _VERSION_OR_DRY_RUN),
        ),
        codes=_VERDICTS,
        parameters=(*_OF_ADAPTER, _PROMOTE, _DRY_RUN, _WAIT, _BASE, IDEMPOTENCY_KEY),
        body=Body(_FILES, "multipart/form-data"),
    ),
    _of_adapter(
        method="get",
        path=_VERSIONS,
        name="listVersions",
        summary="List an adapter's versions",
        answers=(Answer(200, "One page, newest first", list_of("VersionView")),),
        parameters=(*_OF_ADAPTER, *PAGE),
    ),
    _of_adapter(
        method="get",
        path=_VERSION,
        name="showVersion",
        summary="Show a version",
        answers=(Answer(200, "The version", ref("VersionView")),),
        parameters=_OF_VERSION,
    ),
    _of_adapter(
        method="delete",
        path=_VERSION,
        name="retireVersion",
        summary="Retire a version",
        answers=(Answer(200, "The version as it is now", ref("VersionView")),),
        codes=("conflict",),
        parameters=_OF_VERSION,
    ),
    _of_adapter(
        method="get",
        path=_VERSION + "/report",
        name="showReport",
        summary="Show what was checked",
        answers=(Answer(200, "The report", ref("Report")),),
        parameters=_OF_VERSION,
    ),
    _of_adapter(
        method="get",
        path=_VERSION + "/files/{name}",
        name="downloadFile",
        summary="Get a file as it was uploaded, byte for byte",
        answers=(
            Answer(
                200, "Its bytes", {"type": "string", "format": "binary"}, _BYTES, headers={"etag": {"type": "string"}}
            ),
        ),
        codes=("adapter_retired", "store_unavailable"),
        parameters=(*_OF_VERSION, Parameter("name", "path", {"type": "string", "minLength": 1})),
    ),
    _of_adapter(
        method="post",
        path=_VERSION + "/warm",
        name="warmVersion",
        summary="Load a version into every engine of its base, ahead of the first request",
        answers=(Answer(200, "What each engine said", ref("Warmed")),),
        codes=(
            "adapter_quarantined",
            "adapter_retired",
            "conflict",
            "model_not_found",
            "no_replica",
            "adapter_loading",
        ),
        parameters=_OF_VERSION,
    ),
    _change_version("restore", "Give a retired version back its state", "adapter_retired", "adapter_quarantined"),
    _change_version("quarantine", "Take a version out of service; for admins"),
    _change_version("release", "Make a quarantined version ready again; for admins"),
)
_UPLOAD_ROWS: tuple[Operation, ...] = (
    _of_adapter(
        method="post",
        path=_UPLOADS,
        name="beginUpload",
        summary="Begin an upload in parts",
        answers=(Answer(201, "Where to put each part", ref("UploadView")),),
        codes=_VERDICTS,
        parameters=(*_OF_ADAPTER, _PROMOTE, _DRY_RUN, _BASE, IDEMPOTENCY_KEY),
        body=Body(ref("UploadAnnouncement")),
    ),
    _of_adapter(
        method="get",
        path=_UPLOAD,
        name="showUpload",
        summary="Show which parts have arrived, with new addresses for the others",
        answers=(Answer(200, "The upload", ref("UploadView")),),
        codes=("store_unavailable",),
        parameters=_OF_UPLOAD,
    ),
    _of_adapter(
        method="delete",
        path=_UPLOAD,
        name="abortUpload",
        summary="Give an upload up",
        answers=(Answer(204, "Given up"),),
        codes=("conflict", "store_unavailable"),
        parameters=_OF_UPLOAD,
    ),
    _of_adapter(
        method="put",
        path=_UPLOAD + "/files/{file}/parts/{part}",
        name="putPart",
        summary="Put a part, where its address is this one and not the object store's",
        answers=(Answer(204, "Arrived"),),
        codes=("conflict", "quota_exceeded", "store_unavailable", "unsupported_parameter"),
        parameters=(*_OF_UPLOAD, _FILE, _PART, _CHECKSUM),
        body=Body(_CONTENT, _BYTES),
    ),
    _of_adapter(
        method="post",
        path=_UPLOAD + "/complete",
        name="completeUpload",
        summary="Publish an upload whose parts have arrived; the same again gets the same answer",
        answers=(
            Answer(201, "A new version", ref("VersionView")),
            Answer(200, "The same content as a version that is there, or a dry run", _VERSION_OR_DRY_RUN),
        ),
        codes=_VERDICTS,
        parameters=(*_OF_UPLOAD, _WAIT, IDEMPOTENCY_KEY),
    ),
)
_OUTCOMES = _of_adapter(
    method="get",
    path=_A + "/outcomes",
    name="listOutcomes",
    summary="How generations ended, by version and minute",
    answers=(Answer(200, "One page, newest first", list_of("OutcomeRow")),),
    parameters=(*_OF_ADAPTER, *SPAN, Parameter("version", "query", POSITIVE_NUMBER), *PAGE),
)
_ALIAS_ROWS: tuple[Operation, ...] = (
    _of_adapter(
        method="get",
        path=_ALIASES,
        name="listAliases",
        summary="List an adapter's aliases, all on one page",
        answers=(Answer(200, "All of them, by name", list_of("AliasView")),),
        parameters=_OF_ADAPTER,
    ),
    _of_adapter(
        method="get",
        path=_ALIAS,
        name="showAlias",
        summary="Show an alias",
        answers=(Answer(200, "The alias", ref("AliasView"), headers=_ETAG),),
        codes=("invalid_name",),
        parameters=_OF_ALIAS,
    ),
    _of_adapter(
        method="put",
        path=_ALIAS,
        name="moveAlias",
        summary="Point an alias to versions whose weights sum to 100; If-Match or If-None-Match is needed",
        answers=(
            Answer(200, "Moved", ref("AliasView"), headers=_ETAG),
            Answer(201, "Created", ref("AliasView"), headers=_ETAG),
        ),
        codes=(
            "adapter_quarantined",
            "adapter_retired",
            "conflict",
            "invalid_name",
            "precondition_failed",
            "precondition_required",
        ),
        parameters=(*_OF_ALIAS, _IF_MATCH, _IF_NONE_MATCH),
        body=Body(ref("NewTargets")),
    ),
    _of_adapter(
        method="delete",
        path=_ALIAS,
        name="deleteAlias",
        summary="Delete an alias",
        answers=(Answer(204, "Deleted"),),
        codes=("conflict", "invalid_name", "precondition_failed"),
        parameters=(*_OF_ALIAS, _IF_MATCH),
    ),
    _of_adapter(
        method="post",
        path=_ALIAS + "/rollback",
        name="rollBackAlias",
        summary="Point an alias to where it pointed before",
        answers=(Answer(200, "The alias as it is now", ref("AliasView"), headers=_ETAG),),
        codes=("adapter_quarantined", "adapter_retired", "conflict", "invalid_name", "precondition_failed"),
        parameters=(*_OF_ALIAS, _IF_MATCH),
    ),
    _of_adapter(
        method="get",
        path=_ALIAS + "/history",
        name="listAliasHistory",
        summary="List every revision of an alias",
        answers=(Answer(200, "One page, newest first", list_of("AliasChangeView")),),
        codes=("invalid_name",),
        parameters=(*_OF_ALIAS, *PAGE),
    ),
)
REGISTRY: tuple[Operation, ...] = (*_BASES, *_ADAPTER_ROWS, *_VERSION_ROWS, _OUTCOMES, *_UPLOAD_ROWS, *_ALIAS_ROWS)
