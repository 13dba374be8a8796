#!/usr/bin/env bash
# Ask for known holes in everything that the locks pin. Exit 1: there is one. Where the service cannot be reached that
# is said, by name, and is no failure, unless LORAPLEX_TEST_REQUIRE names audit.
set -euo pipefail
cd "$(dirname "$0")/.."
service=${LORAPLEX_AUDIT_SERVICE:-https://pypi.org/pypi/pip/json}

skip() {
  echo "skipped: audit: $1"
  case ",${LORAPLEX_TEST_REQUIRE:-}," in *,audit,*) exit 1 ;; esac
  exit 0
}

.venv/bin/python -m pip install -q 'pip-audit>=2.9' 2>/dev/null || skip "pip-audit cannot be installed here"
.venv/bin/python - "$service" <<'PYTHON' || skip "no vulnerability service answers ($service)"
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5).close()
PYTHON
for lock in requirements/*.txt; do
  case $lock in */cpu.txt) continue ;; esac
  echo "==> $lock"
  options=(--disable-pip --progress-spinner off)
  grep -q -- --hash "$lock" && options+=(--require-hashes) || options+=(--no-deps)
  .venv/bin/python -m pip_audit "${options[@]}" -r "$lock"
done
