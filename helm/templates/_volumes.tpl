{{/* Volumes and mounts of one's own beside those of the chart (_pod.tpl). Takes a list: root, path, values of the head or a group. */}}
{{- define "shoal.validateVolumes" -}}
{{- $root := index . 0 -}}
{{- $path := index . 1 -}}
{{- $group := index . 2 -}}
{{- $taken := dict "tmp" "the chart" "models" "the chart" "hf-token" "the chart" "shared-memory" "the chart" "api-keys" "the chart" -}}
{{- $volumes := list "tmp" "shared-memory" -}}
{{- $mounted := dict "/tmp" "the chart" "/dev/shm" "the chart" -}}
{{- if $root.Values.modelCache.enabled -}}
{{- $volumes = append $volumes "models" -}}
{{- $_ := set $mounted (clean $root.Values.modelCache.mountPath) "modelCache.mountPath" -}}
{{- end -}}
{{- if $root.Values.hf.existingSecret -}}
{{- $volumes = append $volumes "hf-token" -}}
{{- $_ := set $mounted "/etc/shoal/hf" "the chart" -}}
{{- end -}}
{{- if $root.Values.auth.apiKeys.existingSecret -}}
{{- $volumes = append $volumes "api-keys" -}}
{{- $_ := set $mounted "/etc/shoal/keys" "the chart" -}}
{{- end -}}
{{- range $volume := $group.extraVolumes -}}
{{- with get $taken (toString $volume.name) -}}
{{- fail (printf "%s: extraVolumes has %q, a name that %s has given: choose another" $path $volume.name .) -}}
{{- end -}}
{{- $_ := set $taken (toString $volume.name) "another of them" -}}
{{- $volumes = append $volumes (toString $volume.name) -}}
{{- end -}}
{{- range $mount := $group.extraVolumeMounts -}}
{{- $at := printf "%s: extraVolumeMounts" $path -}}
{{- if not (has (toString $mount.name) $volumes) -}}
{{- fail (printf "%s has %q, which is no volume of the Pod (%s): add it to extraVolumes" $at $mount.name ($volumes | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $place := clean (toString $mount.mountPath) -}}
{{- with get $mounted $place -}}
{{- fail (printf "%s: %s is mounted by %s already: choose another path" $at $place .) -}}
{{- end -}}
{{- include "shoal.validateMountPath" (list $at $place) -}}
{{- range $other, $owner := $mounted -}}
{{- if and (ne $owner "another of them") (hasPrefix (printf "%s/" $place) $other) -}}
{{- fail (printf "%s: %s would hide %s of %s: choose another path" $at $place $other $owner) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $mounted $place "another of them" -}}
{{- end -}}
{{- end -}}

{{/* A volume there would hide what the image needs, or what the kernel and Kubernetes put there. Takes a list: what it is of, the path. */}}
{{- define "shoal.validateMountPath" -}}
{{- $of := index . 0 -}}
{{- $place := clean (index . 1) -}}
{{- range $hidden := list "/tmp" "/dev" "/etc" "/proc" "/sys" "/usr" "/bin" "/sbin" "/lib" "/lib64" "/opt/shoal" "/var/run" "/run" -}}
{{- $isBelow := hasPrefix (printf "%s/" $hidden) $place -}}
{{- if or (eq $place "/") (eq $place $hidden) (hasPrefix (printf "%s/" $place) $hidden) (and $isBelow (eq $of "modelCache.mountPath")) -}}
{{- fail (printf "%s: %s lies in or over %s, which Pods need for other things: choose another, such as /models" $of $place $hidden) -}}
{{- end -}}
{{- end -}}
{{- end -}}
