{{/* What a schema cannot say. Each message has the value and the way out. */}}
{{- define "shoal.validate" -}}
{{- $root := . -}}
{{- $name := include "shoal.fullname" . -}}
{{- if gt (len $name) 47 -}}
{{- fail (printf "the name %q has %d characters, a RayService takes 47: shorten the release's name or set fullnameOverride" $name (len $name)) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the name %q must begin with a letter and hold lower-case letters, digits and dashes only: rename the release or set fullnameOverride" $name) -}}
{{- end -}}
{{- range $label := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart" -}}
{{- if hasKey $root.Values.commonLabels $label -}}
{{- fail (printf "commonLabels: %s is a label that the chart sets itself: leave it out" $label) -}}
{{- end -}}
{{- end -}}
{{- $groups := (include "shoal.groups" . | fromYaml).groups -}}
{{- $seen := dict -}}
{{- range $groups -}}
{{- if hasKey $seen .name }}{{ fail (printf "ray.workerGroups: two groups are called %q, give each its own name" .name) }}{{ end -}}
{{- $_ := set $seen .name true -}}
{{- if eq .name "headgroup" }}{{ fail "ray.workerGroups: KubeRay calls the head's group \"headgroup\", give yours another name" }}{{ end -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "ray.workerGroups %q: minReplicas %d exceeds maxReplicas %d" .name (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- include "shoal.validateVolumes" (list . "ray.head" .Values.ray.head) -}}
{{- include "shoal.validateRayStartParams" (list . "ray.head" .Values.ray.head) -}}
{{- range .Values.ray.workerGroups -}}
{{- $path := printf "ray.workerGroups %q" .name -}}
{{- include "shoal.validateVolumes" (list $root $path .) -}}
{{- include "shoal.validateRayStartParams" (list $root $path .) -}}
{{- end -}}
{{- $mostCpus := 0 -}}
{{- $mostPods := include "shoal.mostWorkerPods" . | int -}}
{{- range $groups -}}
{{- $mostCpus = max $mostCpus (include "shoal.wholeCpus" .resources.limits.cpu | int) | int -}}
{{- end -}}
{{- if gt (float64 .Values.router.cpus) (float64 $mostCpus) -}}
{{- fail (printf "router.cpus %v is more than a Pod of any worker group has (%d): lower it, or raise a group's resources.limits.cpu" .Values.router.cpus $mostCpus) -}}
{{- end -}}
{{- /* One that may be the only one is not kept (pdb.yaml): to ask for it is the default. */}}
{{- if and .Values.pdb.enabled (ge (int .Values.pdb.minAvailable) $mostPods) (gt (int .Values.pdb.minAvailable) 1) -}}
{{- fail (printf "pdb.minAvailable %d would let no node be emptied, ever: there are at most %d workers' Pods" (int .Values.pdb.minAvailable) $mostPods) -}}
{{- end -}}
{{- $applications := dict -}}
{{- $ranks := dict -}}
{{- range .Values.models -}}
{{- $application := include "shoal.applicationName" .name -}}
{{- if hasKey $applications $application }}{{ fail (printf "models: two are called %q, give each its own name" .name) }}{{ end -}}
{{- $_ := set $applications $application true -}}
{{- $model := . -}}
{{- if .autoscaling -}}
{{- $first := int (dig "replicas" 1 .) -}}
{{- if or (gt (int (dig "minReplicas" 1 .autoscaling)) $first) (gt $first (int .autoscaling.maxReplicas)) -}}
{{- fail (printf "models %q: replicas %d is not between autoscaling.minReplicas %d and maxReplicas %d" .name $first (int (dig "minReplicas" 1 .autoscaling)) (int .autoscaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- $own := dict "tensor_parallel_size" "tensorParallelSize" "max_model_len" "maxModelLen" "dtype" "dtype" "load_format" "loadFormat" "replicas" "replicas" "model" "source" "served_model_name" "name" "device" "gpus of the worker group" -}}
{{- range $arg, $_ := .engineArgs -}}
{{- if hasKey $own $arg -}}
{{- fail (printf "models %q: engineArgs.%s has a value of its own, use %s" $model.name $arg (get $own $arg)) -}}
{{- end -}}
{{- end -}}
{{- if and (not .autoscaling) (eq (int (dig "replicas" 1 .)) 0) -}}
{{- fail (printf "models %q: replicas 0 without autoscaling serves nobody: give at least 1, or autoscaling with minReplicas 0" .name) -}}
{{- end -}}
{{- if and (dig "engineArgs" "deterministic" false .) (gt (int (default 1 .tensorParallelSize)) 2) -}}
{{- fail (printf "models %q: engineArgs.deterministic does not cover tensorParallelSize %d: 2 is the most" .name (int .tensorParallelSize)) -}}
{{- end -}}
{{- $group := include "shoal.groupOf" (list $groups .) | fromYaml -}}
{{- if not $group.name -}}
{{- fail (printf "models %q: workerGroup %q is none of ray.workerGroups (%s)" .name .workerGroup (keys $seen | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $size := int (default 1 .tensorParallelSize) -}}
{{- $perNode := int $group.ranksPerNode -}}
{{- $room := mul $perNode (int $group.numOfHosts) | int -}}
{{- if gt $size $room -}}
{{- fail (printf "models %q: tensorParallelSize %d needs more than worker group %q has (%d a host, %d hosts): raise gpus or numOfHosts" .name $size $group.name $perNode (int $group.numOfHosts)) -}}
{{- end -}}
{{- if and (gt $size $perNode) (ne (mod $size $perNode | int) 0) -}}
{{- fail (printf "models %q: tensorParallelSize %d is no multiple of the %d that a host of worker group %q holds" .name $size $perNode $group.name) -}}
{{- end -}}
{{- /* A replica that fits a host stays on one, so what is left of a host is lost to it. */}}
{{- $mostOfHosts := ternary (mul (div $perNode $size) (int $group.numOfHosts)) (div $room $size) (le $size $perNode) | int -}}
{{- $mostOfGroup := mul $mostOfHosts (int $group.mostReplicas) | int -}}
{{- $bound := ternary "maxReplicas" "minReplicas (ray.autoscaler.enabled is false)" $root.Values.ray.autoscaler.enabled -}}
{{- $kind := ternary "GPUs" "CPUs" (gt (int $group.gpus) 0) -}}
{{- $first := int (dig "replicas" 1 .) -}}
{{- if gt $first $mostOfGroup -}}
{{- fail (printf "models %q: replicas %d is more than worker group %q has %s for (%d): raise its %s, or lower this" .name $first $group.name $kind $mostOfGroup $bound) -}}
{{- end -}}
{{- if and .autoscaling (gt (int .autoscaling.maxReplicas) $mostOfGroup) -}}
{{- fail (printf "models %q: autoscaling.maxReplicas %d is more than worker group %q has %s for (%d): raise its %s, or lower this" .name (int .autoscaling.maxReplicas) $group.name $kind $mostOfGroup $bound) -}}
{{- end -}}
{{- $_ := set $ranks $group.name (add (mul $first $size) (get $ranks $group.name | int)) -}}
{{- if and $root.Values.hf.offline (not (hasPrefix "/" (default "" .source))) (not $root.Values.modelCache.enabled) -}}
{{- fail (printf "models %q: hf.offline is on and %q is no path: give a path, or enable modelCache with a claim that holds it" .name (default "" .source)) -}}
{{- end -}}
{{- end -}}
{{- range $groups -}}
{{- $room := mul (int .ranksPerNode) (int .numOfHosts) (int .mostReplicas) | int -}}
{{- if gt (get $ranks .name | int) $room -}}
{{- fail (printf "ray.workerGroups %q: its models need %d %s for their replicas, it has %d: raise %s, or give some another workerGroup" .name (get $ranks .name | int) (ternary "GPUs" "CPUs" (gt (int .gpus) 0)) $room (ternary "maxReplicas" "minReplicas (ray.autoscaler.enabled is false)" $root.Values.ray.autoscaler.enabled)) -}}
{{- end -}}
{{- end -}}
{{- include "shoal.validatePorts" . -}}
{{- if .Values.modelCache.enabled -}}
{{- include "shoal.validateMountPath" (list "modelCache.mountPath" .Values.modelCache.mountPath) -}}
{{- end -}}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) -}}
{{- fail "serviceAccount.create is false and serviceAccount.name is empty: name the account that workers shall have, such as default" -}}
{{- end -}}
{{- if and .Values.ingress.enabled .Values.ingress.tls (not .Values.ingress.host) -}}
{{- fail "ingress.tls without ingress.host would serve no host by TLS: set ingress.host" -}}
{{- end -}}
{{- if and .Values.ingress.enabled .Values.ingress.host -}}
{{- $wild := printf "*.%s" (regexReplaceAll "^[^.]+[.]" .Values.ingress.host "") -}}
{{- range .Values.ingress.tls -}}
{{- range .hosts -}}
{{- if not (has . (list $root.Values.ingress.host $wild)) -}}
{{- fail (printf "ingress.tls: host %q is not the one that is served, %q: name that, or leave hosts out" . $root.Values.ingress.host) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (include "shoal.isExposed" .) (not .Values.auth.apiKeys.existingSecret) (not .Values.auth.allowAnonymous) -}}
{{- fail "the endpoint is exposed (service.type, ingress or httpRoute) and has no keys: set auth.apiKeys.existingSecret, or auth.allowAnonymous=true if anybody may use it" -}}
{{- end -}}
{{- if eq .Values.ray.upgrade.type "NewClusterWithIncrementalUpgrade" -}}
{{- if or .Values.ingress.enabled .Values.httpRoute.enabled -}}
{{- fail "ray.upgrade.type NewClusterWithIncrementalUpgrade brings a Gateway and an HTTPRoute of the operator's own: set ingress.enabled and httpRoute.enabled to false" -}}
{{- end -}}
{{- if ne .Values.service.type "ClusterIP" -}}
{{- fail (printf "ray.upgrade.type NewClusterWithIncrementalUpgrade ignores service.type %s: set it to ClusterIP" .Values.service.type) -}}
{{- end -}}
{{- if not .Values.ray.upgrade.incremental.gatewayClassName -}}
{{- fail "ray.upgrade.type NewClusterWithIncrementalUpgrade needs ray.upgrade.incremental.gatewayClassName" -}}
{{- end -}}
{{- if not .Values.ray.autoscaler.enabled -}}
{{- fail "ray.upgrade.type NewClusterWithIncrementalUpgrade needs ray.autoscaler.enabled" -}}
{{- end -}}
{{- if gt (int .Values.ray.upgrade.incremental.stepSizePercent) (int .Values.ray.upgrade.incremental.maxSurgePercent) -}}
{{- fail (printf "ray.upgrade.incremental: stepSizePercent %d exceeds maxSurgePercent %d" (int .Values.ray.upgrade.incremental.stepSizePercent) (int .Values.ray.upgrade.incremental.maxSurgePercent)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs: the Gateway that it belongs to" -}}
{{- end -}}
{{- with .Values.ray.gcsFaultTolerance -}}
{{- if and .enabled (eq .backend "redis") (not .redis.address) -}}
{{- fail "ray.gcsFaultTolerance with redis needs ray.gcsFaultTolerance.redis.address (host:port)" -}}
{{- end -}}
{{- if and .enabled (eq .backend "rocksdb") (not .storage) -}}
{{- fail "ray.gcsFaultTolerance with rocksdb needs ray.gcsFaultTolerance.storage (claimName or size)" -}}
{{- end -}}
{{- end -}}
{{- end -}}
