#!/usr/bin/env bash
# Sets up .venv with what the tests need and runs pytest in the checkout: bash launch/test.sh [pytest arguments]
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

setup_venv test
cd "$root"
"$python" -c '
import platform
from importlib.metadata import version
print("Python", platform.python_version(), "jax", version("jax"))' >&2
exec "$python" -m pytest "$@"
