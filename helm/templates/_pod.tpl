{{/* What Ray's daemons, HAProxy, replicas and ranks are told by environment. deploy/node_environment.py says why; a test compares. */}}
{{- define "shoal.env" -}}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
- {name: RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD, value: "0"}
- {name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, value: "router.outer_layer:middlewares"}
- {name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, value: {{ include "shoal.graceSeconds" . | quote }}}
- {name: RAY_SERVE_HAPROXY_METRICS_PORT, value: {{ .Values.ray.ports.haproxyMetrics | quote }}}
- {name: RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT, value: {{ index .Values.ray.ports.directHttp 0 | quote }}}
- {name: RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT, value: {{ index .Values.ray.ports.directHttp 1 | quote }}}
- {name: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S, value: "30"}
- {name: RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S, value: "1"}
- {name: RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS, value: "1"}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_worker_niceness, value: "0"}
- {name: SHOAL_HOST, value: 0.0.0.0}
- {name: SHOAL_METRICS_PORT, value: {{ .Values.ray.ports.shoalMetrics | quote }}}
- {name: SHOAL_VLLM_METRIC_NAMES, value: {{ ternary "1" "0" .Values.observability.vllmMetricNames | quote }}}
- {name: SHOAL_LOG_FORMAT, value: {{ .Values.observability.logFormat }}}
{{- with .Values.observability.tracing.otlpEndpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
- {name: OTEL_TRACES_SAMPLER, value: parentbased_traceidratio}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ $.Values.observability.tracing.ratio | quote }}}
{{- end }}
{{- include "shoal.modelEnv" . }}
{{- end -}}

{{/* Where models are found; also of the prefetch Job. The root file system is read-only. */}}
{{- define "shoal.modelEnv" }}
- {name: HOME, value: /tmp}
- {name: HF_HOME, value: {{ ternary (printf "%s/huggingface" .Values.modelCache.mountPath) "/tmp/huggingface" .Values.modelCache.enabled }}}
- {name: SHOAL_CACHE_DIR, value: {{ ternary (printf "%s/shoal" .Values.modelCache.mountPath) "/tmp/shoal" .Values.modelCache.enabled }}}
- {name: TRITON_CACHE_DIR, value: /tmp/triton}
{{- if .Values.hf.existingSecret }}
- {name: HF_TOKEN_PATH, value: /etc/shoal/hf/{{ .Values.hf.key }}}
{{- end }}
{{- with .Values.hf.endpoint }}
- {name: HF_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- if .Values.hf.offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- end -}}

{{- define "shoal.modelMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.modelCache.enabled }}
- {name: models, mountPath: {{ .Values.modelCache.mountPath }}}
{{- end }}
{{- if .Values.hf.existingSecret }}
- {name: hf-token, mountPath: /etc/shoal/hf, readOnly: true}
{{- end }}
{{- end -}}

{{- define "shoal.modelVolumes" -}}
- name: tmp
  emptyDir: {}
{{- if .Values.modelCache.enabled }}
- name: models
  persistentVolumeClaim:
    claimName: {{ include "shoal.cacheClaim" . | quote }}
{{- end }}
{{- with .Values.hf.existingSecret }}
- name: hf-token
  secret: {secretName: {{ . | quote }}, defaultMode: 288}
{{- end }}
{{- end -}}

{{/* A Pod template of Ray. Takes a dict: root, component, container, group (values of the head or a worker group), ports, resources,
shmSize, readiness. */}}
{{- define "shoal.rayPod" -}}
{{- $root := .root -}}
{{- $group := .group -}}
metadata:
  labels:
    {{- include "shoal.rayPodLabels" (list $root .component) | nindent 4 }}
    {{- with .workerGroup }}
    shoal-worker-group: {{ . | quote }}
    {{- end }}
spec:
  # A Service called "shoal" would otherwise put SHOAL_PORT into the environment, which is one of our settings.
  enableServiceLinks: false
  automountServiceAccountToken: {{ and (eq .component "ray-head") $root.Values.ray.autoscaler.enabled }}
  {{- if or (eq .component "ray-worker") (not $root.Values.ray.autoscaler.enabled) }}
  serviceAccountName: {{ include "shoal.workerServiceAccount" $root | quote }}
  {{- end }}
  # Longer than the longest stream: the preStop hook waits for those that pass through this Pod.
  terminationGracePeriodSeconds: {{ include "shoal.graceSeconds" $root }}
  securityContext:
    {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with $group.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with $group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and (eq .component "ray-worker") $root.Values.ray.topologySpread.enabled }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: {{ $root.Values.ray.topologySpread.topologyKey | quote }}
      whenUnsatisfiable: {{ $root.Values.ray.topologySpread.whenUnsatisfiable }}
      labelSelector:
        matchLabels:
          {{- include "shoal.rayPodLabels" (list $root .component) | nindent 10 }}
          shoal-worker-group: {{ .workerGroup | quote }}
  {{- end }}
  containers:
    - name: {{ .component | quote }}
      image: {{ include "shoal.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      securityContext:
        {{- toYaml $root.Values.securityContext | nindent 8 }}
      env:
        {{- include "shoal.env" $root | nindent 8 }}
        {{- with $group.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- toYaml .ports | nindent 8 }}
      resources:
        {{- toYaml .resources | nindent 8 }}
      {{- /* Loading a model keeps neither the raylet nor the proxy from answering, so none of these ends a Pod that loads. */}}
      startupProbe:
        {{- toYaml .alive | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 120
      livenessProbe:
        {{- toYaml .alive | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 12
      readinessProbe:
        {{- toYaml .ready | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      lifecycle:
        preStop:
          exec:
            command: [python, -m, deploy.drain_node, --timeout-s, {{ include "shoal.drainSeconds" $root | quote }}, --metrics, "http://127.0.0.1:{{ $root.Values.ray.ports.shoalMetrics }}/metrics", --haproxy, "http://127.0.0.1:{{ $root.Values.ray.ports.haproxyMetrics }}/metrics"]
      volumeMounts:
        {{- include "shoal.modelMounts" $root | nindent 8 }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- if $root.Values.auth.apiKeys.existingSecret }}
        - {name: api-keys, mountPath: /etc/shoal/keys, readOnly: true}
        {{- end }}
        {{- with $group.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "shoal.modelVolumes" $root | nindent 4 }}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ .shmSize | quote }}}
    {{- with $root.Values.auth.apiKeys.existingSecret }}
    - name: api-keys
      secret: {secretName: {{ . | quote }}, defaultMode: 288}
    {{- end }}
    {{- with $group.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
