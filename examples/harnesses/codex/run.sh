#!/usr/bin/env bash
# Codex pointed at one Tollway session; it works in the current directory.
#
# usage: run.sh TASK [codex exec options]      (for example --sandbox danger-full-access inside a sandbox of yours)
#
# The same keys may stand in config.toml; then `codex exec --skip-git-repo-check TASK` is enough.
set -euo pipefail
task=$1
shift
provider='{ name = "Tollway", base_url = "'$TOLLWAY_SESSION_URL'/v1", env_key = "TOLLWAY_SESSION_TOKEN", wire_api = "responses" }'
exec codex exec --skip-git-repo-check \
  -c "model_providers.tollway=$provider" \
  -c model_provider=tollway -c model=policy -c model_context_window=131072 \
  -c approval_policy=never -c check_for_update_on_startup=false -c analytics.enabled=false -c features.plugins=false \
  "$@" "$task"
