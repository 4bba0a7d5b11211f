{{/* What `ray start` is told beside the chart's own. Takes a list: root, path, values of the head or a group. */}}
{{- define "shoal.validateRayStartParams" -}}
{{- $root := index . 0 -}}
{{- $path := index . 1 -}}
{{- $given := default (dict) (index . 2).rayStartParams -}}
{{- $isHead := eq $path "ray.head" -}}
{{- if $isHead -}}
{{- if ne (get (merge (dict) $given (dict "num-cpus" "0")) "num-cpus") "0" -}}
{{- fail (printf "%s: rayStartParams.num-cpus %s would place ranks on the head, which serves no request: leave it at 0, and add a worker group" $path (get $given "num-cpus")) -}}
{{- end -}}
{{- else -}}
{{- range $param, $way := dict "num-gpus" "gpus" "num-cpus" "resources.limits.cpu" -}}
{{- if hasKey $given $param -}}
{{- fail (printf "%s: rayStartParams.%s is what Ray counts by, and so do models' places: set %s instead" $path $param $way) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $own := dict
  "address" "KubeRay tells workers where the head is" "head" "KubeRay says which Pod is the head"
  "port" "the head's port is 6379 throughout" "node-ip-address" "KubeRay gives the Pod's own"
  "redis-password" "set ray.gcsFaultTolerance.redis" "labels" "the chart labels nodes by worker group, and models are placed by that"
  "metrics-export-port" "Ray's metrics are scraped at 8080" "dashboard-port" "the dashboard is at 8265"
  "dashboard-agent-listen-port" "probes ask at 52365" "ray-client-server-port" "the client server is at 10001"
  "min-worker-port" "10002 to 19999 are kept for worker processes" "max-worker-port" "10002 to 19999 are kept for worker processes"
  "worker-port-list" "10002 to 19999 are kept for worker processes" -}}
{{- range $param, $why := $own -}}
{{- if hasKey $given $param -}}
{{- fail (printf "%s: rayStartParams.%s is the chart's to set (%s): leave it out" $path $param $why) -}}
{{- end -}}
{{- end -}}
{{- $owners := include "shoal.portOwners" $root | fromYaml -}}
{{- range $param := list "node-manager-port" "object-manager-port" "runtime-env-agent-port" "dashboard-agent-grpc-port" -}}
{{- with get $given $param | int -}}
{{- $first := index $root.Values.ray.ports.directHttp 0 | int -}}
{{- $last := index $root.Values.ray.ports.directHttp 1 | int -}}
{{- with get $owners (toString .) -}}
{{- fail (printf "%s: rayStartParams.%s is %s, the port of %s: choose another" $path $param (get $given $param) .) -}}
{{- end -}}
{{- if or (and (le 10002 .) (le . 19999)) (and (le $first .) (le . $last)) -}}
{{- fail (printf "%s: rayStartParams.%s is %d, within the ports of Ray's worker processes (10002 to 19999) or of ray.ports.directHttp (%d to %d): choose another" $path $param . $first $last) -}}
{{- end -}}
{{- $_ := set $owners (toString .) (printf "rayStartParams.%s" $param) -}}
{{- end -}}
{{- end -}}
{{- end -}}
