{{/* Names. */}}
{{- define "poolgrid.fullname" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "poolgrid.pool" -}}
{{- .Values.pool.name | default .Release.Name -}}
{{- end -}}

{{/* What selects the pods of a component; takes a dict of root, component and, for workers, group. */}}
{{- define "poolgrid.selector" -}}
app.kubernetes.io/name: poolgrid
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .group }}
poolgrid/group: {{ . }}
{{- end }}
{{- end -}}

{{/* All labels of a component. */}}
{{- define "poolgrid.labels" -}}
{{ include "poolgrid.selector" . }}
{{- if ne .component "global-router" }}
poolgrid/pool: {{ include "poolgrid.pool" .root }}
{{- end }}
{{- end -}}

{{/* A value of an option as text: whole numbers without exponent. */}}
{{- define "poolgrid.text" -}}
{{- if kindIs "float64" . -}}
{{- if eq (float64 (int64 .)) . }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}

{{/* Options as arguments: true is --name, false --no-name, a list says it several times. */}}
{{- define "poolgrid.options" -}}
{{- range $name := keys . | sortAlpha }}
{{- $value := index $ $name }}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $name }}
{{- else }}
{{- range (ternary $value (list $value) (kindIs "slice" $value)) }}
- {{ printf "--%s=%s" $name (include "poolgrid.text" .) | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "poolgrid.security.arguments" -}}
{{- with .Values.security }}
{{- if .tlsSecret }}
- --tls-certificate=/etc/poolgrid/tls/tls.crt
- --tls-key=/etc/poolgrid/tls/tls.key
{{- end }}
{{- if .curveSecret }}
- --curve-key=/etc/poolgrid/curve/curve.key_secret
{{- end }}
{{- end }}
{{- end -}}

{{- define "poolgrid.security.mounts" -}}
{{- with .Values.security }}
{{- if .tlsSecret }}
- {name: tls, mountPath: /etc/poolgrid/tls, readOnly: true}
{{- end }}
{{- if .curveSecret }}
- {name: curve, mountPath: /etc/poolgrid/curve, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{- define "poolgrid.security.volumes" -}}
{{- with .Values.security }}
{{- if .tlsSecret }}
- {name: tls, secret: {secretName: {{ .tlsSecret }}, defaultMode: 288}}
{{- end }}
{{- if .curveSecret }}
- {name: curve, secret: {secretName: {{ .curveSecret }}, defaultMode: 288}}
{{- end }}
{{- end }}
{{- end -}}

{{/* A probe of the HTTP that every process has. */}}
{{- define "poolgrid.probe" -}}
httpGet: {path: {{ .path | quote }}, port: metrics, scheme: {{ empty .root.Values.security.tlsSecret | ternary "HTTP" "HTTPS" }}}
periodSeconds: {{ .period }}
timeoutSeconds: 3
failureThreshold: {{ .failures }}
{{- end -}}

{{- define "poolgrid.environment" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: HOME, value: /tmp}
{{- end -}}

{{/* What all pods have. Without enableServiceLinks: false a service called poolgrid would be read as options. */}}
{{- define "poolgrid.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "poolgrid.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "poolgrid.image" -}}
image: {{ printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) | quote }}
imagePullPolicy: {{ .image.pullPolicy | default "IfNotPresent" }}
{{- end -}}

{{/* Where pods go: different nodes and zones, unless the values say otherwise. */}}
{{- define "poolgrid.placement" -}}
{{- with .component.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .component.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .component.affinity }}
affinity: {{- toYaml .component.affinity | nindent 2 }}
{{- else if .apart }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- .selector | nindent 14 }}
{{- end }}
{{- if .component.topologySpread }}
topologySpreadConstraints: {{- toYaml .component.topologySpread | nindent 2 }}
{{- else if .spread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- .selector | nindent 8 }}
{{- end }}
{{- end -}}

{{/* Global routers are other releases, perhaps in another namespace: they are known by their label. */}}
{{- define "poolgrid.globalRouters" -}}
namespaceSelector: {}
podSelector:
  matchLabels: {app.kubernetes.io/name: poolgrid, app.kubernetes.io/component: global-router}
{{- end -}}

{{- define "poolgrid.from" -}}
{{- with . }}
from: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "poolgrid.scaling" -}}
# Up by half at once, because a model takes minutes to load; down by one after a calm time, so that caches stay warm.
scaleUp:
  stabilizationWindowSeconds: 0
  policies: [{type: Percent, value: 50, periodSeconds: 60}, {type: Pods, value: 1, periodSeconds: 60}]
scaleDown:
  stabilizationWindowSeconds: {{ .autoscaling.cooldownSeconds }}
  policies: [{type: Pods, value: 1, periodSeconds: 60}]
{{- end }}

{{/* Where models are, as pods mount them: the volume of the values, or one that the release makes. */}}
{{- define "poolgrid.model.volume" -}}
{{- if .Values.model.cache.kind -}}
persistentVolumeClaim: {claimName: {{ include "poolgrid.fullname" . }}-models}
{{- else if .Values.model.volume -}}
{{- toYaml .Values.model.volume -}}
{{- end -}}
{{- end -}}

{{- define "poolgrid.model.path" -}}
{{- if .Values.model.path -}}
{{- .Values.model.path -}}
{{- else if eq .Values.model.cache.kind "pvc" -}}
/models/{{ .Values.model.cache.name }}
{{- end -}}
{{- end -}}

{{/* The container that fetches the model unless it is there; of several that want it one does, and the others wait. */}}
{{- define "poolgrid.model.fetch" -}}
{{- $cache := .Values.model.cache -}}
- name: model
  {{- include "poolgrid.image" (dict "root" . "image" .Values.image.router) | nindent 2 }}
  args:
    - model
    - fetch
    - {{ $cache.source | quote }}
    - --cache-dir=/models
    - {{ printf "--name=%s" $cache.name | quote }}
    {{- range $cache.exclude }}
    - {{ printf "--exclude=%s" . | quote }}
    {{- end }}
    - --wait-s={{ int $cache.fetchSeconds }}
  env:
    - {name: HOME, value: /tmp}
    {{- with $cache.hubEndpoint }}
    - {name: HF_ENDPOINT, value: {{ . | quote }}}
    {{- end }}
    {{- with $cache.hubTokenSecret }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
    {{- end }}
  resources: {{- toYaml $cache.resources | nindent 4 }}
  {{- include "poolgrid.containerSecurity" . | nindent 2 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: models, mountPath: /models}
{{- end -}}

{{/* Before the process that reads the model, whose startup probe begins after it. */}}
{{- define "poolgrid.model.init" -}}
{{- if eq .Values.model.cache.kind "pvc" -}}
initContainers:
  {{- include "poolgrid.model.fetch" . | nindent 2 }}
{{- end -}}
{{- end }}
