//! Limits of an agent's token: its rights, and the policy that restricts it to its own node,
//! checked against `fence.yaml`.

use super::TIMEOUT;
use super::rights::plane;
use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchParams};
use kube::config::AuthInfo;
use kube::{Api, Client, Error};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Instant;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_tests::{ControlPlane, agent_token, pod_token};

/// One group of cells.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    tokens: Vec<String>,
    of: Vec<String>,
    does: Vec<String>,
    answer: String,
}

/// Token, operation and node, with the expected reply.
type Matrix = BTreeMap<[String; 3], String>;

const NODES: [&str; 2] = ["a", "b"];
/// Operations while the objects are missing.
const ANEW: [&str; 2] = ["create", "apply anew"];
/// Operations once they exist.
const THEN: [&str; 11] = [
    "get",
    "apply",
    "patch",
    "apply status",
    "patch status",
    "update",
    "update status",
    "delete",
    "delete collection",
    "list",
    "watch",
];

fn table() -> Result<Matrix> {
    let rows: Vec<Row> = serde_saphyr::from_str(include_str!("fence.yaml"))?;
    let mut matrix = Matrix::new();
    for row in &rows {
        for (token, does, node) in row
            .tokens
            .iter()
            .flat_map(|token| row.does.iter().flat_map(move |does| row.of.iter().map(move |node| (token, does, node))))
        {
            let cell = [token.clone(), does.clone(), node.clone()];
            ensure!(matrix.insert(cell.clone(), row.answer.clone()).is_none(), "two rows for {cell:?}");
        }
    }
    Ok(matrix)
}

/// A client for each token of the table.
async fn clients(plane: &ControlPlane) -> Result<BTreeMap<&'static str, Client>> {
    let tokens = [
        ("on a", Some(agent_token(plane, Some("a"))?)),
        ("on b", Some(agent_token(plane, Some("b"))?)),
        ("on no node", Some(pod_token(plane, "switchyard-node-agent", "agent-waits", None)?)),
        ("unbound", Some(agent_token(plane, None)?)),
        ("another", Some(pod_token(plane, "default", "another-on-a", Some("a"))?)),
        ("none", None),
    ];
    let mut clients = BTreeMap::new();
    for (name, token) in tokens {
        let mut config = plane.config().await?;
        config.auth_info = AuthInfo { token: token.map(Into::into), ..AuthInfo::default() };
        clients.insert(name, Client::try_from(config)?);
    }
    Ok(clients)
}

/// Sends one request that changes nothing.
async fn request(client: &Client, does: &str, node: &str) -> Result<(), Error> {
    let api = Api::<GPUTopology>::all(client.clone());
    let field = format!("metadata.name={node}");
    let post = PostParams { dry_run: true, ..PostParams::default() };
    let merge = PatchParams { dry_run: true, ..PatchParams::default() };
    let apply = PatchParams { dry_run: true, force: true, ..PatchParams::apply("test") };
    let mut object: Value = json!({"apiVersion": "training.switchyard.dev/v1alpha1", "kind": "GPUTopology",
        "metadata": {"name": node, "labels": {"seen": "yes"}}, "spec": {}, "status": {"gpuCount": 8}});
    if does.starts_with("update") {
        object["metadata"]["resourceVersion"] = "1".into();
    }
    let typed = serde_json::from_value::<GPUTopology>(object.clone()).map_err(Error::SerdeError);
    match does {
        "create" => api.create(&post, &typed?).await.map(drop),
        "apply" | "apply anew" => api.patch(node, &apply, &Patch::Apply(object)).await.map(drop),
        "patch" => api.patch(node, &merge, &Patch::Merge(object)).await.map(drop),
        "apply status" => api.patch_status(node, &apply, &Patch::Apply(object)).await.map(drop),
        "patch status" => api.patch_status(node, &merge, &Patch::Merge(object)).await.map(drop),
        "update" => api.replace(node, &post, &typed?).await.map(drop),
        "update status" => api.replace_status(node, &post, &typed?).await.map(drop),
        "delete" => api.delete(node, &DeleteParams::default().dry_run()).await.map(drop),
        "delete collection" => {
            let params = DeleteParams::default().dry_run();
            api.delete_collection(&params, &ListParams::default().fields(&field)).await.map(drop)
        }
        "list" => api.list(&ListParams::default().fields(&field)).await.map(drop),
        "watch" => api.watch(&WatchParams::default().fields(&field), "0").await.map(drop),
        _ => api.get(node).await.map(drop),
    }
}

/// Replies that differ from the table.
fn faults(expected: &Matrix, actual: &Matrix) -> Vec<String> {
    let is_expected =
        |expected: &str, answer: &str| if expected == "yes" { answer == expected } else { answer.contains(expected) };
    let mut faults = Vec::new();
    for (cell, answer) in actual {
        match expected.get(cell) {
            Some(expected) if is_expected(expected, answer) => {}
            Some(expected) => faults.push(format!("{cell:?}: got {answer}; expected {expected}")),
            None => faults.push(format!("{cell:?}: got {answer}; the table has no entry")),
        }
    }
    faults
}

/// Runs these operations with all tokens on all nodes until the server's replies match or the
/// deadline has passed, because a policy takes effect late.
async fn ask(
    clients: &BTreeMap<&'static str, Client>,
    expected: &Matrix,
    does: &[&str],
) -> Result<(usize, Vec<String>)> {
    let begin = Instant::now();
    loop {
        let cells = clients.iter().flat_map(|(token, client)| {
            does.iter().flat_map(move |does| {
                NODES.map(|node| async move {
                    let answer =
                        request(client, does, node).await.err().map_or("yes".to_string(), |error| error.to_string());
                    anyhow::Ok(([token, *does, node].map(str::to_string), answer))
                })
            })
        });
        let actual: Matrix = try_join_all(cells).await?.into_iter().collect();
        let faults = faults(expected, &actual);
        if faults.is_empty() || begin.elapsed() > TIMEOUT {
            return Ok((actual.len(), faults));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_can_write_only_its_own_report() -> Result<()> {
    let (plane, expected) = (plane(), table()?);
    for node in NODES {
        // Create the nodes: the pods of missing nodes would be garbage-collected, which invalidates
        // their tokens.
        let made = plane.kubectl_with(
            &["create", "-f", "-"],
            &json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}).to_string(),
        );
        ensure!(made.code == Some(0), "{}", made.stderr);
    }
    let clients = clients(plane).await?;
    let (anew, mut found) = ask(&clients, &expected, &ANEW).await?;
    let api = Api::<GPUTopology>::all(plane.client().await?);
    for node in NODES {
        api.create(&Default::default(), &serde_json::from_value(json!({"metadata": {"name": node}, "spec": {}}))?)
            .await?;
    }
    let (then, more) = ask(&clients, &expected, &THEN).await?;
    found.extend(more);
    println!("{} checks", anew + then);
    assert_eq!(anew + then, expected.len(), "the table lists requests that no test sends");
    assert!(found.is_empty(), "{}", found.join("\n"));
    for node in NODES {
        let labels = api.get(node).await?.metadata.labels;
        assert_eq!(labels, None, "a dry run has changed something");
    }
    Ok(())
}

#[test]
fn unexpected_answers_are_detected() -> Result<()> {
    let expected = table()?;
    let cell = |token: &str, does: &str, node: &str| [token, does, node].map(str::to_string);
    let one = |cell, answer: &str| faults(&expected, &Matrix::from([(cell, answer.to_string())]));
    assert!(one(cell("on a", "patch", "a"), "yes").is_empty());
    assert!(one(cell("on a", "patch", "b"), "yes")[0].contains("expected metadata.name: got b"));
    assert!(one(cell("on a", "delete", "a"), "expected a, the node of this agent")[0].contains("expected cannot"));
    assert!(one(cell("on c", "patch", "a"), "yes")[0].contains("has no entry"));
    let expected_answer = expected.get(&cell("unbound", "create", "a")).context("a row")?;
    assert!(expected_answer.contains("a token that names a node"));
    Ok(())
}
