//! The attacks: requests of the tenant.

use super::NODES;
use serde_json::{Value, json};
use switchyard_tests::gpus::{RESOURCE, gpu_job};
use switchyard_tests::{merge, plain_job};

/// One request of the tenant.
pub enum Act {
    Create(Value),
    /// Kind and name, and a merge patch.
    Patch(&'static str, &'static str, Value),
    /// The same for the status.
    PatchStatus(&'static str, &'static str, Value),
    Delete(&'static str, &'static str),
    /// Waits until the job has pods, or reports why it has none.
    Settle(&'static str),
}

use Act::{Create, Delete, Patch as Change, PatchStatus, Settle};

/// Title, the expected refusal of the last act (`None` if the API server accepts all), and the
/// acts.
pub type Attack = (&'static str, Option<&'static str>, Vec<Act>);

/// A job that requests all GPUs, with additional spec fields.
fn gpus(name: &str, spec: Value) -> Act {
    let mut job = gpu_job(name, NODES, 8, "run");
    merge(&mut job["spec"], spec);
    Create(job)
}

/// A single-pod job within the quota.
fn small(name: &str, policy: &str, spec: Value) -> Act {
    let mut job = plain_job(name, 1, policy);
    merge(&mut job["spec"], spec);
    Create(job)
}

/// A job of two roles; `gpus` asks for all GPUs.
fn roles(gpus: Value, other: Value, spec: Value) -> Act {
    let mut job = plain_job("a", 1, "run");
    let trainer = job["spec"]["trainer"].as_object_mut().expect("an object");
    let small = trainer.remove("resourcesPerNode");
    trainer.remove("numNodes");
    let mut first = json!({"name": "first", "replicas": NODES, "resourcesPerNode": small});
    first["resourcesPerNode"]["limits"][RESOURCE] = "8".into();
    let mut second = json!({"name": "second", "rendezvous": "None", "resourcesPerNode": small});
    merge(&mut first, gpus);
    merge(&mut second, other);
    job["spec"]["roles"] = json!([first, second]);
    merge(&mut job["spec"], spec);
    Create(job)
}

/// A pod with this metadata and spec.
pub fn pod(name: &str, metadata: Value, spec: Value, gpus: u32) -> Act {
    let mut limits = json!({"cpu": "100m", "memory": "64Mi"});
    if gpus > 0 {
        limits[RESOURCE] = gpus.to_string().into();
    }
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"containers": [{"name": "c", "image": "none", "resources": {"limits": limits}}]}});
    merge(&mut pod["metadata"], metadata);
    merge(&mut pod["spec"], spec);
    Create(pod)
}

fn in_template(spec: Value) -> Value {
    json!({"template": {"spec": spec}})
}

fn object(api: &str, kind: &str, name: &str, rest: Value) -> Act {
    let mut object = json!({"apiVersion": api, "kind": kind, "metadata": {"name": name}});
    merge(&mut object, rest);
    Create(object)
}

/// All attacks. `node` is a node of the cluster, `uid` the UID of the other tenant's job.
pub fn attacks(node: &str, uid: &str) -> Vec<Attack> {
    let claim = |name: &str| json!({"resourceClaims": [{"name": "gpus", "resourceClaimName": name}]});
    let volume = |claim: &str| json!({"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]});
    let owner = json!([{"apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "name": "good", "uid": uid, "controller": true}]);
    let placed = json!({"status": {"attempt": 1, "placement": {"reason": "mine", "nodes": [{"firstRank": 0, "nodeName": node}]},
        "conditions": [{"type": "Placed", "status": "True", "reason": "Placed", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
    let alone = json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}, "namespaceSelector": {}}]}}});
    let gpu_init = json!({"initContainers": [{"name": "i", "image": "none",
        "resources": {"limits": {"cpu": "100m", "memory": "64Mi", RESOURCE: "8"}}}]});
    let requests = json!({"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 8}}]});
    let training = "training.switchyard.dev/v1alpha1";
    let mut all: Vec<Attack> = vec![
        // GPUs and nodes.
        ("a job of all GPUs", None, vec![gpus("a", json!({})), Settle("a")]),
        (
            "with the longest schedule timeout",
            None,
            vec![gpus("a", json!({"gangPolicy": {"scheduleTimeoutSeconds": 86_400}})), Settle("a")],
        ),
        (
            "with a limit of a minute, raised to a month",
            None,
            vec![
                gpus("a", json!({"activeDeadlineSeconds": 60})),
                Settle("a"),
                Change("TrainJob", "a", json!({"spec": {"activeDeadlineSeconds": 2_592_000}})),
            ],
        ),
        (
            "suspended and resumed",
            None,
            vec![
                gpus("a", json!({"suspend": true})),
                Change("TrainJob", "a", json!({"spec": {"suspend": false}})),
                Settle("a"),
            ],
        ),
        (
            "that preempts",
            None,
            vec![gpus("a", json!({"topologyPolicy": {"preemption": "LowerPriority"}})), Settle("a")],
        ),
        (
            "of a system priority class",
            None,
            vec![gpus("a", in_template(json!({"priorityClassName": "system-node-critical"}))), Settle("a")],
        ),
        (
            "that may restart 100 times",
            None,
            vec![gpus("a", json!({"failurePolicy": {"maxRestarts": 100}})), Settle("a")],
        ),
        (
            "with requirements of the fabric that no node has",
            None,
            vec![gpus("a", json!({"trainer": {"framework": "Torch"}, "fabric": {"mode": "Required"}})), Settle("a")],
        ),
        ("of a hundred nodes", None, vec![gpus("a", json!({"trainer": {"numNodes": 100}})), Settle("a")]),
        (
            "that overlaps its attempts",
            None,
            vec![gpus("a", json!({"gangPolicy": {"replacement": "Immediate"}})), Settle("a")],
        ),
        ("that another controller manages", None, vec![gpus("a", json!({"managedBy": "kueue.x-k8s.io/multikueue"}))]),
        (
            "that tolerates everything",
            None,
            vec![gpus("a", in_template(json!({"tolerations": [{"operator": "Exists"}]}))), Settle("a")],
        ),
        ("on a node by name", None, vec![gpus("a", in_template(json!({"nodeName": node})))]),
        (
            "whose pods have a gate of their own",
            None,
            vec![gpus("a", in_template(json!({"schedulingGates": [{"name": "example.com/mine"}]}))), Settle("a")],
        ),
        (
            "in a queue of Kueue",
            None,
            vec![
                {
                    let Create(mut job) = gpus("a", json!({})) else { unreachable!() };
                    job["metadata"]["labels"] = json!({"kueue.x-k8s.io/queue-name": "none"});
                    Create(job)
                },
                Settle("a"),
            ],
        ),
        (
            "that the queue never preempts",
            None,
            vec![gpus("a", json!({"queue": {"preemptible": "Never"}})), Settle("a")],
        ),
        (
            "that the queue always preempts",
            None,
            vec![gpus("a", json!({"queue": {"preemptible": "Always"}})), Settle("a")],
        ),
        (
            "with GPUs for an init container alone",
            None,
            vec![small("a", "initialize", in_template(gpu_init.clone())), Settle("a")],
        ),
        ("of two roles, one without GPUs", None, vec![roles(json!({}), json!({}), json!({})), Settle("a")]),
        (
            "of a role with a hundred pods, as many to a node as fit",
            None,
            vec![roles(json!({}), json!({"replicas": 100}), json!({})), Settle("a")],
        ),
        (
            "whose role without GPUs goes on alone",
            None,
            vec![
                roles(json!({"onFailure": "Ignore"}), json!({}), json!({"successPolicy": {"role": "second"}})),
                Settle("a"),
            ],
        ),
        ("a pod with GPUs", Some("exceeded quota"), vec![pod("p", json!({}), json!({}), 8)]),
        (
            "a pod with GPUs on a node by name",
            Some("exceeded quota"),
            vec![pod("p", json!({}), json!({"nodeName": node}), 8)],
        ),
        ("a pod with GPUs for an init container alone", Some("exceeded quota"), vec![pod("p", json!({}), gpu_init, 0)]),
        (
            "a pod with our gate",
            None,
            vec![pod("p", json!({}), json!({"schedulingGates": [{"name": "training.switchyard.dev/gang"}]}), 0)],
        ),
        ("a pod on a node by name", None, vec![pod("p", json!({}), json!({"nodeName": node}), 0)]),
        (
            "a pod that keeps those of all namespaces off its node",
            Some("exceeded quota: alone"),
            vec![pod("p", json!({}), alone.clone(), 0)],
        ),
        (
            "a job whose pods keep those of all namespaces off their nodes",
            None,
            vec![small("a", "run", in_template(alone)), Settle("a")],
        ),
        // Claims and volumes.
        (
            "a claim of eight GPUs, and a pod with it",
            None,
            vec![
                object("resource.k8s.io/v1", "ResourceClaim", "c", json!({"spec": {"devices": requests}})),
                pod("p", json!({}), claim("c"), 0),
            ],
        ),
        (
            "a template of such claims, and a job with it",
            None,
            vec![
                object(
                    "resource.k8s.io/v1",
                    "ResourceClaimTemplate",
                    "t",
                    json!({"spec": {"spec": {"devices": requests}}}),
                ),
                small(
                    "a",
                    "run",
                    in_template(json!({"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "t"}]})),
                ),
                Settle("a"),
            ],
        ),
        (
            "a job with a claim that does not exist",
            None,
            vec![small("a", "run", in_template(claim("none"))), Settle("a")],
        ),
        (
            "a job with a volume that does not exist",
            None,
            vec![small("a", "run", in_template(volume("none"))), Settle("a")],
        ),
        (
            "a job with a volume that is never bound",
            None,
            vec![
                object(
                    "v1",
                    "PersistentVolumeClaim",
                    "never",
                    json!({"spec": {"accessModes": ["ReadWriteOnce"],
                "storageClassName": "none", "resources": {"requests": {"storage": "1Gi"}}}}),
                ),
                small("a", "run", in_template(volume("never"))),
                Settle("a"),
            ],
        ),
        // Pods that keep their resources.
        (
            "a job with a scheduler that does not exist",
            None,
            vec![small("a", "run", in_template(json!({"schedulerName": "none"}))), Settle("a")],
        ),
        (
            "a job with a host port",
            None,
            vec![
                small(
                    "a",
                    "run",
                    in_template(
                        json!({"containers": [{"name": "trainer", "ports": [{"containerPort": 80, "hostPort": 80}]}]}),
                    ),
                ),
                Settle("a"),
            ],
        ),
        (
            "a job with an init container that never ends",
            None,
            vec![
                small(
                    "a",
                    "initialize",
                    in_template(
                        json!({"initContainers": [{"name": "i", "image": "none", "resources": {"limits": {"cpu": "100m", "memory": "64Mi"}}}]}),
                    ),
                ),
                Settle("a"),
            ],
        ),
        ("a job that never starts", None, vec![small("a", "hang", json!({})), Settle("a")]),
        (
            "a job that fails at once, again and again",
            None,
            vec![small("a", "fail=1", json!({"failurePolicy": {"maxRestarts": 100}})), Settle("a")],
        ),
        (
            "a job whose pods stay when they are deleted",
            None,
            vec![
                small("a", "ignore-delete", in_template(json!({"terminationGracePeriodSeconds": 100_000}))),
                Settle("a"),
                Delete("TrainJob", "a"),
            ],
        ),
        (
            "a finalizer on a pod of a job that is deleted",
            None,
            vec![
                small("a", "run", json!({})),
                Settle("a"),
                Change("Pod", "a-1-0", json!({"metadata": {"finalizers": ["example.com/hold"]}})),
                Delete("TrainJob", "a"),
            ],
        ),
        (
            "a finalizer on a job of all GPUs that is deleted",
            None,
            vec![
                gpus("f", json!({})),
                Change("TrainJob", "f", json!({"metadata": {"finalizers": ["example.com/hold"]}})),
                Delete("TrainJob", "f"),
            ],
        ),
        (
            "a job whose NetworkPolicy has another owner",
            None,
            vec![
                object("networking.k8s.io/v1", "NetworkPolicy", "a", json!({"spec": {"podSelector": {}}})),
                small("a", "run", json!({})),
                Settle("a"),
            ],
        ),
        // Forgeries.
        (
            "a job with the other job's name",
            None,
            vec![small("good", "run", json!({"trainer": {"numNodes": NODES}})), Settle("good")],
        ),
        (
            "a pod with the label of the other job",
            Some("only the controller of Switchyard sets it"),
            vec![pod("good-1-0", json!({"labels": {"training.switchyard.dev/job-uid": uid}}), json!({}), 0)],
        ),
        (
            "a pod that the other job owns",
            Some("only the controller of Switchyard says"),
            vec![pod("good-1-1", json!({"ownerReferences": owner}), json!({}), 0)],
        ),
        (
            "a place written into the status",
            Some("forbidden"),
            vec![gpus("a", json!({})), PatchStatus("TrainJob", "a", placed.clone())],
        ),
        (
            "a job that is created with a place",
            None,
            vec![
                {
                    let Create(mut job) = gpus("a", json!({})) else { unreachable!() };
                    job["status"] = placed["status"].clone();
                    Create(job)
                },
                Settle("a"),
            ],
        ),
        (
            "a slice of a placement",
            Some("forbidden"),
            vec![object(training, "PlacementSlice", "s", json!({"spec": {"nodes": []}}))],
        ),
        (
            "a report of a node without GPUs",
            Some("forbidden"),
            vec![object(training, "GPUTopology", node, json!({"spec": {}}))],
        ),
        ("a cordon", Some("forbidden"), vec![Change("Node", "n-0", json!({"spec": {"unschedulable": true}}))]),
        (
            "a priority class",
            Some("forbidden"),
            vec![object("scheduling.k8s.io/v1", "PriorityClass", "mine", json!({"value": 1_000_000}))],
        ),
        (
            "a larger quota",
            Some("forbidden"),
            vec![Change("ResourceQuota", "small", json!({"spec": {"hard": {"requests.nvidia.com/gpu": "16"}}}))],
        ),
        // Memory and controller time.
        (
            "a spec of 300 KiB",
            None,
            vec![gpus(
                "a",
                in_template(
                    json!({"containers": [{"name": "trainer", "env": [{"name": "LARGE", "value": "x".repeat(300_000)}]}]}),
                ),
            )],
        ),
        (
            "a budget that lets no pod go, and a policy that isolates all",
            None,
            vec![
                object("policy/v1", "PodDisruptionBudget", "b", json!({"spec": {"maxUnavailable": 0, "selector": {}}})),
                object(
                    "networking.k8s.io/v1",
                    "NetworkPolicy",
                    "n",
                    json!({"spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}}),
                ),
            ],
        ),
    ];
    let numbered =
        |make: &dyn Fn(&str) -> Act, count: usize| (0..count).map(|number| make(&format!("m{number}"))).collect();
    all.push(("twelve jobs of all GPUs", None, numbered(&|name| gpus(name, json!({})), 12)));
    all.push(("fifty suspended jobs", None, numbered(&|name| gpus(name, json!({"suspend": true})), 50)));
    let again = || [gpus("r", json!({})), Delete("TrainJob", "r")];
    let resumed = |suspend: bool| Change("TrainJob", "s", json!({"spec": {"suspend": suspend}}));
    let flips = (0..10).map(|number| resumed(number % 2 == 0));
    all.push(("suspended and resumed five times", None, [gpus("s", json!({}))].into_iter().chain(flips).collect()));
    all.push(("a job that is deleted and created again eight times", None, (0..8).flat_map(|_| again()).collect()));
    all
}
