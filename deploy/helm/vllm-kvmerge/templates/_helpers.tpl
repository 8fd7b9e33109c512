{{- define "kvmerge.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "kvmerge.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvmerge.labels" -}}
{{ include "kvmerge.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* The secret that holds the API key; a release without one is refused. */}}
{{- define "kvmerge.apiKeySecret" -}}
{{- if .Values.apiKey.existingSecret }}{{ .Values.apiKey.existingSecret }}
{{- else if .Values.apiKey.value }}{{ include "kvmerge.name" . }}
{{- else }}{{ fail "an API key is required: set apiKey.existingSecret to a secret that holds one (kubectl create secret generic NAME --from-literal=api-key=KEY), or apiKey.value" }}
{{- end }}
{{- end }}

{{- define "kvmerge.hubTokenSecret" -}}
{{- if .Values.hubToken.existingSecret }}{{ .Values.hubToken.existingSecret }}
{{- else if .Values.hubToken.value }}{{ include "kvmerge.name" . }}
{{- end }}
{{- end }}

{{- /* "true" where pods on several nodes can mount the models at a time. */}}
{{- define "kvmerge.sharesModels" -}}
{{- if or (not .Values.modelCache.enabled) (has "ReadWriteMany" .Values.modelCache.accessModes) }}true{{ end }}
{{- end }}

{{- define "kvmerge.check" -}}
{{- $several := or (gt (int .Values.replicas) 1) (and .Values.autoscaling.enabled (gt (int .Values.autoscaling.maxReplicas) 1)) }}
{{- if and $several (not (include "kvmerge.sharesModels" .)) }}
{{- fail "more than one replica needs modelCache.accessModes [ReadWriteMany], or modelCache.enabled false" }}
{{- end }}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) }}
{{- fail "autoscaling.minReplicas must not exceed autoscaling.maxReplicas" }}
{{- end }}
{{- end }}
