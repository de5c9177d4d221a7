{{/* Names. */}}
{{- define "poolgrid.fullname" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "poolgrid.pool" -}}
{{- .Values.pool.name | default .Release.Name -}}
{{- end -}}

{{/* The pool as names and NATS know it: a part of a name, or of a subject. */}}
{{- define "poolgrid.namespace" -}}
{{- $namespace := .Values.names.namespace | default (include "poolgrid.pool" .) -}}
{{- if not (regexMatch "^[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?$" $namespace) -}}
{{- fail (printf "the pool is called %s among names, which is no part of one: give names.namespace, letters, digits, - and _" $namespace) -}}
{{- end -}}
{{- $namespace -}}
{{- end -}}

{{/* Whether anything is kept on NATS; refuses values that fit together in no way. */}}
{{- define "poolgrid.onNats" -}}
{{- $journal := and .Values.pool.enabled (eq .Values.eventPlane "nats") -}}
{{- if or $journal (eq .Values.names.kind "nats") -}}
{{- if not .Values.nats.urls -}}
{{- fail "eventPlane or names.kind is nats: give nats.urls" -}}
{{- end -}}
yes
{{- else if .Values.nats.urls -}}
{{- fail "nats.urls are given and nothing is kept on NATS: set eventPlane or names.kind to nats" -}}
{{- end -}}
{{- end -}}

{{/* How a process of the pool reaches its journal on NATS, and any process its names; takes root, and of the pool. */}}
{{- define "poolgrid.nats.arguments" -}}
{{- with .root.Values }}
{{- $journal := and $.ofPool (eq .eventPlane "nats") }}
{{- if $journal }}
- --event-plane=nats
- --nats-pool={{ include "poolgrid.namespace" $.root }}
{{- end }}
{{- if and (include "poolgrid.onNats" $.root) (or $journal (eq .names.kind "nats")) }}
{{- range .nats.urls }}
- {{ printf "--nats-url=%s" . | quote }}
{{- end }}
{{- if .nats.credentialsSecret }}
- --nats-credentials=/etc/poolgrid/nats/nats.creds
{{- end }}
{{- if .nats.caSecret }}
- --nats-tls-ca=/etc/poolgrid/nats-ca/ca.crt
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "poolgrid.nats.mounts" -}}
{{- if include "poolgrid.onNats" . }}
{{- with .Values.nats }}
{{- if .credentialsSecret }}
- {name: nats, mountPath: /etc/poolgrid/nats, readOnly: true}
{{- end }}
{{- if .caSecret }}
- {name: nats-ca, mountPath: /etc/poolgrid/nats-ca, readOnly: true}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "poolgrid.nats.volumes" -}}
{{- if include "poolgrid.onNats" . }}
{{- with .Values.nats }}
{{- if .credentialsSecret }}
- {name: nats, secret: {secretName: {{ .credentialsSecret }}, defaultMode: 288}}
{{- end }}
{{- if .caSecret }}
- {name: nats-ca, secret: {secretName: {{ .caSecret }}, defaultMode: 288}}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Under which name a process registers; takes root and, of one that says where it is by itself, advertised. */}}
{{- define "poolgrid.names.arguments" -}}
{{- with .root.Values }}
{{- if eq .names.kind "nats" }}
- --names=nats
- --namespace={{ include "poolgrid.namespace" $.root }}
- --nats-replicas={{ int .nats.replicas }}
{{- if not $.advertised }}
- --advertise-host=$(POD_IP)
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* How a process reads names from the cluster. */}}
{{- define "poolgrid.names.reading" -}}
{{- if eq .Values.names.kind "kubernetes" }}
- --names=kubernetes
- --namespace={{ include "poolgrid.namespace" . }}
{{- if .Values.names.kubernetesNamespaces }}
{{- range concat (list .Release.Namespace) .Values.names.kubernetesNamespaces | uniq }}
- --kubernetes-namespace={{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The account that may read names; other pods have none. */}}
{{- define "poolgrid.account" -}}
{{- if eq .Values.names.kind "kubernetes" -}}
serviceAccountName: {{ include "poolgrid.fullname" . }}-names
automountServiceAccountToken: true
{{- else -}}
automountServiceAccountToken: false
{{- end -}}
{{- end -}}

{{/* A Service that gives pods a name; takes root, component, group, named (as processes call it), http and ports. */}}
{{- define "poolgrid.names.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "poolgrid.fullname" .root }}-{{ .group | default .component }}-names
  labels:
    {{- include "poolgrid.labels" . | nindent 4 }}
    poolgrid/namespace: {{ include "poolgrid.namespace" .root }}
    poolgrid/component: {{ .named }}
spec:
  clusterIP: None
  {{- if .unready }}
  # Pods that are not ready have an address too: they report what is missing.
  publishNotReadyAddresses: true
  {{- end }}
  selector: {{- include "poolgrid.selector" . | nindent 4 }}
  ports:
    - {name: http, port: {{ .http }}, targetPort: metrics, appProtocol: {{ empty .root.Values.security.tlsSecret | ternary "http" "https" }}}
    {{- range $name, $port := .ports }}
    - {name: {{ $name }}, port: {{ $port.number }}, targetPort: {{ $port.target }}}
    {{- end }}
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

{{/* The container that fetches the model unless it is there; of several that want a file one does, and the others wait. */}}
{{- define "poolgrid.model.fetch" -}}
{{- $cache := .Values.model.cache -}}
{{- $source := splitn "@" 2 $cache.source -}}
- name: model
  {{- include "poolgrid.image" (dict "root" . "image" .Values.image.router) | nindent 2 }}
  command: [hf, download]
  args:
    - {{ $source._0 | quote }}
    {{- with $source._1 }}
    - {{ printf "--revision=%s" . | quote }}
    {{- end }}
    - {{ printf "--local-dir=/models/%s" $cache.name | quote }}
    {{- range $cache.exclude }}
    - {{ printf "--exclude=%s" . | quote }}
    {{- end }}
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
