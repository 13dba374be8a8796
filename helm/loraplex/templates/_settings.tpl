{{/* LORAPLEX_* variables: made of typed values alone, so that no name can be mistyped. */}}

{{/* A value as a setting's text. */}}
{{- define "loraplex.text" -}}
{{- if kindIs "bool" . -}}
{{ ternary "1" "0" . }}
{{- else if kindIs "float64" . -}}
{{- if eq . (floor .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}

{{/* A map of settings, its keys in camelCase; those of the engine's flags get their prefix. Takes config, isEngine. */}}
{{- define "loraplex.settings" -}}
{{- $shared := list "logLevel" "logFormat" "native" -}}
{{- range $key := keys .config | sortAlpha }}
{{- $value := index $.config $key }}
{{- if not (kindIs "invalid" $value) }}
{{- $prefix := ternary "LORAPLEX_ENGINE_" "LORAPLEX_" (and (default false $.isEngine) (not (has $key $shared))) }}
- name: {{ $prefix }}{{ $key | snakecase | upper }}
  value: {{ include "loraplex.text" $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Secrets as files, by reference. Takes secrets: names among .Values.secrets, or NAME=SETTING. */}}
{{- define "loraplex.secretSettings" -}}
{{- range .secrets }}
{{- $setting := splitList "=" . | last | snakecase | upper }}
- name: LORAPLEX_{{ $setting }}_FILE
  value: /etc/loraplex/secrets/{{ $setting }}
{{- end }}
{{- end -}}

{{/* Takes root, secrets. */}}
{{- define "loraplex.secretVolume" -}}
- name: secrets
  projected:
    defaultMode: 0440
    sources:
      {{- range .secrets }}
      {{- $words := splitList "=" . }}
      {{- $secret := index $.root.Values.secrets (first $words) }}
      - secret:
          name: {{ default $.root.Values.secrets.name $secret.name }}
          items:
            - key: {{ $secret.key }}
              path: {{ last $words | snakecase | upper }}
      {{- end }}
{{- end -}}

{{- define "loraplex.secretMount" -}}
- name: secrets
  mountPath: /etc/loraplex/secrets
  readOnly: true
{{- end -}}

{{/* Credentials for the bucket, as boto3 reads them. */}}
{{- define "loraplex.objectStoreSettings" -}}
- name: LORAPLEX_OBJECT_STORE_URL
  value: {{ required "objectStore.url is the bucket that holds adapters: s3://BUCKET/PREFIX?endpoint=...&region=..." .Values.objectStore.url | quote }}
{{- with .Values.objectStore.publicUrl }}
- name: LORAPLEX_OBJECT_STORE_PUBLIC_URL
  value: {{ . | quote }}
{{- end }}
{{- with .Values.objectStore.credentials }}
{{- if .name }}
- name: AWS_ACCESS_KEY_ID
  valueFrom:
    secretKeyRef: {name: {{ .name }}, key: {{ .accessKeyIdKey }}}
- name: AWS_SECRET_ACCESS_KEY
  valueFrom:
    secretKeyRef: {name: {{ .name }}, key: {{ .secretAccessKeyKey }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* What fetching weights needs: the hub's address and token. Its own cache lies beside the bases. */}}
{{- define "loraplex.hubSettings" -}}
- name: HF_HOME
  value: /var/cache/loraplex/huggingface
{{- with .Values.engine.weights.hubEndpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- with .Values.engine.weights.hubToken }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* LORAPLEX_POOLS: what the gateway is told of its engines. */}}
{{- define "loraplex.pools" -}}
{{- $pools := dict -}}
{{- range $name, $pool := .Values.engine.pools -}}
{{- $engines := $pool.engines -}}
{{- if not $engines -}}
{{- $host := include "loraplex.name" (dict "root" $ "component" "engine" "pool" $name) -}}
{{- $engines = list (printf "dns+http://%s.%s.svc.%s:8100" $host $.Release.Namespace $.Values.clusterDomain) -}}
{{- end -}}
{{- $entry := dict "engines" $engines -}}
{{- if $pool.model }}{{- $_ := set $entry "model" $pool.model.name -}}{{- else }}{{- $_ := set $entry "base" $pool.base.name -}}{{- end -}}
{{- with $pool.pin }}{{- $_ := set $entry "pin" . -}}{{- end -}}
{{- $_ := set $pools $name $entry -}}
{{- end -}}
{{ toJson $pools }}
{{- end -}}

{{/* One pool with what it takes over from .Values.engine, as YAML. Takes root, name. */}}
{{- define "loraplex.pool" -}}
{{- $defaults := deepCopy (omit .root.Values.engine "pools" "weights" "prometheus") -}}
{{- toYaml (mergeOverwrite $defaults (deepCopy (index .root.Values.engine.pools .name))) -}}
{{- end -}}
