{{/* Names, labels, images: what each object of the chart is called. */}}

{{- define "loraplex.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 32 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Name of a component's objects. Takes root, component, pool. */}}
{{- define "loraplex.name" -}}
{{- $name := printf "%s-%s" (include "loraplex.fullname" .root) .component -}}
{{- if .pool }}{{- $name = printf "%s-%s" $name .pool -}}{{- end -}}
{{- if gt (len $name) 52 -}}
{{- fail (printf "the name %q has %d characters; 52 are the most that a StatefulSet's pods leave room for: set fullnameOverride, or give the pool a shorter name" $name (len $name)) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* What selects the pods of a component. Takes root, component, pool. */}}
{{- define "loraplex.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
loraplex.io/pool: {{ . }}
{{- end }}
{{- end -}}

{{/* Labels of an object. Takes root, component, pool, labels. */}}
{{- define "loraplex.labels" -}}
{{- $own := include "loraplex.selector" . | fromYaml -}}
{{- $own = merge $own (dict
  "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_")
  "app.kubernetes.io/version" .root.Chart.AppVersion
  "app.kubernetes.io/managed-by" .root.Release.Service
  "app.kubernetes.io/part-of" "loraplex") -}}
{{- toYaml (merge $own (default (dict) .labels) .root.Values.commonLabels) -}}
{{- end -}}

{{/* Name, namespace, labels and annotations. Takes root, component, pool, suffix, labels, annotations. */}}
{{- define "loraplex.metadata" -}}
name: {{ include "loraplex.name" . }}{{ with .suffix }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "loraplex.labels" . | nindent 2 }}
{{- with merge (dict) (default (dict) .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* An image by digest, else by tag. Takes root, image. */}}
{{- define "loraplex.image" -}}
{{- $repository := .image.repository -}}
{{- with .root.Values.image.registry }}{{- $repository = printf "%s/%s" . $repository -}}{{- end -}}
{{- if .image.digest -}}
{{ printf "%s@%s" $repository .image.digest }}
{{- else -}}
{{ printf "%s:%s" $repository (default .root.Chart.AppVersion .image.tag) }}
{{- end -}}
{{- end -}}

{{/* Name of a component's service account. Takes root, component, options. */}}
{{- define "loraplex.serviceAccount" -}}
{{- $account := .options.serviceAccount -}}
{{- if $account.create -}}
{{ default (include "loraplex.name" (dict "root" .root "component" .component)) $account.name }}
{{- else -}}
{{ default "default" $account.name }}
{{- end -}}
{{- end -}}

{{/* Address of the gateway, and of where engines read adapters. */}}
{{- define "loraplex.gatewayUrl" -}}
http://{{ include "loraplex.name" (dict "root" . "component" "gateway") }}.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:{{ .Values.gateway.service.port }}
{{- end -}}

{{- define "loraplex.registryUrl" -}}
{{- if .Values.registry.enabled -}}
http://{{ include "loraplex.name" (dict "root" . "component" "registry") }}.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:{{ .Values.registry.service.port }}
{{- else -}}
{{ include "loraplex.gatewayUrl" . }}
{{- end -}}
{{- end -}}
