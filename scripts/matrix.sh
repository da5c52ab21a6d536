#!/usr/bin/env bash
# The tests marked `matrix` on each Python that is named, with the oldest JAX that pyproject.toml allows and with the newest.
#   scripts/matrix.sh python3.11 python3.13
set -uo pipefail
cd "$(dirname "$0")/.."
oldest=$(sed -n 's/^  "jax>=\(.*\)",$/\1/p' pyproject.toml)
failed=()
for python in "$@"; do
  for jax in "jax==$oldest" "jax"; do
    name="$(basename "$python") with ${jax/jax==/JAX }"
    venv=".venv/matrix/$(basename "$python")-${jax#jax}"
    echo "== $name"
    "$python" -m venv "$venv" && "$venv/bin/pip" install -q --upgrade -e ".[dev]" "$jax" "${jax/jax/jaxlib}" &&
      "$venv/bin/python" -c 'import jax, sys; print("Python", sys.version.split()[0], "JAX", jax.__version__)' &&
      "$venv/bin/pytest" -q -p no:cacheprovider -m "matrix and not slow" || failed+=("$name")
  done
done
((${#failed[@]})) || exit 0
printf '%s: failed\n' "${failed[@]}"
exit 1
