{{/* What no schema can say. Each message names the value, what was got, and what was expected. */}}

{{- define "switchyard.replicas" -}}
{{- /* Zero is a number of replicas too: the jobs go on, and nobody looks after them. */ -}}
{{- dig "replicas" 2 (.Values.controller | default dict) -}}
{{- end -}}

{{- define "switchyard.validate" -}}
{{- $controller := .Values.controller | default dict -}}
{{- $election := $controller.leaderElection | default dict -}}
{{- if and (eq $election.enabled false) (gt (include "switchyard.replicas" . | int) 1) -}}
{{- fail (printf "controller.replicas: got %s without controller.leaderElection.enabled; expected 1 at most, or an election" (include "switchyard.replicas" .)) -}}
{{- end -}}
{{- $lease := $election.leaseDurationSeconds | default 10 | int -}}
{{- $renew := $election.renewDeadlineSeconds | default 7 | int -}}
{{- $retry := $election.retryPeriodSeconds | default 2 | int -}}
{{- if ge (add $renew $retry | int) $lease -}}
{{- fail (printf "controller.leaderElection: got renewDeadlineSeconds %d and retryPeriodSeconds %d; expected less than leaseDurationSeconds (%d) together" $renew $retry $lease) -}}
{{- end -}}
{{- range $key, $_ := (.Values.admissionPolicy).allow -}}
{{- if not (or (has $key (list "hostNetwork" "hostPID" "hostIPC" "hostPath" "privileged")) (hasPrefix "capability." $key)) -}}
{{- fail (printf "admissionPolicy.allow: got the key %s; expected hostNetwork, hostPID, hostIPC, hostPath, privileged or capability.NAME" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
