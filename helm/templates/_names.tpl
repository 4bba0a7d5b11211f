{{/* Names and labels. */}}
{{- define "shoal.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}{{ .Release.Name }}{{- else -}}{{ printf "%s-%s" .Release.Name $name }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "shoal.serveService" -}}
{{ include "shoal.fullname" . }}-serve
{{- end -}}

{{- define "shoal.cacheClaim" -}}
{{ default (printf "%s-models" (include "shoal.fullname" .)) .Values.modelCache.existingClaim }}
{{- end -}}

{{- define "shoal.workerServiceAccount" -}}
{{ default (include "shoal.fullname" .) .Values.serviceAccount.name }}
{{- end -}}

{{/* Labels of every object but Ray's Pods: they may change with the chart. */}}
{{- define "shoal.labels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Metadata of every object but Ray's Pods. Takes a list: context, name. */}}
{{- define "shoal.metadata" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 | quote }}
namespace: {{ $root.Release.Namespace | quote }}
labels:
  {{- include "shoal.labels" $root | nindent 2 }}
{{- with $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Labels of Ray's Pods. Nothing here may change with a version: the operator hashes them. No app.kubernetes.io/name: the head's
own Service selects the operator's value of it. */}}
{{- define "shoal.rayPodLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/part-of: shoal
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "shoal.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $image.repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $image.repository (default .Chart.AppVersion $image.tag) }}
{{- end -}}
{{- end -}}

{{/* True if the endpoint can be reached from outside of the cluster. */}}
{{- define "shoal.isExposed" -}}
{{- if or (ne .Values.service.type "ClusterIP") .Values.ingress.enabled .Values.httpRoute.enabled -}}true{{- end -}}
{{- end -}}

{{/* Seconds after which the last stream is over. */}}
{{- define "shoal.drainSeconds" -}}
{{ int .Values.router.longestStreamSeconds }}
{{- end -}}
{{- define "shoal.graceSeconds" -}}
{{ add (int .Values.router.longestStreamSeconds) 60 }}
{{- end -}}
{{- define "shoal.deletionDelaySeconds" -}}
{{ add (int .Values.router.longestStreamSeconds) 120 }}
{{- end -}}
