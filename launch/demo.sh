#!/usr/bin/env bash
# Sets everything up, then answers one question with SmolLM2-135M-Instruct on this machine's CPU twice, interleaved and
# disaggregated, and compares; see launch/demo.py. Without a network, the small model of the checkout answers.
#
#   bash launch/demo.sh ["QUESTION"]
#
# DISAGG_MODELS names another place for the model than ~/.cache/disagg/models.
set -euo pipefail
started=${EPOCHREALTIME:-$(date +%s)}
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

if (($# > 1)) || [[ ${1-} == -h || ${1-} == --help ]]; then
  say "usage: bash launch/demo.sh [\"QUESTION\"]"
  exit 2
fi

# Without a network, what was set up before without the converter still serves the small model.
setup_venv convert || { is_python "$python" && setup_venv ""; }
models=${DISAGG_MODELS:-}
[[ -z $models || $models == /* ]] || export DISAGG_MODELS=$PWD/$models
cd "$root"
exec "$python" -m launch.demo --started="${started/,/.}" -- "${1-What is the purpose of life?}"
