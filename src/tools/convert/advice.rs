//! Advice for fields without a counterpart, by field name. A field listed here is noted as a whole.

/// Advice for all other fields.
pub(super) const DEFAULT: &str = "no counterpart: the TrainJob is without it";

const ADVICE: [(&str, &str); 33] = [
    ("status", "the state of the old job, which stays with it"),
    ("uid", "of the old object"),
    ("resourceVersion", "of the old object"),
    ("generation", "of the old object"),
    ("creationTimestamp", "of the old object"),
    ("managedFields", "of the old object"),
    ("selfLink", "of the old object"),
    ("ownerReferences", "of the old object: its owner would delete the new one too"),
    ("finalizers", "they belong to the old object: nothing would remove them"),
    ("generateName", "a TrainJob has a name: set metadata.name for each run"),
    ("cleanPodPolicy", "pods of a finished job stay for their logs until spec.ttlSecondsAfterFinished"),
    ("elasticPolicy", "the number of nodes is fixed in this version: spec.trainer.numNodes"),
    ("minAvailable", "all pods of a TrainJob are placed together or none is"),
    ("minResources", "all pods of a TrainJob are placed together: their requests are what is needed"),
    ("queue", "for Kueue: metadata.labels[kueue.x-k8s.io/queue-name]"),
    ("successPolicy", "a TrainJob is complete when all its pods are, or those of spec.successPolicy.role"),
    ("sshAuthMountPath", "nothing uses ssh: delete what else is for it"),
    ("launcherCreationPolicy", "all pods are created together"),
    ("mainContainer", "the container that trains is called `trainer`"),
    ("initializer", "fetch model and data in an init container of spec.template, or onto a volume beforehand"),
    ("manager", "one owner: the fields are part of spec.template"),
    ("time", "when the patch was made: of the old object"),
    ("apiGroup", "a TrainJob has no runtime: its settings are in the job"),
    ("coscheduling", "the controller places all pods of a TrainJob together: no PodGroup is needed"),
    ("enableGangScheduling", "the controller places all pods of a TrainJob together"),
    ("hostname", "the name of the pod is its host name: ranks find each other by it"),
    ("subdomain", "the Service of the job is the subdomain of its pods"),
    ("nodeName", "use nodeSelector or an affinity: a pod with a node cannot wait for the others"),
    ("withGloo", "set PADDLE_WITH_GLOO in spec.trainer.env"),
    ("intranet", "the Service of the job is the subdomain of its pods"),
    ("heter", "heterogeneous trainers have no counterpart: a role of spec.roles with the command they need"),
    ("metrics", "the number of nodes is fixed in this version: nothing scales it"),
    ("scaleDown", "the number of nodes is fixed in this version"),
];

/// The advice about a field of this name.
pub(super) fn of(key: &str) -> Option<&'static str> {
    ADVICE.iter().find(|(name, _)| *name == key).map(|(_, what)| *what)
}
