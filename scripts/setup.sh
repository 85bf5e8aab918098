#!/bin/sh
# Makes .venv with the pinned requirements. Run again, it does nothing. PYTHON=... picks an interpreter.
set -eu
cd "$(dirname "$0")/.."

venv=.venv
say() { printf 'setup: %s\n' "$*" >&2; }

# A name on PATH proves nothing: it may be a version manager's shim for an interpreter that is not
# active, or a Python without the module that makes virtual environments. Only running it does.
works() {
    "$1" -c 'import ensurepip, sys, venv
sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' >/dev/null 2>&1
}

candidates() {
    printf '%s\n' python3.12 python3.13 python3 python
    for root in "${PYENV_ROOT:-}" "$HOME/.pyenv" "$(pyenv root 2>/dev/null || true)"; do
        [ -z "$root" ] || ls -d "$root"/versions/3.12.*/bin/python3.12 \
            "$root"/versions/3.13.*/bin/python3.13 2>/dev/null || true
    done
    for version in 3.12 3.13; do
        uv python find --no-python-downloads "$version" 2>/dev/null || true
    done
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        works "$PYTHON" && printf '%s\n' "$PYTHON" && return
        say "PYTHON=$PYTHON is no working Python 3.12 or 3.13 with venv and ensurepip"
        exit 2
    fi
    candidates | while read -r candidate; do
        if works "$candidate"; then
            printf '%s\n' "$candidate"
            break
        fi
    done
}

stamp="$venv/requirements.$(cksum <requirements.txt | tr ' ' '-')"
if [ -e "$stamp" ] && works "$venv/bin/python"; then
    exit 0
fi

if ! works "$venv/bin/python"; then
    python=$(find_python)
    if [ -z "$python" ]; then
        say "no Python 3.12 or 3.13 with venv and ensurepip is here; install one (apt install" \
            "python3.12-venv, pyenv install 3.12, or uv python install 3.12) and run this again"
        exit 2
    fi
    say "making $venv with $("$python" --version) ($python)"
    "$python" -m venv --clear "$venv"
fi

say "installing the pinned requirements into $venv: 5.5 GB, one to a few minutes"
"$venv/bin/python" -m pip install --disable-pip-version-check -r requirements.txt
rm -f "$venv"/requirements.*
touch "$stamp"
say "done"
