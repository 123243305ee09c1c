{{/* Checks that a schema cannot express. Each message names the value, and the actual and expected setting. */}}

{{- define "switchyard.replicas" -}}
{{- /* Zero replicas are valid: running jobs continue without a controller. */ -}}
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
{{- $before := 0 -}}
{{- range (.Values.queue).thresholdsSeconds -}}
{{- if le (int .) $before -}}
{{- fail (printf "queue.thresholdsSeconds: got %d after %d; expected each threshold above the previous one" (int .) $before) -}}
{{- end -}}
{{- $before = int . -}}
{{- end -}}
{{- range $key, $_ := (.Values.admissionPolicy).allow -}}
{{- if not (regexMatch "^(hostNetwork|hostPID|hostIPC|hostPath|privileged|capability[.][A-Z0-9_]+)$" $key) -}}
{{- fail (printf "admissionPolicy.allow: got the key %s; expected hostNetwork, hostPID, hostIPC, hostPath, privileged or capability.NAME" $key) -}}
{{- end -}}
{{- end -}}
{{- if .Release.IsInstall -}}{{- include "switchyard.alone" . -}}{{- end -}}
{{- end -}}

{{- /* Two releases that share a namespace would both manage its jobs, and the policies of each would reject the pods of the other. An upgrade
       is not rejected, because it can be the one that sets `controller.namespaces`. Queries the cluster, so it has no effect in `helm template`. */ -}}
{{- define "switchyard.alone" -}}
{{- /* Policies of an older chart whose namespace was deleted: helm would adopt them and leave their parameter unchanged. */ -}}
{{- range (lookup "admissionregistration.k8s.io/v1" "ValidatingAdmissionPolicy" "" "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- if and (eq (get $labels "app.kubernetes.io/part-of") "switchyard") .spec.paramKind -}}
{{- fail (printf "ValidatingAdmissionPolicy %s: got one of an older chart, which refuses every pod of the cluster while its ConfigMap is missing; expected none. Upgrade its release, or delete what is left of it: kubectl delete validatingadmissionpolicies,validatingadmissionpolicybindings -l app.kubernetes.io/part-of=switchyard,app.kubernetes.io/instance=%s" .metadata.name (get $labels "app.kubernetes.io/instance")) -}}
{{- end -}}
{{- end -}}
{{- $mine := (.Values.controller).namespaces | default list -}}
{{- $own := printf "%s-children" (include "switchyard.fullname" .) -}}
{{- range (lookup "admissionregistration.k8s.io/v1" "ValidatingAdmissionPolicyBinding" "" "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $name := .metadata.name -}}
{{- if and (eq (get $labels "app.kubernetes.io/part-of") "switchyard") (hasSuffix "-children" $name) (ne $name $own) -}}
{{- $theirs := list -}}
{{- range dig "spec" "matchResources" "namespaceSelector" "matchExpressions" list . -}}{{- $theirs = .values -}}{{- end -}}
{{- $shared := list -}}
{{- range $mine -}}{{- if has . $theirs -}}{{- $shared = append $shared . -}}{{- end -}}{{- end -}}
{{- if or (not $mine) (not $theirs) $shared -}}
{{- fail (printf "controller.namespaces: got [%s], but release %s, whose policies are in this cluster (ValidatingAdmissionPolicyBinding %s), manages %s; expected namespaces that no other release has, in both releases (docs/install.md)" (join ", " $mine) (get $labels "app.kubernetes.io/instance") $name (ternary "all namespaces" (join ", " $theirs) (empty $theirs))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
