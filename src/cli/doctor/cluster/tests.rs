//! Findings for a healthy cluster, and for each fault.

use super::observations::{Observations, Release};
use super::*;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1alpha3::DeviceTaintRule;
use kube::ResourceExt;
use serde::de::DeserializeOwned;
use serde_json::Value;
use switchyard_crds::gpu_topology::GPUTopology;

const NOW: &str = "2026-11-27T12:00:00Z";
const NAMES: [&str; 4] =
    ["switchyard-trainjobs", "switchyard-children", "switchyard-controller", "switchyard-controller-pods"];

fn object<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn metadata(name: &str) -> Value {
    json!({"name": name, "namespace": "switchyard-system", "labels": {"app.kubernetes.io/instance": "switchyard",
        "app.kubernetes.io/version": env!("CARGO_PKG_VERSION")}})
}

fn refused_by(name: &str) -> Option<String> {
    Some(format!(
        "pods \"a\" is forbidden: ValidatingAdmissionPolicy '{name}' with binding '{name}' denied request: no"
    ))
}

fn release() -> Release {
    let mut args: Vec<String> = NAMES.iter().map(|name| format!("--admission-policy={name}")).collect();
    args.extend(["--gpu-driver=gpu.nvidia.com".into(), "--gpu-device-class=gpu.nvidia.com".into()]);
    let template = json!({"spec": {"containers": [{"name": "controller", "args": args}]}});
    let renewed =
        json!({"holderIdentity": "a", "leaseDurationSeconds": 10, "renewTime": "2026-11-27T11:59:58.000000Z"});
    Release {
        controller: object(json!({"metadata": metadata("switchyard-controller"),
            "spec": {"replicas": 2, "selector": {}, "template": template}, "status": {"readyReplicas": 2}})),
        agents: object(json!({"metadata": metadata("switchyard-node-agent"), "status": {"desiredNumberScheduled": 3,
            "currentNumberScheduled": 3, "numberReady": 3, "numberMisscheduled": 0}})),
        lease: object(json!({"metadata": {"name": "switchyard-controller", "namespace": "switchyard-system",
            "annotations": {"training.switchyard.dev/policies": "ok",
                "training.switchyard.dev/version": env!("CARGO_PKG_VERSION")}}, "spec": renewed})),
        forged: refused_by("switchyard-children"),
        job: refused_by("switchyard-trainjobs"),
        ..Release::default()
    }
}

fn node(name: &str, gpus: &str) -> Node {
    object(json!({"metadata": {"name": name}, "status": {"allocatable": {"nvidia.com/gpu": gpus}}}))
}

fn report(name: &str, observed: &str) -> GPUTopology {
    object(json!({"metadata": {"name": name}, "spec": {}, "status": {"observedTime": observed}}))
}

fn taint_rule(expression: &str) -> DeviceTaintRule {
    let selector = json!({"deviceClassName": "gpu.nvidia.com", "selectors": [{"cel": {"expression": expression}}]});
    object(json!({"metadata": {"name": "drained"}, "spec": {"deviceSelector": selector,
        "taint": {"key": "example.com/drained", "effect": "NoSchedule"}}}))
}

fn annotate(release: &mut Release, name: &str, value: &str) {
    release.lease.as_mut().unwrap().annotations_mut().insert(name.into(), value.into());
}

/// A healthy cluster.
fn healthy() -> Observations {
    let mut crds: Vec<_> = switchyard_crds::generate::crds().into_iter().map(|(_, crd)| crd).collect();
    for crd in &mut crds {
        let status = json!({"conditions": [{"type": "Established", "status": "True"}]});
        crd.status = object(status);
    }
    Observations {
        now: NOW.parse::<Timestamp>().unwrap(),
        crds: crds.into_iter().map(|crd| (crd.name_any(), crd)).collect(),
        policies: NAMES.iter().map(|name| object(json!({"metadata": metadata(name), "spec": {}}))).collect(),
        bindings: NAMES
            .iter()
            .map(|name| {
                object(json!({"metadata": metadata(name), "spec": {"policyName": name, "validationActions": ["Deny"]}}))
            })
            .collect(),
        releases: vec![release()],
        device_classes: vec![object(json!({"metadata": {"name": "gpu.nvidia.com"}, "spec": {}}))],
        taint_rules: vec![taint_rule("device.driver == 'gpu.nvidia.com'")],
        drivers: vec!["gpu.nvidia.com".into()],
        ..Observations::default()
    }
}

#[test]
fn a_healthy_cluster_is_ok() {
    assert_eq!(screen(&checks::all(&healthy()), 100), "ok\n");
}

#[test]
fn each_fault_has_one_finding_and_a_fix() {
    let agents = |desired: i32, ready: i32| {
        object(json!({"metadata": metadata("switchyard-node-agent"), "status": {"desiredNumberScheduled": desired,
            "currentNumberScheduled": ready, "numberReady": ready, "numberMisscheduled": 0}}))
    };
    type Change = Box<dyn Fn(&mut Observations)>;
    let of_release =
        |change: fn(&mut Release)| -> Change { Box::new(move |observations| change(&mut observations.releases[0])) };
    let quota = "Error creating: insufficient quota to match these scopes: [{PriorityClass In [system-node-critical]}]";
    let cases: Vec<(Change, &str, &str)> = vec![
        (
            of_release(|it| it.foreign = refused_by("switchyard-children")),
            "refuses pods that are not ours",
            "kubectl delete validatingadmissionpolicybinding switchyard-children",
        ),
        (of_release(|it| it.foreign = Some("exceeded quota: small".into())), "", ""),
        (
            of_release(|it| it.forged = None),
            "switchyard-children does not refuse a pod with the label of a job",
            "helm upgrade",
        ),
        (of_release(|it| it.job = Some("trainjobs is forbidden: User".into())), "cannot be tried", "administrator"),
        (
            Box::new(|observations| drop(observations.bindings.remove(1))),
            "switchyard-children: no ValidatingAdmissionPolicyBinding has its name",
            "helm upgrade",
        ),
        (
            Box::new(|observations| {
                observations
                    .policies
                    .push(object(json!({"metadata": {"name": "b", "labels": {"app.kubernetes.io/instance": "gone"}}})))
            }),
            "release gone has no controller any more",
            "app.kubernetes.io/instance=gone",
        ),
        (
            Box::new(|observations| {
                observations.policies[0].spec = object(json!({"paramKind": {"apiVersion": "v1", "kind": "ConfigMap"}}))
            }),
            "needs a parameter object",
            "helm upgrade",
        ),
        (
            Box::new(|observations| drop(observations.crds.remove("trainjobs.training.switchyard.dev"))),
            "trainjobs.training.switchyard.dev is missing",
            "crds.enabled",
        ),
        (
            Box::new(|observations| {
                observations.crds.get_mut("trainjobs.training.switchyard.dev").unwrap().spec.versions[0].schema = None
            }),
            "does not match this program",
            "crds.enabled",
        ),
        (of_release(|it| it.controller.status = None), "0 of 2 pods are ready", "describe pods"),
        (of_release(|it| it.lease = None), "there is no Lease", "logs"),
        (
            of_release(|it| {
                it.lease.as_mut().unwrap().spec.as_mut().unwrap().renew_time =
                    object(json!("2026-11-27T11:59:00.000000Z"))
            }),
            "has not renewed the Lease switchyard-system/switchyard-controller for 1m00s",
            "logs",
        ),
        (of_release(|it| annotate(it, "training.switchyard.dev/policies", "x: no")), "a found: x: no", "helm upgrade"),
        (
            of_release(|it| annotate(it, "training.switchyard.dev/clock-skew-seconds", "-240")),
            "the clock of the node of a is off by -240 s",
            "synchronise the clock",
        ),
        (
            of_release(|it| annotate(it, "training.switchyard.dev/version", "0.0.1")),
            "the leader of release switchyard: version 0.0.1",
            "upgrade the older one",
        ),
        (
            Box::new(move |observations| {
                observations.releases[0].agents = agents(3, 0);
                observations.releases[0].warnings = vec![quota.into()];
            }),
            "0 of 3 are ready, 0 exist",
            "nodeAgent.resourceQuota.enabled=true",
        ),
        (
            Box::new(move |observations| {
                observations.releases[0].agents = agents(3, 0);
                observations.releases[0].warnings = vec!["violates PodSecurity".into()];
            }),
            "Pod Security forbids",
            "enforce=privileged",
        ),
        (of_release(|it| it.warnings = vec!["violates PodSecurity, long ago".into()]), "", ""),
        (
            of_release(|it| {
                it.agent_pod = Some("pods is forbidden: violates PodSecurity \"restricted:latest\"".into())
            }),
            "Pod Security forbids",
            "enforce=privileged",
        ),
        (
            Box::new(move |observations| observations.releases[0].agent_pod = Some(quota.into())),
            "only in a namespace with a ResourceQuota",
            "nodeAgent.resourceQuota.enabled=true",
        ),
        (of_release(|it| it.agent_pod = Some("pods is forbidden: User".into())), "", ""),
        (
            of_release(|it| it.agents.as_mut().unwrap().status.as_mut().unwrap().updated_number_scheduled = Some(1)),
            "1 of 3 pods are of its current version",
            "rollout status",
        ),
        (
            of_release(|it| {
                drop(it.missing_permissions.insert("system:serviceaccount:s:c".into(), Ok(vec!["create pods".into()])))
            }),
            "system:serviceaccount:s:c cannot create pods",
            "helm upgrade",
        ),
        (
            of_release(|it| {
                drop(it.missing_permissions.insert("system:serviceaccount:s:c".into(), Err("forbidden".into())))
            }),
            "cannot check the rights of system:serviceaccount:s:c: forbidden",
            "administrator",
        ),
        (
            of_release(|it| drop(it.controller.labels_mut().insert("helm.sh/chart".into(), "switchyard-0.0.1".into()))),
            "the chart of release switchyard: version 0.0.1",
            "upgrade the older one",
        ),
        (
            Box::new(|observations| observations.nodes.push(node("gpu-9", "8"))),
            "no report of node gpu-9, which has GPUs",
            "nodeAgent.nodeSelector",
        ),
        (Box::new(|observations| observations.nodes.push(node("cpu-1", "0"))), "", ""),
        (
            Box::new(|observations| {
                observations.nodes.push(node("gpu-9", "8"));
                observations.reports.push(report("gpu-9", "2026-11-27T11:29:00Z"));
            }),
            "the reports of node gpu-9 are older than half an hour",
            "logs -l app.kubernetes.io/component=node-agent",
        ),
        (Box::new(|observations| observations.reports.push(report("gone", "2026-11-26T11:29:00Z"))), "", ""),
        (
            Box::new(|observations| {
                observations.nodes.push(node("gpu-9", "8"));
                let mut report = report("gpu-9", "2026-11-27T11:59:00Z");
                report.status.as_mut().unwrap().agent_version = Some("0.0.1".into());
                observations.reports.push(report);
            }),
            "the agents of node gpu-9 are of another version",
            "rollout",
        ),
        (
            Box::new(|observations| observations.drivers.clear()),
            "driver gpu.nvidia.com offers no ResourceSlice",
            "pods of the driver",
        ),
        (
            Box::new(|observations| {
                let refused = json!({"type": "PodsCreated", "status": "False", "reason": "Refused",
                    "message": "pods is forbidden: violates PodSecurity", "lastTransitionTime": NOW});
                observations.jobs.push(object(json!({"metadata": {"name": "a", "namespace": "team"},
                    "spec": {"trainer": {"framework": "Plain"}}, "status": {"conditions": [refused]}})));
            }),
            "the pods of TrainJob team/a are refused",
            "label namespace team",
        ),
        (
            Box::new(move |observations| observations.releases[0].agents = agents(0, 0)),
            "finds no node",
            "nodeAgent.nodeSelector",
        ),
        (
            Box::new(|observations| {
                observations.dead_webhooks.push(("a.example.com (Service a/b)".into(), "its Service does not exist"))
            }),
            "a.example.com",
            "delete its webhook configuration",
        ),
        (
            Box::new(|observations| observations.taint_rules.push(taint_rule("cel.bind(a, device.driver, a == '')"))),
            "cel.bind(a, device.driver, a == ''): bind() is not evaluated",
            "select by driver, pool or device",
        ),
        (
            Box::new(|observations| observations.device_classes.clear()),
            "there is no DeviceClass gpu.nvidia.com",
            "dra.deviceClass",
        ),
        (
            Box::new(|observations| observations.unread.push(("list deployments".into(), "forbidden".into()))),
            "cannot list deployments: forbidden",
            "administrator",
        ),
    ];
    for (change, what, fix) in cases {
        let mut observations = healthy();
        change(&mut observations);
        let findings = checks::all(&observations);
        assert_eq!(findings.len(), usize::from(!what.is_empty()), "{what}: {findings:?}");
        assert!(
            findings.iter().all(|found| found.what.contains(what) && found.fix.contains(fix)),
            "{what}: {findings:?}"
        );
    }
}

#[test]
fn two_releases_share_no_namespace() {
    let limited = |name: &str, namespace: &str| {
        let mut release = release();
        let pod = release.controller.spec.as_mut().unwrap().template.spec.as_mut().unwrap();
        pod.containers[0].args.as_mut().unwrap().push(format!("--watch-namespace={namespace}"));
        release.controller.labels_mut().insert("app.kubernetes.io/instance".into(), name.into());
        release
    };
    let found = |releases: Vec<Release>| {
        let findings = checks::all(&Observations { releases, ..healthy() });
        findings.into_iter().filter(|found| found.check == "releases").count()
    };
    assert_eq!(found(vec![limited("switchyard", "a"), limited("other", "b")]), 0);
    assert_eq!(found(vec![limited("switchyard", "a"), limited("other", "a")]), 1);
    assert_eq!(found(vec![release(), limited("other", "a")]), 1);
}
