#!/usr/bin/env bash
# Refuse files that would break Python or pytest for the whole checkout. Plain shell, because after such a file has
# been added no Python started at the root of the repository works any more.
set -euo pipefail
cd "$(dirname "$0")/.."

bad=$(
  for root in platform engine adapters_registry; do
    if [ -e "$root/__init__.py" ]; then echo "$root/__init__.py"; fi
  done
  find tests -name __init__.py
  find tests -maxdepth 1 -name platform
)
if [ -n "$bad" ]; then
  printf 'these must not exist (they shadow the standard module "platform", or hide tests of one name):\n%s\n' "$bad" >&2
  exit 1
fi
