//! Reads the kubelet's policies from its configuration file.
//!
//! `/configz` would require the permission `nodes/proxy`, which lets its holder run commands in
//! every pod. Policies set by kubelet flags or drop-in files are not detected.

use serde::Deserialize;
use std::path::Path;
use switchyard_crds::device_use::KubeletPolicies;
use switchyard_crds::gpu_topology::{Facts, GPUTopologyStatus, SourceState};
use switchyard_node_agent::Notes;

/// Far more than any configuration needs.
const MAX_BYTES: u64 = 1 << 20;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Configuration {
    kind: String,
    cpu_manager_policy: Option<String>,
    memory_manager_policy: Option<String>,
    topology_manager_policy: Option<String>,
    topology_manager_scope: Option<String>,
}

fn parse(text: &str) -> Result<KubeletPolicies, String> {
    let configuration: Configuration = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    if configuration.kind != "KubeletConfiguration" {
        return Err(format!("kind: got {}; expected KubeletConfiguration", configuration.kind));
    }
    let clip = |text: Option<String>| text.map(|text| text.chars().take(64).collect());
    Ok(KubeletPolicies {
        cpu_manager: clip(configuration.cpu_manager_policy),
        memory_manager: clip(configuration.memory_manager_policy),
        topology_manager: clip(configuration.topology_manager_policy),
        topology_manager_scope: clip(configuration.topology_manager_scope),
    })
}

fn read(path: &Path) -> Result<KubeletPolicies, String> {
    let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    let text = std::io::read_to_string(std::io::Read::take(file, MAX_BYTES)).map_err(|error| error.to_string())?;
    parse(&text)
}

/// Adds the policies to the facts, or the reason why they are unknown to the `host` source.
pub(crate) fn add_policies(facts: &mut GPUTopologyStatus, path: &Path) {
    match read(path) {
        Ok(policies) => facts.host.get_or_insert_default().kubelet = Some(policies),
        Err(error) => {
            let Some(source) = facts.sources.iter_mut().find(|source| source.facts == Facts::Host) else { return };
            let mut notes = Notes::default();
            if let Some(message) = source.message.take() {
                notes.add(message);
            }
            notes.add(format!("{}: {error}", path.display()));
            source.message = notes.message();
            if source.state == SourceState::Complete {
                source.state = SourceState::Partial;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_crds::gpu_topology::FactSource;

    #[test]
    fn policies_are_read_and_unset_ones_are_absent() {
        let text = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\ncpuManagerPolicy: static\n\
                    topologyManagerPolicy: single-numa-node\nauthentication: {x509: {clientCAFile: /ca}}\n";
        let policies = parse(text).unwrap();
        assert_eq!(policies.cpu_manager.as_deref(), Some("static"));
        assert_eq!(policies.topology_manager.as_deref(), Some("single-numa-node"));
        assert_eq!((policies.memory_manager, policies.topology_manager_scope), (None, None));
        assert_eq!(parse("kind: Pod").unwrap_err(), "kind: got Pod; expected KubeletConfiguration");
        assert!(parse("a: [").is_err() && parse("").is_err());
    }

    #[test]
    fn a_missing_file_is_noted() {
        let host =
            FactSource { facts: Facts::Host, source: "procfs".into(), state: SourceState::Complete, message: None };
        let mut facts = GPUTopologyStatus { sources: vec![host], ..GPUTopologyStatus::default() };
        let folder = tempfile::tempdir().unwrap();
        add_policies(&mut facts, &folder.path().join("none.yaml"));
        assert!(facts.host.is_none());
        let source = &facts.sources[0];
        assert_eq!(source.state, SourceState::Partial);
        assert!(source.message.as_deref().is_some_and(|text| text.contains("none.yaml: No such file")), "{source:?}");
    }
}
