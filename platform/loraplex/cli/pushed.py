"""What became of a pushed version: what is said of it, and what is to be done next."""

from __future__ import annotations

from loraplex.cli.output import SHORT_DIGEST, done, say, stderr
from loraplex.cli.report import print_report
from loraplex.client.errors import ClientError
from loraplex.client.management import Management
from loraplex.client.upload import Upload
from loraplex_registry.wire.adapter import VersionView


def tell(upload: Upload, *, is_default: bool) -> None:
    """Say what a version became, show its report, and name the next command."""
    version = upload.version
    name = name_version(version)
    digest = version.digest[:SHORT_DIGEST]
    if version.state == "quarantined":
        say(f"{name} is quarantined, {digest}")
    elif upload.is_new:
        done(f"{name} is {version.state}, {digest}")
    else:
        done(f"unchanged: same content as {name}, which is {version.state}, {digest}")
    print_report(stderr(), version.report)
    if is_default:
        say(f"{version.adapter} is now the default adapter of {version.tenant}: model={version.tenant} means it.")
    if version.promoted:
        say(f'live. Try it: loraplex chat --model {version.tenant}/{version.adapter} "Hello!"')
    elif version.state == "ready":
        say(f"not live: another version is. Make it live: loraplex adapters promote {name}")
    elif version.state == "retired":
        say(f"Make it ready again: loraplex adapters restore {name}")


def check_outcome(version: VersionView) -> None:
    """Return if the version can be served.

    Raises:
        ClientError: It is not judged yet, or was quarantined.
    """
    name = name_version(version)
    if version.state == "validating":
        raise ClientError(
            f"{name} is still being validated. Look again: loraplex adapters show {name}", code="still_validating"
        )
    if version.state == "quarantined":
        why = f": {version.quarantine.message.rstrip('.')}" if version.quarantine else ""
        raise ClientError(f"{name} is not served{why}.", code="adapter_quarantined")


def became_default(client: Management, version: VersionView) -> bool:
    """Say whether this version made its adapter the team's default: the first one that went live does."""
    if not version.promoted or version.version != 1:
        return False
    try:
        return client.get_adapter(version.tenant, version.adapter).is_default
    except ClientError:
        # a key that may only upload is not told
        return False


def name_version(version: VersionView) -> str:
    """Return TENANT/ADAPTER@NUMBER."""
    return f"{version.tenant}/{version.adapter}@{version.version}"
