//! Formats the cluster as JSON.

use super::{ClusterTopology, NodeRow, Use};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// The body of a `ClusterTopology`.
pub(super) fn value(cluster: &ClusterTopology) -> Value {
    let levels: Vec<Value> = cluster
        .levels
        .iter()
        .map(|row| {
            let nvlink = if row.level.nvlink { "Joined" } else { "None" };
            json!({"key": row.key, "sharePermille": row.level.share, "nvlink": nvlink})
        })
        .collect();
    let mut body = json!({
        "gpus": cluster.nodes.iter().map(|node| node.gpus.len()).sum::<usize>(),
        "freeGPUs": cluster.nodes.iter().map(|node| node.free).sum::<usize>(),
        "nodesWithoutGPUs": cluster.without_gpus,
        "levels": levels,
        "nodes": cluster.nodes.iter().map(|node| node_value(cluster, node)).collect::<Vec<_>>(),
    });
    if let Some(taken_at) = cluster.taken_at {
        body["takenAt"] = json!(taken_at);
    }
    body
}

fn node_value(cluster: &ClusterTopology, node: &NodeRow) -> Value {
    let levels = cluster.levels.iter().zip(&node.domains);
    let domains: BTreeMap<&str, &str> =
        levels.filter_map(|(level, domain)| Some((level.key.as_str(), domain.as_deref()?))).collect();
    let mut body = json!({
        "name": node.name,
        "domains": domains,
        "freeGPUs": node.free,
        "gpus": node.gpus.iter().map(|(index, used)| gpu_value(cluster, *index, *used)).collect::<Vec<_>>(),
        "nicsDown": node.nics_down,
        "gpusWithoutNVLink": node.unlinked,
    });
    if let Some((up, all)) = node.nics {
        body["nics"] = json!({"up": up, "all": all});
    }
    if let Some(outward) = node.outward {
        body["outMegabytesPerSecond"] = json!(outward);
    }
    if let Some(why) = &node.excluded {
        body["excluded"] = json!(why.to_string());
    }
    body
}

/// `Counted` means that the user has this many GPUs, but which ones is unknown.
fn gpu_value(cluster: &ClusterTopology, index: u32, used: Use) -> Value {
    let (state, user) = match used {
        Use::Free => ("Free", None),
        Use::NotUsable => ("NotUsable", None),
        Use::Unknown => ("Unknown", None),
        Use::By(user) => ("Used", Some(user)),
        Use::Counted(user) => ("Counted", Some(user)),
    };
    let mut body = Map::from_iter([("index".to_owned(), json!(index)), ("state".to_owned(), json!(state))]);
    body.extend(user.map(|user| ("user".to_owned(), json!(cluster.users[user]))));
    Value::Object(body)
}
