{{/* What all pods have in common: nothing of it can be weakened by values. */}}

{{- define "loraplex.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "loraplex.podSecurity" -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- with .Values.security.runAsUser }}
runAsUser: {{ int64 . }}
{{- end }}
{{- with .Values.security.runAsGroup }}
runAsGroup: {{ int64 . }}
{{- end }}
{{- with .Values.security.fsGroup }}
fsGroup: {{ int64 . }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
{{- end -}}

{{/* The head of a pod's spec. Takes root, component, pool, options; `account` names another service account. */}}
{{- define "loraplex.podHead" -}}
automountServiceAccountToken: false
enableServiceLinks: false
serviceAccountName: {{ if .account }}{{ .account }}{{ else }}{{ include "loraplex.serviceAccount" . }}{{ end }}
securityContext:
  {{- include "loraplex.podSecurity" .root | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .options.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .options.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .options.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .options.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Pods of one component spread over nodes and zones. Takes root, component, pool, options. */}}
{{- define "loraplex.spread" -}}
{{- if .options.topologySpread }}
topologySpreadConstraints:
  {{- range .options.topologySpread }}
  - maxSkew: {{ int .maxSkew }}
    topologyKey: {{ .topologyKey }}
    whenUnsatisfiable: {{ .whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "loraplex.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Labels and annotations of a pod; no versions among them, which would restart it for nothing. Takes root, component, pool, options. */}}
{{- define "loraplex.podMetadata" -}}
labels:
  {{- include "loraplex.selector" . | nindent 2 }}
  {{- with merge (dict) .options.podLabels .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) .options.podAnnotations .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Variables of every container, then the operator's own, which cannot be LORAPLEX_*. Takes options. */}}
{{- define "loraplex.commonEnv" -}}
- name: HOME
  value: /tmp
- name: TMPDIR
  value: /tmp
{{- with .options.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "loraplex.tmpVolume" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .options.tmpSizeLimit }}
{{- end -}}

{{- define "loraplex.probe" -}}
httpGet: {path: {{ .path }}, port: http}
periodSeconds: {{ .period }}
timeoutSeconds: {{ default 5 .timeout }}
failureThreshold: {{ .failures }}
{{- end -}}

{{/* The volume of bases, adapters and compiled code of an engine's pod, unless it is a claim template. Takes cache. */}}
{{- define "loraplex.cacheVolume" -}}
{{- if eq .kind "emptyDir" }}
- name: cache
  emptyDir:
    sizeLimit: {{ .size }}
{{- else if eq .kind "existingClaim" }}
- name: cache
  persistentVolumeClaim:
    claimName: {{ required "cache.existingClaim names the claim for cache.kind existingClaim" .existingClaim }}
{{- end }}
{{- end -}}
