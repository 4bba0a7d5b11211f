{{/* What a model's application is built from: deploy/model_spec.py. Takes a list: context, groups, model. */}}
{{- define "shoal.modelSpec" -}}
{{- $root := index . 0 -}}
{{- $model := index . 2 -}}
{{- $group := include "shoal.groupOf" (list (index . 1) $model) | fromYaml -}}
{{- $isGpu := gt (int $group.gpus) 0 -}}
{{- $engine := merge (dict) (default (dict) $model.engineArgs) -}}
{{- if gt (int (default 1 $model.tensorParallelSize)) 1 }}{{ $_ := set $engine "tensor_parallel_size" (int $model.tensorParallelSize) }}{{ end -}}
{{- with $model.maxModelLen }}{{ $_ := set $engine "max_model_len" (int .) }}{{ end -}}
{{- with $model.dtype }}{{ $_ := set $engine "dtype" . }}{{ end -}}
{{- with $model.loadFormat }}{{ $_ := set $engine "load_format" . }}{{ end -}}
{{- if and (not $isGpu) (not (hasKey $engine "cpu_threads")) -}}
{{- $threads := max 1 (div (int $group.ranksPerNode) (int (default 1 $model.tensorParallelSize))) -}}
{{- $_ := set $engine "cpu_threads" $threads -}}
{{- end -}}
{{- if not (hasKey $engine "drain_timeout_s") }}{{ $_ := set $engine "drain_timeout_s" (include "shoal.drainSeconds" $root | int) }}{{ end -}}
{{- if not (hasKey $engine "stall_timeout_s") }}{{ $_ := set $engine "stall_timeout_s" (int $root.Values.router.stallTimeoutSeconds) }}{{ end -}}
name: {{ $model.name | quote }}
{{- with $model.source }}
source: {{ . | quote }}
{{- end }}
device: {{ ternary "cuda" "cpu" $isGpu }}
ranks_per_node: {{ $group.ranksPerNode }}
worker_group: {{ $group.name | quote }}
{{- if and $model.autoscaling (eq (int (dig "minReplicas" 1 $model.autoscaling)) 0) }}
scales_to_zero: true
{{- end }}
engine:
  {{- toYaml $engine | nindent 2 }}
{{- end -}}

{{- define "shoal.applicationName" -}}
model-{{ . | replace "/" "--" }}
{{- end -}}

{{/* As many replicas as a model's load needs: cluster/autoscaling.py. Takes the model. */}}
{{- define "shoal.autoscaling" -}}
num_replicas: auto
autoscaling_config:
  min_replicas: {{ dig "minReplicas" 1 .autoscaling }}
  initial_replicas: {{ dig "replicas" 1 . }}
  max_replicas: {{ .autoscaling.maxReplicas }}
  look_back_period_s: 5.0
  metrics_interval_s: 1.0
  upscale_delay_s: 0.0
  downscale_delay_s: {{ dig "downscaleDelaySeconds" 60 .autoscaling }}
  downscale_to_zero_delay_s: {{ dig "scaleToZeroDelaySeconds" 300 .autoscaling }}
  policy:
    policy_function: cluster.autoscaling:WorkPolicy
    policy_kwargs:
      ttft_s: {{ dig "targetFirstTokenSeconds" 2.0 .autoscaling }}
      tpot_s: {{ dig "targetTokenSeconds" 0.1 .autoscaling }}
{{- end -}}

{{/* One application a model and one ingress. Replicas and the ingress's list of models stand under `deployments`, not under `args`:
a change of args restarts every process of its application. */}}
{{- define "shoal.serveConfig" -}}
{{- $root := . -}}
{{- $groups := (include "shoal.groups" . | fromYaml).groups -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: {{ .Values.ray.ports.serve }}
applications:
{{- range .Values.models }}
  - name: {{ include "shoal.applicationName" .name | quote }}
    route_prefix: null
    import_path: deploy.serve_app:build_model
    args:
      {{- include "shoal.modelSpec" (list $root $groups .) | nindent 6 }}
    deployments:
      - name: replica
        {{- if .autoscaling }}
        {{- include "shoal.autoscaling" . | nindent 8 }}
        {{- else }}
        num_replicas: {{ dig "replicas" 1 . }}
        {{- end }}
{{- end }}
  - name: shoal-ingress
    route_prefix: /
    import_path: deploy.serve_app:build_ingress
    args:
      policy: {{ .Values.router.policy }}
      num_cpus: {{ .Values.router.cpus }}
      max_body_bytes: {{ int .Values.router.maxBodyBytes }}
      replica_wait_s: {{ .Values.router.replicaWaitSeconds }}
      stall_timeout_s: {{ .Values.router.stallTimeoutSeconds }}
      drain_timeout_s: {{ include "shoal.drainSeconds" . }}
      {{- with .Values.ray.ports.grpc }}
      grpc_port: {{ int . }}
      {{- end }}
      {{- if .Values.auth.apiKeys.existingSecret }}
      api_keys_file: /etc/shoal/keys/{{ .Values.auth.apiKeys.key }}
      {{- end }}
    deployments:
      - name: ingress
        num_replicas: {{ .Values.router.replicas }}
        user_config:
          min_replicas:
          {{- range .Values.models }}
            {{ .name | quote }}: {{ if .autoscaling }}{{ dig "minReplicas" 1 .autoscaling }}{{ else }}{{ dig "replicas" 1 . }}{{ end }}
          {{- end }}
          models:
          {{- range .Values.models }}
            -
              {{- include "shoal.modelSpec" (list $root $groups .) | nindent 14 }}
          {{- end }}
{{- end -}}
