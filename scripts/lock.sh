#!/usr/bin/env bash
# Write requirements/lock.txt: the versions in .venv, which are the ones the tests have passed with.
# PyTorch and what only its CUDA build brings are chosen by the machine, so they stay out.
set -euo pipefail
cd "$(dirname "$0")/.."

{
  echo "# Versions that the tests have passed with. Written by 'make lock'; used as constraints by 'make setup'."
  .venv/bin/python -m pip freeze --exclude-editable 2>/dev/null |
    grep '==' | grep -viE '^(torch|triton|nvidia-.*|cuda-.*|pip|setuptools)=='
} > requirements/lock.txt
