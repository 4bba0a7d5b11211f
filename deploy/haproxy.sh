#!/bin/sh
# Stands before Ray's HAProxy binary: Ray writes a configuration that binds its metrics and statistics pages on
# every interface, whatever host was asked for, and knows no TLS. Bind the pages where SHOAL_HOST says; where
# SHOAL_TLS_BUNDLE names a certificate, let the endpoint speak TLS on SHOAL_TLS_BIND. Ray Serve answers 500
# where an id of a request or a session is no UTF-8: drop the one if it is no plain word, and make the other one that the
# ingress refuses. Give its own errors the API's form. Never splice requests: HAProxy then no longer sees that a client
# leaves which sent headers and body one after the other, and its answer is computed for nobody. Then become HAProxy.
set -eu
config=
previous=
for argument in "$@"; do
    [ "$previous" = "-f" ] && config=$argument
    previous=$argument
done
if [ -n "$config" ] && [ -f "$config" ]; then
    sed -i -E "s/^([[:space:]]*bind[[:space:]]+)(\*|0\.0\.0\.0)?:([0-9]+)/\1${SHOAL_HOST}:\3/" "$config"
    sed -i -E '/^frontend http_frontend[[:space:]]*$/a\
    http-request del-header x-request-id unless { req.fhdr(x-request-id) -m reg ^[A-Za-z0-9._:-]{1,128}$ } !{ req.fhdr_cnt(x-request-id) gt 1 }\
    http-request set-header x-session-id "not one word" if { req.fhdr(x-session-id) -m found } !{ req.fhdr(x-session-id) -m reg ^[!-~]{0,256}$ } or { req.fhdr_cnt(x-session-id) gt 1 }' "$config"
    sed -i -E -e '/^[[:space:]]*errorfile 50[234] /d' -e '/^[[:space:]]*option splice-request/d' -e "/^defaults[[:space:]]*$/r ${0%/*}/haproxy_errors.cfg" "$config"
    if [ -n "${SHOAL_TLS_BUNDLE:-}" ]; then
        port=${SHOAL_TLS_BIND##*:}
        sed -i -E "s|^([[:space:]]*bind[[:space:]]+)${SHOAL_HOST}:${port}[[:space:]]*$|\1${SHOAL_TLS_BIND} ssl crt ${SHOAL_TLS_BUNDLE} alpn h2,http/1.1|" "$config"
        # Never plain where TLS was asked for.
        grep -q "ssl crt ${SHOAL_TLS_BUNDLE}" "$config" || { echo "no line to put TLS on in $config" >&2; exit 1; }
    fi
fi
exec "$SHOAL_HAPROXY_BINARY" "$@"
