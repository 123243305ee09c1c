//! Validation and authorization of TrainJobs: the chart's policies and rights on a real API server.
//!
//! The cases are in `admission/cases.yaml` and the users in `admission/users.yaml`. An API server
//! applies a new or changed policy with a delay, so each case is retried until it ends as expected
//! or a deadline has passed.

mod fence;
mod rights;

use anyhow::{Context, Result};
use kube::Client;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use switchyard_tests::chart::render;
use switchyard_tests::{ControlPlane, Ended, Options, TIMEOUT, refusal, root, until_async};

const CONTROLLER: &str = "system:serviceaccount:switchyard-system:switchyard-controller";

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    title: String,
    user: String,
    pod: Option<Value>,
    #[serde(default)]
    refused: Vec<String>,
    #[serde(default)]
    allowed: BTreeMap<String, String>,
}

impl Case {
    fn manifest(&self) -> Value {
        let mut spec = json!({"trainer": {"framework": "Plain", "image": "image", "command": ["train"]}});
        if let Some(pod) = &self.pod {
            spec["template"] = json!({"spec": pod});
        }
        json!({"apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "case"}, "spec": spec})
    }

    /// Describes the deviation from the expected result.
    fn fault(&self, refusal: Option<&str>) -> Option<String> {
        let Some(message) = refusal else {
            let is_refused = !self.refused.is_empty();
            return is_refused.then(|| format!("{}: accepted; expected a refusal with {:?}", self.title, self.refused));
        };
        let missing: Vec<&String> =
            self.refused.iter().filter(|fragment| !message.contains(fragment.as_str())).collect();
        match self.refused.is_empty() {
            true => Some(format!("{}: refused: {message}", self.title)),
            false if missing.is_empty() => None,
            false => Some(format!("{}: the message lacks {missing:?}: {message}", self.title)),
        }
    }
}

/// A control plane with the chart, and a namespace with the users of the cases.
struct Scene {
    plane: ControlPlane,
    client: Client,
    namespace: String,
}

impl Scene {
    async fn new() -> Result<Scene> {
        let plane = ControlPlane::start(&Options::default())?;
        plane.install_crds().await?;
        let namespace = plane.namespace("admission").await?;
        let scene = Scene { client: plane.client().await?, plane, namespace };
        scene.plane.apply_chart(&[])?;
        let users = root().join("tests/tests/admission/users.yaml");
        scene.must(&["apply", "-n", &scene.namespace, "-f", users.to_str().unwrap()], "");
        Ok(scene)
    }

    fn must(&self, arguments: &[&str], input: &str) {
        let ended = self.plane.kubectl_with(arguments, input);
        assert_eq!(ended.code, Some(0), "kubectl {arguments:?}: {}", ended.stderr);
    }

    fn as_user(&self, user: &str, arguments: &[&str], input: &Value) -> Ended {
        let mut all = vec!["--as", user, "-n", &self.namespace];
        all.extend(arguments);
        self.plane.kubectl_with(&all, &input.to_string())
    }

    /// The refusal of an object that this user, or the administrator, would create.
    async fn refusal(&self, user: Option<&str>, object: &Value) -> Result<Option<String>> {
        refusal(&self.client, user, &self.namespace, object).await
    }

    /// Waits until the server refuses an object with this fragment.
    async fn expect_refusal(&self, user: Option<&str>, object: &Value, fragment: &str) -> Result<()> {
        let mut last = None;
        let is_refused = async || {
            last = self.refusal(user, object).await?;
            Ok(last.as_ref().is_some_and(|message| message.contains(fragment)))
        };
        let refused = until_async("refused", TIMEOUT, is_refused).await;
        refused.map(drop).with_context(|| format!("{object}: expected {fragment:?}, got {last:?}"))
    }

    fn allow(&self, allowed: &BTreeMap<String, String>) -> Result<()> {
        let allow =
            format!("admissionPolicy.allow={}", json!(allowed).to_string().replace("NAMESPACE", &self.namespace));
        let policies = render(&["--show-only", "templates/policies/trainjobs.yaml", "--set-json", &allow])?;
        self.must(&["apply", "-f", "-"], &policies);
        Ok(())
    }

    /// Tries a case until it ends as expected; returns the last fault at the deadline.
    async fn try_case(&self, case: &Case) -> Result<Option<String>> {
        let mut fault = None;
        let is_expected = async || {
            fault = case.fault(self.refusal(Some(&case.user), &case.manifest()).await?.as_deref());
            Ok(fault.is_none())
        };
        match until_async("as expected", TIMEOUT, is_expected).await {
            Ok(_) => Ok(None),
            Err(error) => fault.map(Some).ok_or(error),
        }
    }
}

fn cases() -> Vec<Case> {
    serde_saphyr::from_str(include_str!("admission/cases.yaml")).unwrap()
}

#[tokio::test]
async fn accepted_and_refused_jobs() -> Result<()> {
    let scene = Scene::new().await?;
    // An inactive policy accepts everything, so check one refusal of each policy first.
    let mut cases = cases();
    cases.sort_by_key(|case| (!case.allowed.is_empty(), case.refused.is_empty()));
    let mut faults = Vec::new();
    let mut allowed = BTreeMap::new();
    for case in &cases {
        if case.allowed != allowed {
            scene.allow(&case.allowed)?;
            allowed.clone_from(&case.allowed);
        }
        faults.extend(scene.try_case(case).await?);
    }
    assert!(faults.is_empty(), "{} of {} cases:\n{}", faults.len(), cases.len(), faults.join("\n"));

    examples(&scene);
    updates(&scene);
    children(&scene).await
}

/// The API server evaluates the CRD's rules: it accepts every example, and refuses one with a
/// broken rule.
fn examples(scene: &Scene) {
    let mut count = 0;
    for entry in std::fs::read_dir(root().join("examples")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|end| end != "yaml") {
            continue;
        }
        count += 1;
        let text = std::fs::read_to_string(&path).unwrap();
        let mut job: Value = serde_saphyr::from_str(&text).unwrap();
        let create = |job: &Value| scene.as_user("author", &["create", "--dry-run=server", "-f", "-"], job);
        let ended = create(&job);
        assert_eq!(ended.code, Some(0), "{}: {}", path.display(), ended.stderr);
        job["spec"]["engine"]["precision"] = json!({"mode": "FP32", "computeType": "FP16"});
        let ended = create(&job);
        assert!(
            ended.stderr.contains("computeType and lossScaling are for mode AMP"),
            "{}: {}",
            path.display(),
            ended.stderr
        );
    }
    assert!(count >= 8, "{count} examples");
}

/// Changing the spec requires an author's rights; changing a label does not.
fn updates(scene: &Scene) {
    let job = Case {
        title: "a job".into(),
        user: "reader".into(),
        pod: Some(json!({"volumes": [{"name": "v", "secret": {"secretName": "other"}}]})),
        refused: Vec::new(),
        allowed: BTreeMap::new(),
    };
    let ended = scene.as_user("reader", &["create", "-f", "-"], &job.manifest());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let patch = |user: &str, patch: &str| {
        scene.as_user(user, &["patch", "trainjob", "case", "--type=merge", "-p", patch], &Value::Null)
    };
    let label = patch("novice", r#"{"metadata":{"labels":{"team":"a"}}}"#);
    assert_eq!(label.code, Some(0), "{}", label.stderr);
    let suspend = patch("novice", r#"{"spec":{"suspend":true}}"#);
    assert!(suspend.stderr.contains("novice may not create pods"), "{}", suspend.stderr);
    // The template is unchanged, so suspending a job does not require access to its Secrets.
    let suspend = patch("author", r#"{"spec":{"suspend":true}}"#);
    assert_eq!(suspend.code, Some(0), "{}", suspend.stderr);
}

/// Only the controller may mark an object as belonging to a job.
async fn children(scene: &Scene) -> Result<()> {
    let pod = |labels: Value| {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", "labels": labels},
            "spec": {"automountServiceAccountToken": false, "containers": [{"name": "trainer", "image": "image"}]}})
    };
    let ours = pod(json!({"training.switchyard.dev/job-uid": "1"}));
    scene.expect_refusal(Some("author"), &ours, "metadata.labels[training.switchyard.dev/job-uid]").await?;
    assert_eq!(scene.refusal(Some("author"), &pod(json!({"app": "a"}))).await?, None);
    forgeries(scene).await?;
    controllers(scene).await
}

/// Limits on misuse of the controller's token. RBAC does not know owners, so the token can write
/// pods and ConfigMaps; the policies must restrict it.
async fn controllers(scene: &Scene) -> Result<()> {
    let owner = |uid: &str| json!([{"apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "name": "a", "uid": uid, "controller": true}]);
    let label = json!({"training.switchyard.dev/job-uid": "1"});
    let owned_pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a-1-0", "labels": label, "ownerReferences": owner("1")},
        "spec": {"automountServiceAccountToken": false, "schedulingGates": [{"name": "training.switchyard.dev/gang"}],
            "containers": [{"name": "trainer", "image": "image"}]}});
    let with = |path: &str, value: Value| {
        let mut pod = owned_pod.clone();
        *pod.pointer_mut(path).unwrap() = value;
        pod
    };
    let create = ["create", "--dry-run=server", "-f", "-"];
    let host = json!([{"name": "v", "hostPath": {"path": "/"}}]);
    let altered = |mut pod: Value, field: &str, value: Value| {
        pod["spec"][field] = value;
        pod
    };
    for (pod, fragment) in [
        (with("/metadata/ownerReferences", json!([])), "expected one TrainJob as its controller"),
        (with("/metadata/ownerReferences", owner("2")), "whose UID is in the label"),
        (with("/metadata/labels", json!({})), "whose UID is in the label"),
        (with("/spec/schedulingGates", json!([])), "spec.schedulingGates: expected training.switchyard.dev/gang"),
        (altered(owned_pod.clone(), "hostNetwork", json!(true)), "got hostNetwork; expected none of them"),
        (altered(owned_pod.clone(), "hostPID", json!(true)), "got hostPID; expected none of them"),
        (altered(owned_pod.clone(), "volumes", host), "not in the chart value admissionPolicy.allow.hostPath"),
        (
            with(
                "/spec/containers/0",
                json!({"name": "trainer", "image": "i", "securityContext": {"privileged": true}}),
            ),
            "got privileged",
        ),
        (
            with(
                "/spec/containers/0",
                json!({"name": "trainer", "image": "i", "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}),
            ),
            "not in the chart value admissionPolicy.allow.capability.SYS_ADMIN",
        ),
    ] {
        scene.expect_refusal(Some(CONTROLLER), &pod, fragment).await?;
    }
    let made = scene.as_user(CONTROLLER, &["create", "-f", "-"], &owned_pod);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "theirs"}});
    let theirs = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "theirs"}});
    scene.must(&["create", "-n", &scene.namespace, "-f", "-"], &theirs.to_string());
    let patch = |what: &str, patch: Value| {
        scene.as_user(CONTROLLER, &["patch", what, "--type=merge", "-p", &patch.to_string()], &Value::Null)
    };
    for (action, ended, fragment) in [
        ("creates a Secret", scene.as_user(CONTROLLER, &create, &secret), "expected one TrainJob as its controller"),
        ("changes a ConfigMap", patch("configmap/theirs", json!({"data": {"a": "b"}})), "belongs to no TrainJob"),
        (
            "takes a ConfigMap",
            patch("configmap/theirs", json!({"metadata": {"labels": label, "ownerReferences": owner("1")}})),
            "belongs to no TrainJob",
        ),
        (
            "deletes a ConfigMap",
            scene.as_user(CONTROLLER, &["delete", "configmap/theirs"], &Value::Null),
            "belongs to no TrainJob",
        ),
        (
            "changes a pod's owner",
            patch(
                "pod/a-1-0",
                json!({"metadata": {"labels": {"training.switchyard.dev/job-uid": "2"}, "ownerReferences": owner("2")}}),
            ),
            "belongs to another TrainJob",
        ),
        (
            "changes an image",
            patch("pod/a-1-0", json!({"spec": {"containers": [{"name": "trainer", "image": "other"}]}})),
            "changes no image",
        ),
    ] {
        assert!(ended.code != Some(0) && ended.stderr.contains(fragment), "{action}: {}{}", ended.stdout, ended.stderr);
    }
    let lifted = patch("pod/a-1-0", json!({"spec": {"schedulingGates": null}}));
    assert_eq!(lifted.code, Some(0), "{}", lifted.stderr);
    let deleted = scene.as_user(CONTROLLER, &["delete", "pod/a-1-0", "--wait=false"], &Value::Null);
    assert_eq!(deleted.code, Some(0), "{}", deleted.stderr);
    Ok(())
}

/// Tries every kind that the controller creates, with each of its labels and with an
/// ownerReference, as the administrator, because RBAC allows the administrator everything.
async fn forgeries(scene: &Scene) -> Result<()> {
    let kinds = [
        ("v1", "Pod", json!({"spec": {"containers": [{"name": "a", "image": "image"}]}})),
        ("v1", "Service", json!({"spec": {"ports": [{"port": 80}]}})),
        ("v1", "ConfigMap", json!({})),
        ("v1", "Secret", json!({})),
        ("networking.k8s.io/v1", "NetworkPolicy", json!({"spec": {"podSelector": {}}})),
        ("policy/v1", "PodDisruptionBudget", json!({"spec": {"minAvailable": 1}})),
        ("resource.k8s.io/v1", "ResourceClaim", json!({"spec": {"devices": {}}})),
        (
            "training.switchyard.dev/v1alpha1",
            "PlacementSlice",
            json!({"spec": {"attempt": 1, "firstNode": 0, "shapes": [], "nodes": []}}),
        ),
    ];
    let of_job = |group: &str| json!([{"apiVersion": format!("{group}/v1alpha1"), "kind": "TrainJob", "name": "victim", "uid": "1"}]);
    let mut tried = 0;
    for (version, kind, rest) in &kinds {
        let object = |metadata: Value| {
            let mut object = rest.clone();
            (object["apiVersion"], object["kind"], object["metadata"]) = ((*version).into(), (*kind).into(), metadata);
            object["metadata"]["name"] = json!("forged");
            object["metadata"]["namespace"] = json!(scene.namespace);
            object
        };
        let label = |name: &str| format!("training.switchyard.dev/{name}");
        for name in ["job-uid", "job-name", "attempt", "node-rank", "rank"] {
            let fragment = format!("metadata.labels[{}]: only the controller of Switchyard sets it", label(name));
            scene.expect_refusal(None, &object(json!({"labels": {label(name): "1"}})), &fragment).await?;
            tried += 1;
        }
        let fragment = "metadata.ownerReferences: only the controller of Switchyard says that an object belongs to TrainJob victim";
        let ours = of_job("training.switchyard.dev");
        scene.expect_refusal(None, &object(json!({"ownerReferences": ours})), fragment).await?;
        tried += 1;
        for fine in [
            json!({}),
            json!({"ownerReferences": of_job("trainer.kubeflow.org")}),
            json!({"labels": {label("team"): "a"}}),
        ] {
            assert_eq!(scene.refusal(None, &object(fine.clone())).await?, None, "{kind} {fine}");
        }
    }
    assert_eq!(tried, 48);
    let mut child = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "child", "namespace": scene.namespace,
        "labels": {"training.switchyard.dev/job-uid": "1"}, "ownerReferences": of_job("training.switchyard.dev")}});
    child["metadata"]["ownerReferences"][0]["controller"] = json!(true);
    let ended = scene.as_user(CONTROLLER, &["create", "-f", "-"], &child);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let patch = |metadata: Value| {
        let patch = json!({"metadata": metadata}).to_string();
        scene.plane.kubectl(&["patch", "configmap", "child", "-n", &scene.namespace, "--type=merge", "-p", &patch])
    };
    let other = patch(json!({"labels": {"training.switchyard.dev/job-uid": "2"}}));
    assert!(other.stderr.contains("metadata.labels[training.switchyard.dev/job-uid]"), "{}", other.stderr);
    // The garbage collector removes ownerReferences.
    for fine in [json!({"annotations": {"a": "b"}}), json!({"ownerReferences": null})] {
        let ended = patch(fine.clone());
        assert_eq!(ended.code, Some(0), "{fine}: {}", ended.stderr);
    }
    let again = patch(json!({"ownerReferences": of_job("training.switchyard.dev")}));
    assert!(again.stderr.contains("metadata.ownerReferences"), "{}", again.stderr);
    Ok(())
}

#[test]
fn unexpected_outcomes_are_detected() {
    let all = cases();
    assert!(all.len() >= 60, "{} cases", all.len());
    let accepted = all.iter().find(|case| case.refused.is_empty()).unwrap();
    assert!(accepted.fault(Some("forbidden")).is_some_and(|fault| fault.contains("refused: forbidden")));
    let refused = all.iter().find(|case| !case.refused.is_empty()).unwrap();
    assert!(refused.fault(None).is_some_and(|fault| fault.contains("accepted; expected a refusal")));
    assert!(refused.fault(Some("forbidden for some other reason")).is_some_and(|fault| fault.contains("lacks")));
}
