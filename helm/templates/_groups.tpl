{{/* Worker groups with all of their defaults, as YAML: {groups: [...]}. */}}
{{- define "shoal.groups" -}}
{{- $largest := 1 -}}
{{- $most := 0 -}}
{{- range .Values.models -}}
{{- $size := int (default 1 .tensorParallelSize) -}}
{{- $largest = max $largest $size | int -}}
{{- $most = add $most (dig "autoscaling" "maxReplicas" (dig "replicas" 1 .) .) | int -}}
{{- end -}}
{{- $autoscales := .Values.ray.autoscaler.enabled -}}
{{- $groups := .Values.ray.workerGroups -}}
{{- if not $groups -}}
{{- $groups = list (dict "name" "workers" "gpus" $largest "maxReplicas" (max 1 $most)) -}}
{{- end -}}
groups:
{{- range $groups }}
{{- $gpus := int (default 0 .gpus) }}
{{- $hosts := int (default 1 .numOfHosts) }}
{{- $resources := default (dict) .resources }}
{{- $cpu := ternary (max 4 (add 2 (mul 2 $gpus))) 4 (gt $gpus 0) }}
{{- $memory := ternary (printf "%dGi" (max 16 (mul 24 $gpus))) "8Gi" (gt $gpus 0) }}
{{- $requests := merge (dict) (default (dict) $resources.requests) (dict "cpu" (toString $cpu) "memory" $memory) }}
{{- $limits := merge (dict) (default (dict) $resources.limits) (dict "cpu" (get $requests "cpu") "memory" (get $requests "memory")) }}
{{- if gt $gpus 0 }}
{{- $limits = merge $limits (dict (default "nvidia.com/gpu" .gpuResource) (toString $gpus)) }}
{{- $requests = merge $requests (dict (default "nvidia.com/gpu" .gpuResource) (toString $gpus)) }}
{{- end }}
  - name: {{ .name | quote }}
    gpus: {{ $gpus }}
    numOfHosts: {{ $hosts }}
    minReplicas: {{ dig "minReplicas" 1 . }}
    maxReplicas: {{ dig "maxReplicas" (max 1 (dig "minReplicas" 1 .)) . }}
    mostReplicas: {{ ternary (dig "maxReplicas" (max 1 (dig "minReplicas" 1 .)) .) (dig "minReplicas" 1 .) $autoscales }}
    shmSize: {{ default "8Gi" .shmSize | quote }}
    ranksPerNode: {{ ternary $gpus (include "shoal.wholeCpus" (get $limits "cpu") | int) (gt $gpus 0) }}
    resources:
      requests: {{ toJson $requests }}
      limits: {{ toJson $limits }}
{{- end }}
{{- end -}}

{{/* Whole CPUs of a quantity: "8", 8, "3500m". At least one. */}}
{{- define "shoal.wholeCpus" -}}
{{- $text := toString . -}}
{{- if hasSuffix "m" $text -}}
{{ max 1 (div (trimSuffix "m" $text | int) 1000) }}
{{- else -}}
{{ max 1 (floor (float64 $text) | int) }}
{{- end -}}
{{- end -}}

{{/* The group that a model runs on, by its name or the first. Takes a list: groups, model. Gives YAML. */}}
{{- define "shoal.groupOf" -}}
{{- $groups := index . 0 -}}
{{- $model := index . 1 -}}
{{- $found := dict -}}
{{- if $model.workerGroup -}}
{{- range $groups -}}{{- if eq .name $model.workerGroup -}}{{- $found = . -}}{{- end -}}{{- end -}}
{{- else -}}
{{- $found = first $groups -}}
{{- end -}}
{{ toYaml $found }}
{{- end -}}

{{/* Workers' Pods that there may be at most. */}}
{{- define "shoal.mostWorkerPods" -}}
{{- $most := 0 -}}
{{- range (include "shoal.groups" . | fromYaml).groups -}}
{{- $most = add $most (mul (int .mostReplicas) (int .numOfHosts)) | int -}}
{{- end -}}
{{- $most -}}
{{- end -}}
