{{- define "twofold.selector" -}}
app.kubernetes.io/name: twofold
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "twofold.labels" -}}
{{ include "twofold.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
