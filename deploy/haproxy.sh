#!/bin/sh
# Stands before Ray's HAProxy binary: Ray writes a configuration that binds its metrics and statistics pages on
# every interface, whatever host was asked for. Bind them where SHOAL_HOST says, then become HAProxy.
set -eu
config=
previous=
for argument in "$@"; do
    [ "$previous" = "-f" ] && config=$argument
    previous=$argument
done
if [ -n "$config" ] && [ -f "$config" ]; then
    sed -i -E "s/^([[:space:]]*bind[[:space:]]+)(\*|0\.0\.0\.0)?:([0-9]+)/\1${SHOAL_HOST}:\3/" "$config"
fi
exec "$SHOAL_HAPROXY_BINARY" "$@"
