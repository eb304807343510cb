#!/usr/bin/env bash
# OpenCode pointed at one Tollway session; it works in the current directory.
#
# usage: run.sh TASK [opencode run options]
set -euo pipefail
task=$1
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export OPENCODE_CONFIG=$here/opencode.json # reads the session from TOLLWAY_SESSION_URL and TOLLWAY_SESSION_TOKEN
export OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_AUTOUPDATE=1
exec opencode run --model tollway/policy "$@" "$task"
