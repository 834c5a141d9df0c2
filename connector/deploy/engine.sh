#!/bin/sh
# engine.sh MOONCAKE_JSON KV_TRANSFER_JSON MODEL [ARGUMENT...]: `vllm serve` with the settings of a recipe.
set -eu
export MOONCAKE_CONFIG_PATH="$1"
transfer=$(cat "$2")
shift 2
export PYTHONHASHSEED="${PYTHONHASHSEED:-0}" # the same for all engines: without it none shares with any other
exec vllm serve "$@" --kv-transfer-config "$transfer"
