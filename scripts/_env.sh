# The environment that quickstart and test share: sourced, not run.
# ensure_env EXTRAS makes .venv when it is missing and installs the checkout with those extras, at once when that is done.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"

say() {
  if [ -t 2 ] && [ -z "${NO_COLOR-}" ]; then printf '\033[1m==>\033[0m %s\n' "$*" >&2; else printf '==> %s\n' "$*" >&2; fi
}

fail() {
  printf 'error: %s\n' "$1" >&2
  [ $# -lt 2 ] || printf '  = hint: %s\n' "$2" >&2
  exit 2
}

# Prints a Python of version 3.11 or newer.
find_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer was found" "install one, or name it: PYTHON=/path/to/python3.12 $0"
}

# Prints a hash of what an installation depends on.
fingerprint() {
  { printf '%s\n' "$root" && "$venv/bin/python" -V && cat "$root/pyproject.toml"; } | cksum
}

ensure_env() {
  local extras="$1" stamp="$venv/.distcell-$1.stamp" python index=()
  if [ ! -x "$venv/bin/python" ]; then
    python="$(find_python)" || exit 2
    say "making $venv with $("$python" -V)"
    "$python" -m venv "$venv" ||
      fail "$python cannot make a virtual environment" "on Debian and Ubuntu: apt install python3-venv"
  fi
  export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ]; then
    return
  fi
  # Without a GPU, torch's build for CPUs saves gigabytes of downloads. Who has configured pip knows better.
  if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null 2>&1 &&
    [ -z "$("$venv/bin/python" -m pip config list 2>/dev/null)" ]; then
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
  fi
  say "installing distcell[$extras] and what it needs"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    ${index[@]+"${index[@]}"} -e "$root[$extras]" ||
    fail "the installation failed" "see the lines above; needs network access to a package index"
  fingerprint >"$stamp"
}
