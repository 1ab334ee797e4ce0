# shellcheck shell=bash
# Sourced by the scripts that need the project's virtual environment. Sets `root`, the checkout, and `python`, the
# environment's interpreter.
#
# DISAGG_VENV names another folder for the environment, DISAGG_PYTHON the interpreter to make it with.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${DISAGG_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv
export DISAGG_VENV=$venv # a script that is started from here may be in another folder
python=$venv/bin/python

say() { printf '%s\n' "$*" >&2; }

# Whether $1 is a Python that runs and is new enough. A version manager's name for one may be there and not run.
is_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Prints the interpreter to make the environment with, or says what is missing.
find_python() {
  local candidate
  if [[ -n ${DISAGG_PYTHON:-} ]]; then
    is_python "$DISAGG_PYTHON" || { say "DISAGG_PYTHON=$DISAGG_PYTHON is no Python 3.11 or newer."; return 1; }
    printf '%s\n' "$DISAGG_PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11; do
    if is_python "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  if command -v python3 >/dev/null; then
    say "disagg needs Python 3.11 or newer. python3 is $(python3 --version 2>&1), and no python3.13, python3.12 or" \
      "python3.11 that runs is on PATH. Install one of them."
  else
    say "disagg needs Python 3.11 or newer, and no python3 is on PATH. Install it."
  fi
  return 1
}

# Makes the environment, unless it is there. One of another Python than DISAGG_PYTHON is made anew.
make_venv() {
  local base
  if is_python "$python"; then
    [[ -z ${DISAGG_PYTHON:-} || $("$python" -VV) == "$("$DISAGG_PYTHON" -VV)" ]] && return
  fi
  base=$(find_python) || return
  if ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
    say "$("$base" --version) cannot make a virtual environment: its modules venv and ensurepip are not installed." \
      "On Debian and Ubuntu: apt-get install python3-venv" \
      "(or, for a Python beside the system's, python3.X-venv with its version)."
    return 1
  fi
  if [[ -e $venv && ! -e $venv/pyvenv.cfg ]] && ! rmdir "$venv" 2>/dev/null; then
    say "$venv is there and is no virtual environment: move it away, or set DISAGG_VENV to another folder."
    return 1
  fi
  say "Making $venv with $("$base" --version)."
  "$base" -m venv --clear "$venv"
}

# Makes the environment ready: setup_venv EXTRAS, comma-separated or empty.
#
# A stamp in it lists the extras that were installed from this setup.cfg, so that the next run has nothing to do.
setup_venv() {
  local extras=$1 stamp=$venv/disagg-installed key
  make_venv || return
  key="$root $(cksum <"$root/setup.cfg")"
  if grep -qxF "$key [$extras]" "$stamp" 2>/dev/null; then
    return
  fi
  say "Installing disagg${extras:+ with the extras $extras} into $venv. The first time takes a few minutes."
  "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >&2 || return
  (cd "$root" && "$python" -m pip install -q --disable-pip-version-check -e ".${extras:+[$extras]}") >&2 || return
  { grep -F "$key [" "$stamp" 2>/dev/null || true; printf '%s\n' "$key [$extras]"; } >"$stamp.new"
  mv "$stamp.new" "$stamp"
}
