{{- define "tunewright.name" -}}
{{- if contains "tunewright" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-tunewright" (.Release.Name | trunc 29 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "tunewright.selector" -}}
app.kubernetes.io/name: {{ include "tunewright.name" . }}
{{- end }}

{{- define "tunewright.labels" -}}
{{ include "tunewright.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "tunewright.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "tunewright.subjects" -}}
subjects:
  - kind: ServiceAccount
    name: {{ include "tunewright.name" . }}
    namespace: {{ .Release.Namespace }}
{{- end }}
