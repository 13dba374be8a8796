#!/usr/bin/env bash
# Write requirements/*.txt. lock.txt: the versions in .venv, which are the ones the tests have passed with; PyTorch and
# what only its CUDA build brings are chosen by the machine, so they stay out. The others have hashes, and take their
# versions from lock.txt and cpu.txt: the images and the tools are made of them.
set -euo pipefail
cd "$(dirname "$0")/.."

{
  echo "# Versions that the tests have passed with. Written by 'make lock'; used as constraints by 'make setup'."
  .venv/bin/python -m pip freeze --exclude-editable 2>/dev/null |
    grep '==' | grep -viE '^(torch|triton|nvidia-.*|cuda-.*|pip|setuptools)=='
} > requirements/lock.txt

# lock NAME INPUT...: one file for every Python and processor that the input runs on
lock() {
  local file=requirements/$1.txt
  shift
  build/tools/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
    --custom-compile-command 'make lock' -c requirements/lock.txt -c requirements/cpu.txt --output-file "$file" "$@"
  echo "$file: $(grep -c '==' "$file") packages"
}

lock build requirements/build.in
lock release requirements/release.in
lock control-plane pyproject.toml
lock engine --extra engine pyproject.toml requirements/engine.in
