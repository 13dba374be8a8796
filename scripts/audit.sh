#!/usr/bin/env bash
# Ask for known holes in everything that the locks pin. Exit 1: there is one. Where nobody can be asked that is said, by
# name, and is no failure, unless LORAPLEX_TEST_REQUIRE names audit.
set -euo pipefail
cd "$(dirname "$0")/.."
tool=build/audit/bin
# a release with holes that are known: who does not tell of them has no data on others either
service=${LORAPLEX_AUDIT_SERVICE:-https://pypi.org/pypi/jinja2/2.10/json}

skip() {
  echo "skipped: audit: $1"
  case ",${LORAPLEX_TEST_REQUIRE:-}," in *,audit,*) exit 1 ;; esac
  exit 0
}

# by itself: what it needs is none of ours
[ -x $tool/pip-audit ] || { .venv/bin/python -m venv build/audit && $tool/pip install -q 'pip-audit>=2.9'; } ||
  skip "pip-audit cannot be installed here"
.venv/bin/python - "$service" 2>/dev/null <<'PYTHON' || skip "no vulnerability service answers ($service)"
import json, sys, urllib.request

with urllib.request.urlopen(sys.argv[1], timeout=5) as answer:
    sys.exit(0 if json.load(answer).get("vulnerabilities") else 1)
PYTHON
for lock in requirements/*.txt; do
  # what the machine chooses has no version
  [ "$lock" = requirements/cpu.txt ] && continue
  echo "==> $lock"
  if grep -q -- --hash "$lock"; then pins=--require-hashes; else pins=--no-deps; fi
  $tool/pip-audit --disable-pip --strict --progress-spinner off "$pins" -r "$lock"
done
