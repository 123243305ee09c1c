//! Cluster components that affect pods and placement: mutating admission, volumes, overhead, host
//! ports, topology spread, quotas. Each case ends in a running job or a message that names the
//! cause.

use super::admitted::{node_of, patch_nodes};
use super::{Scene, message_contains};
use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::{Pod, ResourceQuota};
use kube::api::Patch;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use switchyard_tests::{
    ControlPlane, ControllerOptions, Jobs, Kubelet, KubeletOptions, Options, Scene as Folder, TIMEOUT, condition_of,
    start_controller, until_async,
};

fn apply(plane: &ControlPlane, objects: &[Value]) -> Result<()> {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
    let made = plane.kubectl_with(&["apply", "--server-side", "-f", "-"], &list.to_string());
    ensure!(made.code == Some(0), "{}", made.stderr);
    Ok(())
}

/// A cluster policy that mutates the namespace's pods on creation, like the webhooks of service
/// meshes, queues and cloud providers.
fn admission(namespace: &str) -> [Value; 2] {
    let own = json!({"matchLabels": {"kubernetes.io/metadata.name": namespace}});
    let sidecar = |name: &str, more: &str| {
        format!(
            r#"{{"name": dyn("{name}"), "image": dyn("none"), "resources": dyn({{"requests": {{"cpu": "3"}}}}){more}}}"#
        )
    };
    let terms = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms";
    let patches = [
        ("/spec/containers/-", sidecar("proxy", "")),
        ("/spec/initContainers", format!("[{}]", sidecar("mesh", r#", "restartPolicy": dyn("Always")"#))),
        ("/spec/nodeSelector", r#"{"example.com/team": "a"}"#.into()),
        (
            &format!("{terms}/0/matchExpressions/-"),
            r#"{"key": dyn("example.com/disk"), "operator": dyn("Exists")}"#.into(),
        ),
        // By then the API server itself has added tolerations.
        ("/spec/tolerations/-", r#"{"key": "gpu", "operator": "Exists"}"#.into()),
    ];
    let patches = patches.map(|(path, value)| format!(r#"JSONPatch{{op: "add", path: "{path}", value: {value}}}"#));
    let version = "admissionregistration.k8s.io/v1beta1";
    let policy = json!({
        "apiVersion": version, "kind": "MutatingAdmissionPolicy", "metadata": {"name": namespace},
        "spec": {
            "failurePolicy": "Fail", "reinvocationPolicy": "Never",
            "matchConstraints": {"namespaceSelector": own, "resourceRules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]},
            "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": format!("[{}]", patches.join(", "))}}],
        },
    });
    let binding = json!({"apiVersion": version, "kind": "MutatingAdmissionPolicyBinding", "metadata": {"name": namespace},
        "spec": {"policyName": namespace}});
    [policy, binding]
}

/// Sidecars of both kinds use resources, and selector, affinity and toleration restrict the nodes.
/// None of this is in the template.
#[tokio::test]
async fn admission_changes_count_for_placement() -> Result<()> {
    let options = Options { controller_manager: true, scheduler: true, mutating: true, ..Options::default() };
    let plane = ControlPlane::start(&options)?;
    plane.install_crds().await?;
    let namespace = plane.namespace("mutated").await?;
    let kubelet = Kubelet::start(plane.config().await?, KubeletOptions::new(&namespace, 4)).await?;
    let options = ControllerOptions { namespace: Some(namespace.clone()), ..ControllerOptions::default() };
    let controller = start_controller(&plane, &namespace, &options)?;
    let scene = Scene { jobs: Jobs::new(plane.client().await?, &namespace), kubelet, controller };
    apply(&plane, &admission(&namespace))?;
    let taint = json!({"taints": [{"key": "gpu", "effect": "NoSchedule"}]});
    let labels = |team: Value, disk: Value| json!({"metadata": {"labels": {"example.com/team": team, "example.com/disk": disk}}, "spec": taint.clone()});
    let nodes = [
        (0, labels(json!(null), json!("fast"))),
        (1, labels(json!("a"), json!(null))),
        (2, labels(json!("a"), json!("fast"))),
        (3, labels(json!("a"), json!("slow"))),
    ];
    patch_nodes(&scene, &nodes).await?;
    // A policy takes effect some time after it was accepted.
    until_async("changed by the policy", TIMEOUT, async || {
        let probe: Pod = serde_json::from_value(json!({"metadata": {"name": "probe"}, "spec": {
            "affinity": switchyard_tests::template_on(&scene.kubelet.nodes())["spec"]["affinity"], "containers": [{"name": "a", "image": "none"}]}}))?;
        let dry = kube::api::PostParams { dry_run: true, ..Default::default() };
        let made = scene.jobs.pods_api().create(&dry, &probe).await;
        Ok(made.is_ok_and(|pod| pod.spec.is_some_and(|spec| spec.containers.len() == 2)))
    })
    .await?;
    let mut used = Vec::new();
    for name in ["a", "b"] {
        scene.create(name, 1, "run", json!({})).await?;
        used.push(node_of(&scene, name).await?);
        scene.jobs.verdict(
            "admission adds sidecars, a selector, an affinity, a toleration",
            &format!("{name} runs"),
            name,
        )?;
    }
    used.sort_unstable();
    assert_eq!(used, scene.kubelet.nodes()[2..], "two sidecars of 3 cores leave room for one such pod on each");
    scene.create("c", 1, "run", json!({})).await?;
    let waits = scene.jobs.wait_stage("c", "Queued").await?;
    scene.jobs.verdict("sidecars that admission adds leave no room", "waits, cause named", "c")?;
    let message = &condition_of(&waits, "Placed").unwrap().message;
    assert!(message.contains("no node has room for cpu 6100m"), "{message}");
    scene.never_panicked()
}

/// A volume with its own topology, and the claim bound to it.
fn volume(name: &str, class: &str, key: &str, value: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": class, "local": {"path": "/none"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]}]}},
        },
    })
}

fn claim(name: &str, namespace: &str, class: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": namespace},
        "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": class, "resources": {"requests": {"storage": "1Gi"}}}})
}

fn class(name: &str, mode: &str) -> Value {
    json!({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name},
        "provisioner": "kubernetes.io/no-provisioner", "volumeBindingMode": mode})
}

fn with_claim(name: &str) -> Value {
    json!({"template": {"spec": {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": name}}]}}})
}

/// Regression: the planner tried each node without the volume for 10 s, which in a large cluster
/// took forever.
#[tokio::test]
async fn jobs_follow_their_volumes_and_report_missing_ones() -> Result<()> {
    let scene = Scene::new("volumes", 4).await?;
    let (namespace, nodes) = (scene.jobs.namespace.clone(), scene.kubelet.nodes());
    let [at_once, later, none, late] = ["at-once", "later", "none", "late"].map(|name| format!("{namespace}-{name}"));
    patch_nodes(&scene, &[(2, json!({"metadata": {"labels": {"topology.kubernetes.io/zone": namespace}}}))]).await?;
    apply(
        ControlPlane::shared(),
        &[
            class(&at_once, "Immediate"),
            class(&later, "WaitForFirstConsumer"),
            class(&none, "WaitForFirstConsumer"),
            class(&late, "Immediate"),
            volume(&format!("{namespace}-zone"), &at_once, "topology.kubernetes.io/zone", &namespace),
            volume(&format!("{namespace}-local"), &later, "kubernetes.io/hostname", &nodes[3]),
            claim("zone", &namespace, &at_once),
            claim("local", &namespace, &later),
            claim("none", &namespace, &none),
            claim("late", &namespace, &late),
        ],
    )?;
    // `node_of` requires the first attempt, so the scheduler refused no gang.
    for (name, node, what) in
        [("zone", 2, "a volume of one zone"), ("local", 3, "a local volume, WaitForFirstConsumer")]
    {
        scene.create(name, 1, "run", with_claim(name)).await?;
        assert_eq!(node_of(&scene, name).await?, nodes[node], "{name}");
        scene.jobs.verdict(what, "runs", name)?;
    }
    for (name, class, node, what) in [
        ("none", &none, 1, "a claim for which there is no volume"),
        // The scheduler would refuse its pods until the volume controller has bound the claim.
        ("late", &late, 0, "a claim that is bound at once, before it is"),
    ] {
        scene.create(name, 1, "run", with_claim(name)).await?;
        let why = format!(
            "4 nodes cannot be used: PersistentVolumeClaim {name} has no volume there (spec.template.spec.volumes)"
        );
        let waits = scene.jobs.wait(name, "reported", message_contains(&why)).await?;
        scene.jobs.verdict(what, "waits, cause named", name)?;
        assert_eq!(waits.status.unwrap().attempt, Some(1));
        let config = ControlPlane::shared().kubeconfig("admin").display().to_string();
        let explain = ["explain", name, "--namespace", &namespace, "--kubeconfig", &config];
        let explained = Folder::new().switchyard(explain).start().wait(TIMEOUT);
        ensure!(
            explained.stdout.contains("not placeable: ") && explained.stdout.contains(&why),
            "{}{}",
            explained.stdout,
            explained.stderr
        );
        let new = volume(&format!("{namespace}-{name}"), class, "kubernetes.io/hostname", &nodes[node]);
        apply(ControlPlane::shared(), &[new])?;
        assert_eq!(node_of(&scene, name).await?, nodes[node], "a volume created later is used");
    }
    scene.never_panicked()
}

#[tokio::test]
async fn runtime_overhead_counts_as_used() -> Result<()> {
    let scene = Scene::new("overhead", 2).await?;
    let name = format!("{}-heavy", scene.jobs.namespace);
    let runtime = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": "none",
        "overhead": {"podFixed": {"cpu": "6"}}});
    apply(ControlPlane::shared(), &[runtime])?;
    let heavy = json!({"template": {"spec": {"runtimeClassName": name}}});
    scene.create("a", 1, "run", heavy.clone()).await?;
    let first = node_of(&scene, "a").await?;
    scene.jobs.verdict("overhead of a RuntimeClass", "runs", "a")?;
    scene.create("b", 1, "run", heavy.clone()).await?;
    assert_ne!(node_of(&scene, "b").await?, first);
    scene.create("c", 1, "run", heavy).await?;
    scene.jobs.wait("c", "reported", message_contains("no node has room for cpu 6100m")).await?;
    scene.jobs.verdict("overhead of a RuntimeClass leaves no room", "waits, cause named", "c")
}

/// Only the scheduler checks these constraints. After its refusal, the controller rolls the gang
/// back after 10 s and tries the next node.
#[tokio::test]
async fn port_and_spread_conflicts_are_learned() -> Result<()> {
    let scene = Scene::new("learned", 2).await?;
    let nodes = scene.kubelet.nodes();
    let stranger = json!({"metadata": {"name": "stranger", "labels": {"app": "spread"}}, "spec": {
        "nodeSelector": {"kubernetes.io/hostname": nodes[0]},
        "containers": [{"name": "a", "image": "none", "ports": [{"containerPort": 7777, "hostPort": 7777}]}]}});
    scene.jobs.pods_api().create(&Default::default(), &serde_json::from_value(stranger)?).await?;
    let is_bound =
        |pod: &Pod| pod.name_any() == "stranger" && pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    scene.jobs.wait_pods("bound", |pods| pods.iter().any(is_bound)).await?;
    let port = json!({"template": {"spec": {"containers": [{"name": "trainer", "ports": [{"containerPort": 7777, "hostPort": 7777}]}]}}});
    // Nodes that the pod cannot use count for the spread as well. Otherwise its pinned node would
    // be the only one.
    let spread = json!({"template": {"metadata": {"labels": {"app": "spread"}}, "spec": {"topologySpreadConstraints": [{
        "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule", "nodeAffinityPolicy": "Ignore",
        "labelSelector": {"matchLabels": {"app": "spread"}}}]}}});
    let both = [
        ("port", port, "free ports", "a host port that is taken"),
        ("spread", spread, "topology spread constraints", "a spread that does not hold"),
    ];
    for (name, spec, words, what) in both {
        scene.create(name, 1, "run", spec).await?;
        let status = scene.jobs.wait_stage(name, "Running").await?.status.unwrap();
        scene.jobs.verdict(what, "runs on the next node", name)?;
        assert_eq!((status.attempt, status.restarts.unwrap().total), (Some(2), 0), "{name}");
        assert_eq!(status.placement.unwrap().nodes[0].node_name, nodes[1], "{name}");
        let notes = scene.jobs.events(name, "GangRolledBack").await?;
        assert!(notes.iter().any(|note| note.contains(&nodes[0]) && note.contains(words)), "{name}: {notes:?}");
        scene.jobs.api().delete(name, &Default::default()).await?;
        scene.jobs.wait_pods("gone", |pods| pods.len() == 1).await?;
    }
    Ok(())
}

#[tokio::test]
async fn object_count_and_extended_resource_quotas_are_reported() -> Result<()> {
    let scene = Scene::new("counted", 2).await?;
    let quotas = Api::<ResourceQuota>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    let quota = json!({"metadata": {"name": "small"}, "spec": {"hard": {"count/services": "0", "requests.nvidia.com/gpu": "1"}}});
    quotas.create(&Default::default(), &serde_json::from_value(quota)?).await?;
    let counted = |quota: Option<&ResourceQuota>| {
        quota.and_then(|quota| quota.status.as_ref()?.used.as_ref()).is_some_and(|used| used.len() == 2)
    };
    kube::runtime::wait::await_condition(quotas.clone(), "small", counted).await?;
    scene.create("objects", 2, "run", json!({})).await?;
    let reported = scene.jobs.wait("objects", "reported", message_contains("exceeded quota: small")).await?;
    scene.jobs.verdict("a quota by object count", "waits, cause named", "objects")?;
    assert!(condition_of(&reported, "Succeeded").unwrap().message.contains("count/services=1"), "{reported:?}");
    let gpus = json!({"trainer": {"resourcesPerNode": {"limits": {"nvidia.com/gpu": 2}}}});
    scene.create("gpus", 1, "run", gpus).await?;
    scene.jobs.wait("gpus", "reported", message_contains("requested: requests.nvidia.com/gpu=2, used: requests.nvidia.com/gpu=0, limited: requests.nvidia.com/gpu=1")).await?;
    scene.jobs.verdict("a quota by extended resource", "waits, cause named", "gpus")?;
    let more = json!({"spec": {"hard": {"count/services": "5", "requests.nvidia.com/gpu": "9"}}});
    quotas.patch("small", &Default::default(), &Patch::Merge(more)).await?;
    scene.jobs.wait_stage("objects", "Running").await?;
    scene.jobs.wait_stage("gpus", "Queued").await?;
    Ok(())
}
