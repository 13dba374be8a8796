{{/* Pieces of NetworkPolicies. An empty list of peers is everybody; ports are always named. */}}

{{/* One rule. Takes direction (from, to), peers, ports (numbers), udp. */}}
{{- define "loraplex.networkRule" -}}
- ports:
    {{- range .ports }}
    - {protocol: TCP, port: {{ int . }}}
    {{- end }}
    {{- range .udp }}
    - {protocol: UDP, port: {{ int . }}}
    {{- end }}
  {{- with .peers }}
  {{ $.direction }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* The pods of components of this release as peers, as YAML. Takes root, components. */}}
{{- define "loraplex.peers" -}}
{{- range .components }}
- podSelector:
    matchLabels:
      {{- include "loraplex.selector" (dict "root" $.root "component" .) | nindent 6 }}
{{- end }}
{{- end -}}

{{/* A policy of one component. Takes root, component, ingress and egress (YAML), annotations. */}}
{{- define "loraplex.networkPolicy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "loraplex.metadata" . | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "loraplex.selector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
  {{- with .ingress }}
  ingress:
    {{- . | nindent 4 }}
  {{- end }}
  {{- with .egress }}
  egress:
    {{- . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* Rules for what lies outside of the chart. Takes root, names among networkPolicy.egress. */}}
{{- define "loraplex.egress" -}}
{{- range .names }}
{{- $there := index $.root.Values.networkPolicy.egress . }}
{{- $rule := dict "direction" "to" "peers" $there.to "ports" (list $there.port) }}
{{- if eq . "dns" }}{{- $_ := set $rule "udp" (list $there.port) }}{{- end }}
{{ include "loraplex.networkRule" $rule }}
{{- end }}
{{- end -}}
