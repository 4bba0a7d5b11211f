{{/* Every port of a Pod belongs to one process. Ray's own are where Ray has them by default; the dashboard's agent answers the probes. */}}
{{- define "shoal.validatePorts" -}}
{{- $ports := .Values.ray.ports -}}
{{- $owners := include "shoal.raysPorts" . | fromYaml -}}
{{- $first := index $ports.directHttp 0 | int -}}
{{- $last := index $ports.directHttp 1 | int -}}
{{- if gt $first $last -}}
{{- fail (printf "ray.ports.directHttp: the first port %d is above the last, %d" $first $last) -}}
{{- end -}}
{{- $wanted := mul 2 (int .Values.router.replicas) | int -}}
{{- if lt (add1 (sub $last $first) | int) $wanted -}}
{{- fail (printf "ray.ports.directHttp has %d ports, router.replicas %d need %d on a Pod that has all of them while they are replaced: widen it" (add1 (sub $last $first) | int) (int .Values.router.replicas) $wanted) -}}
{{- end -}}
{{- if and (le $first 19999) (ge $last 10002) -}}
{{- fail (printf "ray.ports.directHttp %d to %d holds ports of Ray's worker processes (10002 to 19999): choose another range" $first $last) -}}
{{- end -}}
{{- range $port, $owner := $owners -}}
{{- if and (le $first (int $port)) (le (int $port) $last) -}}
{{- fail (printf "ray.ports.directHttp %d to %d holds %s, the port of %s: choose another range" $first $last $port $owner) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "serve" "grpc" "shoalMetrics" "haproxyMetrics" -}}
{{- with get $ports $name | int -}}
{{- $port := . -}}
{{- with get $owners (toString $port) -}}
{{- fail (printf "ray.ports.%s is %d, the port of %s: choose another" $name $port .) -}}
{{- end -}}
{{- if and (le 10002 $port) (le $port 19999) -}}
{{- fail (printf "ray.ports.%s is %d, which Ray may give one of its worker processes (10002 to 19999): choose another" $name $port) -}}
{{- end -}}
{{- if and (le $first $port) (le $port $last) -}}
{{- fail (printf "ray.ports.%s is %d, within ray.ports.directHttp %d to %d: choose another" $name $port $first $last) -}}
{{- end -}}
{{- $_ := set $owners (toString $port) (printf "ray.ports.%s" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Ports that Ray and HAProxy have, whatever the values. */}}
{{- define "shoal.raysPorts" -}}
"6379": "Ray's GCS"
"8080": "Ray's metrics"
"8265": "Ray's dashboard"
"8404": "HAProxy's statistics"
"8500": "Ray Serve's fallback proxy"
"10001": "Ray's client server"
"44217": "the autoscaler's metrics"
"44227": "the dashboard's metrics"
"52365": "the dashboard's agent"
{{- end -}}

{{/* All single ports of a Pod, with whose they are. */}}
{{- define "shoal.portOwners" -}}
{{ include "shoal.raysPorts" . }}
{{- range $name := list "serve" "grpc" "shoalMetrics" "haproxyMetrics" }}
{{- with get $.Values.ray.ports $name | int }}
{{ toString . | quote }}: "ray.ports.{{ $name }}"
{{- end }}
{{- end }}
{{- end -}}
