{{/* The pod of a group of workers, or a further node of an engine that spans nodes; takes root, group and component. */}}
{{- define "poolgrid.worker.pod" -}}
{{- $root := .root }}
{{- $component := .component }}
{{- $isNode := eq $component "worker-node" }}
{{- with .group }}
{{- $spans := gt (int .nodes) 1 }}
{{- $selector := include "poolgrid.selector" (dict "root" $root "component" $component "group" .name) }}
{{- $name := printf "%s-%s" (include "poolgrid.fullname" $root) .name }}
{{- $image := .image | default (eq .engine "simulated" | ternary $root.Values.image.router $root.Values.image.worker) }}
metadata:
  labels: {{- include "poolgrid.labels" (dict "root" $root "component" $component "group" .name) | nindent 4 }}
  {{- if or .podAnnotations .engineArgs }}
  annotations:
    {{- with .podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- with .engineArgs }}
    # Another content makes other pods.
    poolgrid/engine-args: {{ toJson . | sha256sum | trunc 16 | quote }}
    {{- end }}
  {{- end }}
spec:
  {{- include "poolgrid.pod" $root | nindent 2 }}
  automountServiceAccountToken: false
  {{- with .runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- include "poolgrid.placement" (dict "component" . "selector" $selector "apart" false "spread" (not $spans)) | nindent 2 }}
  # The drain, and some seconds to hand over and deregister.
  terminationGracePeriodSeconds: {{ add (int .drainSeconds) 15 }}
  {{- with include "poolgrid.model.init" $root }}
  {{- . | nindent 2 }}
  {{- end }}
  containers:
    - name: {{ $component }}
      {{- include "poolgrid.image" (dict "root" $root "image" $image) | nindent 6 }}
      {{- if $spans }}
      command: [/bin/bash, /etc/poolgrid/engine/node.sh, {{ int .gpus | quote }}, {{ int .drainSeconds | quote }}]
      {{- end }}
      {{- if not $isNode }}
      args:
        {{- if $spans }}
        - poolgrid
        {{- end }}
        - worker
        - --engine={{ .engine }}
        - --worker-id=$(POD_NAME)
        {{- if eq .engine "trtllm" }}
        - --disaggregation-mode={{ eq .role "aggregated" | ternary "prefill_and_decode" .role }}
        {{- else }}
        - --role={{ .role }}
        {{- end }}
        {{- if eq .engine "simulated" }}
        - {{ printf "--served-model-name=%s" $root.Values.model.name | quote }}
        {{- with include "poolgrid.model.path" $root }}
        - {{ printf "--model-path=%s" . | quote }}
        {{- end }}
        {{- else }}
        {{- if and (eq .engine "trtllm") (include "poolgrid.model.path" $root) }}
        - {{ printf "--model-path=%s" (include "poolgrid.model.path" $root) | quote }}
        {{- end }}
        - {{ printf "--served-model-name=%s" $root.Values.model.name | quote }}
        {{- end }}
        {{- if eq $root.Values.eventPlane "zmq" }}
        - --consolidator=tcp://{{ include "poolgrid.fullname" $root }}-consolidator:5557
        {{- end }}
        - {{ printf "--host=%s" $root.Values.bindAddress | quote }}
        - --advertise-host=$(POD_IP)
        - --request-port=9001
        - --http-port=9000
        - --shutdown-timeout-ms={{ mul (int .drainSeconds) 1000 }}
        - {{ printf "--log-level=%s" $root.Values.log.level | quote }}
        - --log-format={{ $root.Values.log.format }}
        {{- include "poolgrid.security.arguments" $root | nindent 8 }}
        {{- include "poolgrid.nats.arguments" (dict "root" $root "ofPool" true) | nindent 8 }}
        {{- include "poolgrid.names.arguments" (dict "root" $root "advertised" true) | nindent 8 }}
        {{- if .engineArgs }}
        - --extra-engine-args=/etc/poolgrid/engine/engine.yaml
        {{- end }}
        {{- include "poolgrid.options" .options | nindent 8 }}
      {{- end }}
      env:
        {{- include "poolgrid.environment" $root | nindent 8 }}
        {{- with .env }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- if $isNode }}
      ports:
        - {name: ssh, containerPort: 2222}
      readinessProbe: {tcpSocket: {port: ssh}, periodSeconds: 5}
      lifecycle:
        # Requests that finish in the drain of the first pod need all ranks.
        preStop: {exec: {command: [sleep, {{ add (int .drainSeconds) 5 | quote }}]}}
      {{- else }}
      ports:
        - {name: metrics, containerPort: 9000}
        - {name: request, containerPort: 9001}
      # The engine has loaded its model. Registration with the pool does not count: a restart would load the model again.
      startupProbe: {{- include "poolgrid.probe" (dict "root" $root "path" "/started" "period" 5 "failures" (div (add (int .startupSeconds) 4) 5)) | nindent 8 }}
      # The engine is well; one that hangs may come to itself.
      livenessProbe: {{- include "poolgrid.probe" (dict "root" $root "path" "/health" "period" 10 "failures" (div (add (int .unhealthySeconds) 9) 10)) | nindent 8 }}
      readinessProbe: {{- include "poolgrid.probe" (dict "root" $root "path" (printf "/ready?role=%s" .role) "period" 5 "failures" 1) | nindent 8 }}
      lifecycle:
        # The drain is over before any process of the engine gets a signal.
        preStop:
          exec:
            command:
              - poolgrid
              - drain
              - --worker-url={{ empty $root.Values.security.tlsSecret | ternary "http" "https" }}://127.0.0.1:9000
              - --timeout-s={{ .drainSeconds }}
              - --wait-s={{ add (int .drainSeconds) 5 }}
      {{- end }}
      resources:
        {{- $resources := deepCopy .resources }}
        {{- if gt (int .gpus) 0 }}
        {{- $_ := set $resources "limits" (merge (dict .gpuResource (int .gpus)) ($resources.limits | default dict)) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      {{- include "poolgrid.containerSecurity" $root | nindent 6 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if .sharedMemory }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- end }}
        {{- if include "poolgrid.model.volume" $root }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if or .engineArgs $spans }}
        - {name: engine, mountPath: /etc/poolgrid/engine, readOnly: true}
        {{- end }}
        {{- if $spans }}
        - {name: ssh, mountPath: /etc/poolgrid/ssh, readOnly: true}
        {{- end }}
        {{- include "poolgrid.security.mounts" $root | nindent 8 }}
        {{- include "poolgrid.nats.mounts" $root | nindent 8 }}
  volumes:
    - {name: tmp, emptyDir: {}}
    {{- with .sharedMemory }}
    - {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: {{ . }}}}
    {{- end }}
    {{- with include "poolgrid.model.volume" $root }}
    - name: models
      {{- . | nindent 6 }}
    {{- end }}
    {{- if or .engineArgs $spans }}
    - {name: engine, configMap: {name: {{ $name }}-engine, defaultMode: 365}}
    {{- end }}
    {{- if $spans }}
    - {name: ssh, secret: {secretName: {{ $root.Values.security.sshSecret }}, defaultMode: 288}}
    {{- end }}
    {{- include "poolgrid.security.volumes" $root | nindent 4 }}
    {{- include "poolgrid.nats.volumes" $root | nindent 4 }}
{{- end }}
{{- end -}}
