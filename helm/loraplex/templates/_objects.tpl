{{/* Objects that several components have. */}}

{{/* Takes root, component, options. */}}
{{- define "loraplex.serviceAccountObject" -}}
{{- if .options.serviceAccount.create }}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "loraplex.serviceAccount" . }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "loraplex.labels" . | nindent 4 }}
  {{- with merge (dict) .options.serviceAccount.annotations .root.Values.commonAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}
{{- end -}}

{{/* Takes root, component, pool, options. */}}
{{- define "loraplex.disruptionBudget" -}}
{{- if .options.podDisruptionBudget.enabled }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "loraplex.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .options.podDisruptionBudget.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "loraplex.selector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{/* With which KEDA asks Prometheus, if that wants to know who asks. */}}
{{- define "loraplex.triggerAuthentication" -}}
{{- with .Values.engine.prometheus.authentication }}
{{- if .name }}
authenticationRef:
  name: {{ .name }}
  kind: {{ .kind }}
{{- end }}
{{- end }}
{{- end -}}
