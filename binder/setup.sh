# shellcheck shell=bash
# What binder/start-lab and tests/run share: the environment, a fast BLAS, the model. Sourced, never run.
#
# Knows: where things belong on this machine, and what is there already. Must not know: the server, the tests.
# Works with bash 3.2 and BSD tools, from any folder, under any path (spaces too).
#
# The second run does nothing twice: .venv/.stamp holds a checksum of all that the environment is made from, and is
# written last. While a set-up runs, the file .venv.lock holds its process id; a lock whose process is gone means that
# the set-up was cut off, so .venv may hold half a package, and is made anew (what pip downloaded stays in its cache).

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
VENV_PYTHON="$VENV/bin/python"
STAMP="$VENV/.stamp"
SETUP_LOCK="$ROOT/.venv.lock"
BLAS_TRIED="$VENV/.blas-tried" # apt was asked for a fast BLAS once and could not help
MODEL="smollm2"
PYTHON_RANGE="Python 3.11 to 3.14"

# Another Python's settings must not reach into this environment.
unset PYTHONHOME PYTHONPATH
export PYTHONNOUSERSITE=1 PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '%s\n' "$*" >&2; }

fail() { # SENTENCE: say it and end with status 1
    say "$(basename "$0"): $*"
    exit 1
}

# run_step COMMAND...: run a long command in a process group of its own, so that Ctrl-C (or TERM) ends all of it
# (pip and whatever pip started), then this script. Returns the command's status.
run_step() {
    local step status=0
    set -m # a group of its own, where Ctrl-C is not ignored as it is in plain background jobs
    "$@" </dev/null &
    step=$!
    set +m
    [ "$(lock_owner)" != "$$" ] || echo "$step" >>"$SETUP_LOCK"
    trap 'end_step INT "$step" 5; say "$(basename "$0"): stopped; start it again to go on."; exit 130' INT
    trap 'end_step INT "$step" 5; exit 143' TERM HUP
    wait "$step" || status=$?
    trap - INT TERM HUP
    return "$status"
}

# end_step SIGNAL PROCESS SECONDS: send the signal to the process's group, and kill what is left after so long.
end_step() {
    local tenths=$(($3 * 10))
    trap '' INT TERM HUP
    kill "-$1" -- "-$2" 2>/dev/null
    while kill -0 -- "-$2" 2>/dev/null && [ "$tenths" -gt 0 ]; do
        sleep 0.1
        tenths=$((tenths - 1))
    done
    kill -KILL -- "-$2" 2>/dev/null
}

# ---------------------------------------------------------------------------------------------- the environment

# python_fits PYTHON: status 0 when that interpreter runs and is new enough, 2 when it only lacks venv or pip.
# It is run, not looked up: a name on the path may be a shim with nothing behind it.
python_fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1 || return 1
    "$1" -c 'import ensurepip, venv' >/dev/null 2>&1 || return 2
}

find_python() { # print the first interpreter that fits, or fail with a sentence
    local name status=0 lacking=""
    if [ -n "${PYTHON:-}" ]; then # who names one wants that one and no other
        python_fits "$PYTHON" || status=$?
        case "$status" in
            0) command -v "$PYTHON" && return 0 ;;
            2) fail "PYTHON=$PYTHON has no venv module; install it (Debian, Ubuntu: sudo apt-get install python3-venv) and start again." ;;
        esac
        fail "PYTHON=$PYTHON is not $PYTHON_RANGE; name one that is, or leave PYTHON unset, and start again."
    fi
    for name in python3.13 python3.12 python3.11 python3.14 python3 python; do
        status=0
        python_fits "$name" || status=$?
        if [ "$status" = 0 ]; then
            command -v "$name"
            return 0
        fi
        [ "$status" = 2 ] && lacking="$name"
    done
    if [ -n "$lacking" ]; then
        fail "$lacking has no venv module; install it (Debian, Ubuntu: sudo apt-get install python3-venv) and start again."
    fi
    fail "no $PYTHON_RANGE was found; install one, or name it with PYTHON=/path/to/python3, and start again."
}

# MLX has no build for other systems, and pip would quietly take a version that is years old.
check_system() {
    local system machine version
    system="$(uname -s)"
    machine="$(uname -m)"
    case "$system-$machine" in
        Darwin-arm64) ;;
        Darwin-*) fail "MLX runs on Macs with Apple silicon only, and this one is $machine; use Binder or a Linux machine." ;;
        Linux-x86_64 | Linux-aarch64)
            version="$(getconf GNU_LIBC_VERSION 2>/dev/null | awk '{ print $2 }')"
            if [ -z "$version" ]; then
                fail "MLX needs glibc 2.35 or later and this Linux has another C library; use Ubuntu 22.04, Debian 12 or later."
            fi
            if ! glibc_fits "$version"; then
                fail "MLX needs glibc 2.35 or later and this Linux has $version; use Ubuntu 22.04, Debian 12 or later."
            fi
            ;;
        *) fail "MLX has no build for $system on $machine; use a Mac with Apple silicon, or Linux on x86-64 or aarch64." ;;
    esac
}

glibc_fits() { # VERSION: 2.35 or later
    local major="${1%%.*}" rest="${1#*.}"
    [ "$major" -gt 2 ] || { [ "$major" -eq 2 ] && [ "${rest%%.*}" -ge 35 ]; }
}

# What the environment is made from, as one line; changes when anything of it does. Fails when .venv has no Python.
fingerprint() {
    local version
    version="$("$VENV_PYTHON" -c 'import sys; print(sys.version)' 2>/dev/null)" || return 1
    {
        printf '%s\n%s\n' "$VENV" "$version"
        cat "$ROOT/requirements.txt" "$ROOT/binder/constraints.txt" "$ROOT/pyproject.toml"
    } | cksum
}

environment_is_current() {
    local now
    [ -e "$STAMP" ] && now="$(fingerprint)" && [ "$now" = "$(cat "$STAMP")" ]
}

lock_owner() { head -n 1 "$SETUP_LOCK" 2>/dev/null; }

lock_is_alive() { # whether the process that wrote the lock is still a set-up of ours
    local owner
    owner="$(lock_owner)"
    if [ -z "$owner" ]; then # it was made in this very moment, or its writer died in it
        sleep 1
        owner="$(lock_owner)"
        [ -n "$owner" ] || return 1
    fi
    case "$(ps -ww -p "$owner" -o command= 2>/dev/null)" in
        *start-lab* | *tests/run* | *tests/soak* | *tests/mutate* | *setup.sh*) return 0 ;;
        *) return 1 ;;
    esac
}

# A set-up that was killed outright may have left pip behind, still writing into .venv. The lock's later lines name it.
end_orphans() {
    local orphan
    tail -n +2 "$SETUP_LOCK" 2>/dev/null | while read -r orphan; do
        case "$(ps -ww -p "$orphan" -o command= 2>/dev/null)" in
            *"$VENV"*) kill -KILL -- "-$orphan" 2>/dev/null ;;
        esac
    done
}

# take_lock: status 0 when the lock was free, 3 when it was left by a set-up that was cut off. Waits for a live one.
take_lock() {
    local told="" was_cut_off=0
    until (set -o noclobber && echo "$$" >"$SETUP_LOCK") 2>/dev/null; do
        [ -e "$SETUP_LOCK" ] || fail "cannot write in $ROOT; make the folder writable and start again."
        if lock_is_alive; then
            [ -n "$told" ] || say "Another set-up of this folder is running (process $(lock_owner)); waiting for it."
            told=yes
            sleep 1
        else
            was_cut_off=3
            end_orphans
            rm -f "$SETUP_LOCK"
        fi
    done
    return "$was_cut_off"
}

# venv_is_usable: whether .venv can be built upon: it runs, fits, has pip, and was made for this very folder
# (the scripts inside an environment hold its path, so a folder that was moved needs a new one).
venv_is_usable() {
    python_fits "$VENV_PYTHON" && "$VENV_PYTHON" -m pip --version >/dev/null 2>&1 &&
        grep -qF "$VENV" "$VENV/bin/activate" 2>/dev/null
}

# prepare_venv: bring .venv up to requirements.txt, with this package in it. Does nothing when it is.
prepare_venv() {
    [ ! -e "$SETUP_LOCK" ] && environment_is_current && return 0
    check_system
    local cut_off=0 python
    take_lock || cut_off=$?
    if [ "$cut_off" = 0 ] && environment_is_current; then # the set-up that we waited for did it
        rm -f "$SETUP_LOCK"
        return 0
    fi

    if [ "$cut_off" != 0 ] || ! venv_is_usable; then
        python="$(find_python)" || {
            rm -f "$SETUP_LOCK"
            exit 1
        }
        [ "$cut_off" = 0 ] || say "The last set-up was cut off; making the environment anew."
        say "Making the environment .venv with $("$python" --version) ..."
        run_step "$python" -m venv --clear "$VENV" ||
            setup_failed "the environment $VENV could not be made; see the lines above, put it right and start again."
    fi
    rm -f "$STAMP" "$BLAS_TRIED"
    say "Installing what requirements.txt names (a few minutes the first time) ..."
    cd "$ROOT" || fail "cannot enter $ROOT; make the folder readable and start again."
    run_step "$VENV_PYTHON" -m pip install -r requirements.txt ||
        setup_failed "pip could not install requirements.txt; see the lines above, check the network and start again."
    run_step "$VENV_PYTHON" -m pip install --quiet --no-deps --no-build-isolation -e . ||
        setup_failed "pip could not install this package; see the lines above, put it right and start again."
    fingerprint >"$STAMP.new" && mv -f "$STAMP.new" "$STAMP"
    rm -f "$SETUP_LOCK"
}

# pip tidies up when it fails by itself, so what it did is kept and the next start goes on from there.
setup_failed() {
    rm -f "$SETUP_LOCK"
    fail "$@"
}

# ------------------------------------------------------------------------------------- a fast BLAS, and the model

# apt_install PACKAGE: install a system package where that needs no password. Status 1 when it may not or cannot.
apt_install() {
    local as_root="" options="-y -q --no-install-recommends -o Dpkg::Use-Pty=0 -o Acquire::Retries=1"
    command -v apt-get >/dev/null 2>&1 || return 1
    if [ "$(id -u)" != 0 ]; then
        sudo -n true >/dev/null 2>&1 || return 1
        as_root="sudo -n"
    fi
    say "Installing the system package $1 ..."
    # shellcheck disable=SC2086  # both strings are lists of words
    {
        $as_root env DEBIAN_FRONTEND=noninteractive apt-get install $options "$1" ||
            { $as_root apt-get update -q && $as_root env DEBIAN_FRONTEND=noninteractive apt-get install $options "$1"; }
    } </dev/null >&2
}

blas_note() { # print nothing when MLX will be fast here, else one sentence that says why not and what to run
    (cd "$ROOT" && "$VENV_PYTHON" -c 'from minivllm.models.cpu_blas import make_fast; print(make_fast().note)')
}

# prepare_blas: make MLX fast on this machine, or say what to run. Never fails: the engine works without, slowly.
# apt is asked once for an environment, so that a machine without network does not wait for it at every start.
prepare_blas() {
    local note
    note="$(blas_note)"
    [ -n "$note" ] || return 0
    if [ -z "${MINIVLLM_BLAS:-}" ] && [ ! -e "$BLAS_TRIED" ]; then
        if apt_install libopenblas0-pthread; then
            note="$(blas_note)"
        else
            : >"$BLAS_TRIED"
        fi
    fi
    [ -z "$note" ] || say "$note"
}

prepare_model() { # bring the default model into the user's cache; nothing is fetched when it is there
    cd "$ROOT" || fail "cannot enter $ROOT; make the folder readable and start again."
    run_step "$VENV_PYTHON" -m minivllm model get "$MODEL" ||
        fail "the model $MODEL is not there yet; see the line above, check the network and start again to go on."
}
