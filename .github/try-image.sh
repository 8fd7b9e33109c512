#!/usr/bin/env bash
# Starts the CPU image as it should be run, waits until its health check passes, and asks for a compressed completion.
set -euo pipefail
server=$(docker run --detach --rm --read-only --tmpfs /tmp --tmpfs /home/kvmerge:uid=10001 --cap-drop ALL \
  --security-opt no-new-privileges --shm-size 1g --stop-timeout 45 --publish 127.0.0.1:8000:8000 "$1")
trap 'docker logs "$server" | tail -40; docker stop "$server"' EXIT
for _ in $(seq 300); do
  health=$(docker inspect --format '{{.State.Health.Status}}' "$server")
  [ "$health" != healthy ] || break
  sleep 1
done
[ "$health" = healthy ]
curl --fail-with-body --silent --show-error http://127.0.0.1:8000/v1/completions \
  --header 'Content-Type: application/json' --data '{"model": "demo", "prompt": "remember dada 4821. recall dada",
    "max_tokens": 5, "temperature": 0, "kv_compression": {"policy": "keepkv", "budget": 256}}' \
  | tee /dev/stderr | tr -d ' ' | grep --quiet 4821
