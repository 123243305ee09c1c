{{/* Names, labels and images. All object names are defined here. Missing sections of values are tolerated, because
     `helm upgrade --reuse-values` passes on the values of an older chart, which can lack new ones. */}}

{{/* Prefix of all names: the release name, with the chart name appended unless it contains it. */}}
{{- define "switchyard.fullname" -}}
{{- $chart := .Values.nameOverride | default .Chart.Name -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $chart .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $chart | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "switchyard.namespace" -}}
{{- .Values.namespaceOverride | default .Release.Namespace -}}
{{- end -}}

{{/* Selector labels of pods; they never change. Takes [root, component]. */}}
{{- define "switchyard.selector" -}}
app.kubernetes.io/name: {{ (index . 0).Values.nameOverride | default (index . 0).Chart.Name | trunc 63 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of objects. Takes [root, component]. */}}
{{- define "switchyard.labels" -}}
{{- $root := index . 0 -}}
{{- $ours := dict "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63)
      "app.kubernetes.io/version" $root.Chart.AppVersion "app.kubernetes.io/managed-by" $root.Release.Service
      "app.kubernetes.io/part-of" "switchyard" -}}
{{- merge (include "switchyard.selector" . | fromYaml) $ours ($root.Values.commonLabels | default dict) | toYaml -}}
{{- end -}}

{{/* Name of a component's service account. Takes [root, component, its values]. */}}
{{- define "switchyard.account" -}}
{{- $account := (index . 2).serviceAccount | default dict -}}
{{- if $account.name -}}
{{- $account.name -}}
{{- else if eq $account.create false -}}
default
{{- else -}}
{{- printf "%s-%s" (include "switchyard.fullname" (index . 0)) (index . 1) -}}
{{- end -}}
{{- end -}}

{{- define "switchyard.controllerAccount" -}}
{{- include "switchyard.account" (list . "controller" (.Values.controller | default dict)) -}}
{{- end -}}

{{- define "switchyard.nodeAgentAccount" -}}
{{- include "switchyard.account" (list . "node-agent" (.Values.nodeAgent | default dict)) -}}
{{- end -}}

{{/* The namespace as owner of cluster-scoped objects: if the namespace is deleted, the garbage collector also deletes policies and roles,
     and no policy outlives its release. Unknown without a cluster, and to an installation that creates the namespace itself. */}}
{{- define "switchyard.owner" -}}
{{- with lookup "v1" "Namespace" "" (include "switchyard.namespace" .) }}
  ownerReferences:
    - {apiVersion: v1, kind: Namespace, name: {{ .metadata.name }}, uid: {{ .metadata.uid }}}
{{- end -}}
{{- end -}}

{{/* Scope of the tenant policies: the namespaces of this release, so that two releases do not reject each other's objects. */}}
{{- define "switchyard.bindingScope" -}}
{{- with (.Values.controller).namespaces }}
  matchResources:
    namespaceSelector:
      matchExpressions:
        - {key: kubernetes.io/metadata.name, operator: In, values: {{ toJson . }}}
{{- end -}}
{{- end -}}

{{/* A CEL expression: keys of admissionPolicy.allow that apply in the namespace of a request. JSON is valid CEL, including strings. */}}
{{- define "switchyard.allowed" -}}
{{- $allow := dict -}}
{{- range $key, $namespaces := (.Values.admissionPolicy).allow -}}
{{- $_ := set $allow $key (regexFindAll "[^, ]+" $namespaces -1) -}}
{{- end -}}
{{ toJson $allow }}.transformList(key, places, '*' in places || request.namespace in places, key)
{{- end -}}

{{/* A CEL expression: a dry-run pod with which the controller checks that the policies admit unrelated pods. */}}
{{- define "switchyard.isForeignProbe" -}}
(request.?dryRun.orValue(false) && request.name == 'switchyard-foreign-probe')
{{- end -}}

{{- define "switchyard.notForeignProbe" -}}
- name: not-a-probe-that-stands-for-pods-of-others
  expression: "!{{ include "switchyard.isForeignProbe" . }}"
{{- end -}}

{{/* Names of the ValidatingAdmissionPolicies, one per line; the bindings have the same names. */}}
{{- define "switchyard.policies" -}}
{{- $admission := .Values.admissionPolicy | default dict -}}
{{- $names := list -}}
{{- if ne $admission.enabled false -}}
{{- $names = list "trainjobs" "trainjobs-secrets" "trainjobs-configmaps" "trainjobs-persistentvolumeclaims" -}}
{{- if ne $admission.jobPods false -}}{{- $names = append $names "children" -}}{{- end -}}
{{- if ne $admission.controller false -}}{{- $names = concat $names (list "controller" "controller-pods") -}}{{- end -}}
{{- if ne (.Values.nodeAgent).enabled false -}}{{- $names = append $names "node-agent" -}}{{- end -}}
{{- end -}}
{{- range $names }}
- {{ include "switchyard.fullname" $ }}-{{ . }}
{{- end -}}
{{- end -}}

{{/* An image: a digest takes precedence over a tag. Takes [root, values of a component, repository]. */}}
{{- define "switchyard.image" -}}
{{- $root := index . 0 -}}
{{- $image := (index . 1).image | default dict -}}
{{- $shared := $root.Values.image | default dict -}}
{{- $registry := ($root.Values.global).imageRegistry | default $shared.registry -}}
{{- with $registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $image.repository | default (index . 2) -}}
{{- if $image.digest -}}
@{{ $image.digest }}
{{- else -}}
:{{ $shared.tag | default $root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "switchyard.pullPolicy" -}}
{{- (.Values.image).pullPolicy | default "IfNotPresent" -}}
{{- end -}}

{{/* Environment variables; a later one replaces an earlier one of the same name. Takes a list. */}}
{{- define "switchyard.env" -}}
{{- $last := dict -}}
{{- range . }}{{ $_ := set $last .name . }}{{ end -}}
{{- $all := list -}}
{{- range . -}}
{{- if hasKey $last .name }}{{ $all = append $all (get $last .name) }}{{ $_ := unset $last .name }}{{ end -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{/* Scheduling fields and pull secrets of a component's pods. Takes [root, values of the component]. */}}
{{- define "switchyard.scheduling" -}}
{{- $root := index . 0 -}}
{{- $own := index . 1 -}}
{{- with $own.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
nodeSelector: {{- merge (deepCopy ($own.nodeSelector | default dict)) (dict "kubernetes.io/os" "linux") | toYaml | nindent 2 }}
{{- with $own.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Non-empty if objects of monitoring.coreos.com are rendered; can fail. Takes [root, name of the value]. */}}
{{- define "switchyard.monitoring" -}}
{{- $root := index . 0 -}}
{{- $mode := ($root.Values.metrics).renderMode | default "fail" -}}
{{- if or (eq $mode "always") ($root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1") -}}
yes
{{- else if eq $mode "fail" -}}
{{- fail (printf "%s: the cluster does not know monitoring.coreos.com/v1; install the Prometheus operator's CRDs, or set metrics.renderMode to skip or always (with `helm template`: --api-versions monitoring.coreos.com/v1)" (index . 1)) -}}
{{- end -}}
{{- end -}}

{{/* Labels of nodes with an NVIDIA GPU: from the GPU operator, and from node feature discovery by PCI class and vendor. */}}
{{- define "switchyard.gpuLabels" -}}
- nvidia.com/gpu.present
- feature.node.kubernetes.io/pci-10de.present
- feature.node.kubernetes.io/pci-0302_10de.present
- feature.node.kubernetes.io/pci-0300_10de.present
{{- end -}}
