#!/usr/bin/env bash
# mini-swe-agent pointed at one Tollway session; it works in the current directory.
#
# usage: run.sh TASK [mini options]
#
# Default: -c mini.yaml, one bash tool. Commands in fenced text instead, without tools:
#   run.sh TASK -c mini_textbased.yaml --model-class litellm_textbased
set -euo pipefail
task=$1
shift
[ $# -gt 0 ] || set -- -c mini.yaml
export OPENAI_API_KEY=$TOLLWAY_SESSION_TOKEN
export MSWEA_CONFIGURED=true               # no questions on first use
export MSWEA_COST_TRACKING=ignore_errors   # the policy has no price
export LITELLM_LOCAL_MODEL_COST_MAP=True   # no download of a price list
exec mini "$@" -c "model.model_kwargs.api_base=$TOLLWAY_SESSION_URL/v1" \
  --model openai/policy --task "$task" --yolo --exit-immediately
