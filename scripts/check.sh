#!/usr/bin/env bash
# Every check that reads the code without running it. CI runs this before the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
basedpyright --pythonpath "$(command -v python)" &  # it takes longer than the others together
trap 'kill $! 2>/dev/null || true' EXIT
ruff check .
ruff format --check .
lint-imports --no-cache --no-logo
codespell
wait $!
