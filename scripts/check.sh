#!/usr/bin/env bash
# Every check that reads the code without running it. CI runs this before the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
basedpyright --pythonpath "$(command -v python)"
lint-imports --no-cache --no-logo
codespell
