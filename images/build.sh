#!/usr/bin/env bash
# images/build.sh [control-plane|engine]...: build the images, both by default, from the bases that images/pins.env pins.
# BUILDER names the program (docker, podman or buildah), REGISTRY what stands before the images' names, PINS another file.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf 'images/build.sh: %s\n' "$*" >&2; exit 1; }

PINS=${PINS:-images/pins.env}
DEBIAN_IMAGE=
# shellcheck source=images/pins.env
. "$(realpath "$PINS")"
[[ ${DEBIAN_IMAGE:-} =~ ^[^@[:space:]]+@sha256:[0-9a-f]{64}$ ]] ||
  fail "$PINS: DEBIAN_IMAGE must be NAME@sha256:<64 hex digits>, not '${DEBIAN_IMAGE:-}'; the file says how to find it"

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' platform/loraplex/version.py)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[ $# -gt 0 ] || set -- control-plane engine
for image in "$@"; do
  [ -f "images/$image.Dockerfile" ] || fail "there is no image '$image'; there are control-plane and engine"
  ${BUILDER:-docker} build --file "images/$image.Dockerfile" --tag "${REGISTRY:-}loraplex-$image:$version" \
    --build-arg "DEBIAN_IMAGE=$DEBIAN_IMAGE" --build-arg "VERSION=$version" --build-arg "REVISION=$revision" .
done
