#!/usr/bin/env bash
# Make .venv ready to run and test the project. Safe to repeat: what is there already is kept.
# PYTHON=... chooses the interpreter, TORCH_INDEX=... the package index that torch comes from.
set -euo pipefail
cd "$(dirname "$0")/.."
CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '==> %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3 python3.13 python3.12}; do
    if is_recent "$candidate"; then echo "$candidate"; return; fi
  done
  fail "no Python 3.11 or newer found; install one, or name it: make setup PYTHON=/path/to/python3.11"
}

has_gpu() { [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null 2>&1; }

# A machine whose owner has configured indexes for pip keeps exactly those. Elsewhere PyTorch's own index saves a CPU
# machine the several GB of CUDA libraries; pip would retry it for every package, so it has to answer first.
wants_torch_index() {
  case "$(.venv/bin/python -m pip config list)" in *index-url*|*find-links*|*no-index*) return 1 ;; esac
  .venv/bin/python -c "import urllib.request; urllib.request.urlopen('$CPU_INDEX/torch/', timeout=5)" 2>/dev/null
}

choose_torch() {
  if has_gpu; then
    say "NVIDIA GPU found: PyTorch with CUDA (several GB)"
  else
    say "no GPU: PyTorch for the CPU"
    options+=(-c requirements/cpu.txt)
    if [ -z "${TORCH_INDEX:-}" ] && wants_torch_index; then TORCH_INDEX=$CPU_INDEX; fi
  fi
  if [ -n "${TORCH_INDEX:-}" ]; then options+=(--extra-index-url "$TORCH_INDEX"); fi
}

# uv where it can be had and told what pip was told, else pip, whose own lines go to a log: one a package to the screen.
install() {
  local log=.venv/setup.log
  if .venv/bin/python -m pip install -q -c requirements/lock.txt uv >"$log" 2>&1 &&
      .venv/bin/python scripts/install.py "${options[@]}" "$@"; then
    return
  fi
  say "uv cannot install here, so pip does; from an empty cache it takes a minute or two"
  if ! .venv/bin/python -m pip install --no-compile --progress-bar off "${options[@]}" "$@" 2>&1 | tee "$log" |
      awk '!/Location .* is ignored|^ |^Requirement already|^Looking in|^Obtaining|^\[notice\]/ {
        print substr($0, 1, 100); fflush() }'; then
    printf '\n'; tail -n 15 "$log" >&2
    fail "pip could not install the packages (all of its output: $log)"
  fi
}

if ! is_recent .venv/bin/python; then
  python=$(find_python)
  say "creating .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
fi
options=(-c requirements/lock.txt)
choose_torch
say "installing packages"
install -e '.[engine,dev]'
# of 21,000 files most are never imported; the rest is compiled when it is
for module in loraplex.app loraplex_engine.loop.assembly; do PYTHONDONTWRITEBYTECODE='' .venv/bin/python -c "import $module" & done
wait
say "ready: .venv/bin/loraplex --help"
