#!/usr/bin/env bash
# Qwen Code pointed at one Tollway session; it works in the current directory. Needs Node.js 22 or newer.
#
# usage: run.sh TASK [qwen options]      (for example --yolo inside a sandbox of yours)
set -euo pipefail
task=$1
shift
export OPENAI_API_KEY=$TOLLWAY_SESSION_TOKEN
export QWEN_USAGE_STATISTICS_ENABLED=false
exec qwen --auth-type openai --openai-base-url "$TOLLWAY_SESSION_URL/v1" --model policy "$@" "$task"
