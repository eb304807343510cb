#!/usr/bin/env bash
# Claude Code pointed at one Tollway session; it works in the current directory.
#
# usage: run.sh TASK [claude options]      (for example --allowedTools Bash,Write)
set -euo pipefail
task=$1
shift
export ANTHROPIC_BASE_URL=$TOLLWAY_SESSION_URL # without /v1
export ANTHROPIC_API_KEY=$TOLLWAY_SESSION_TOKEN
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 # no updates, telemetry or error reports
export ENABLE_TOOL_SEARCH=false                   # every tool from the first request on, none by reference later
exec claude --print --model policy "$@" -- "$task"
