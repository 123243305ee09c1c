//! Fabrics and clouds as data: required resources, variables to set, and variables to leave alone.
//! Packs ship with the program; an administrator's profile has the same form and overrides them.

use crate::variables::{self, nccl};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::sync::LazyLock;
use switchyard_core::quantity::Resources;
use switchyard_crds::gpu_topology::{GPUTopologyStatus, Nic};
use switchyard_topology::report::{self, INFINIBAND};

/// The packs, from most to least specific. The first match is used.
const PACKS: [&str; 10] = [
    include_str!("packs/aws-efa.yaml"),
    include_str!("packs/gcp-tcpxo.yaml"),
    include_str!("packs/gcp-tcpx.yaml"),
    include_str!("packs/gcp-rdma.yaml"),
    include_str!("packs/azure-nd.yaml"),
    include_str!("packs/oci-roce.yaml"),
    include_str!("packs/coreweave.yaml"),
    include_str!("packs/infiniband.yaml"),
    include_str!("packs/roce.yaml"),
    include_str!("packs/ethernet.yaml"),
];

/// A pack, or an administrator's profile.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Profile {
    pub name: String,
    /// Short description.
    #[serde(default)]
    pub title: String,
    /// Pack that it builds on. Only in an administrator's profile.
    #[serde(default)]
    pub extends: Option<String>,
    /// Nodes it applies to. Absent: all.
    #[serde(default)]
    pub detect: Option<Detect>,
    /// What carries data between nodes.
    #[serde(default)]
    pub transport: Option<Carrier>,
    /// Name of the network plugin for `transport: Plugin`, as `NCCL_NET` expects it.
    #[serde(default)]
    pub plugin: Option<String>,
    /// Resources that give a pod the fabric.
    #[serde(default)]
    pub resources: Vec<ResourceRule>,
    /// Size of `/dev/shm`, a quantity.
    #[serde(default)]
    pub shared_memory: Option<String>,
    /// Interface of the pod network inside a pod. Defaults to `eth0`, as container runtimes name
    /// it.
    #[serde(default)]
    pub pod_interface: Option<String>,
    /// Secondary networks of a pod, as Multus reads them from the annotation
    /// `k8s.v1.cni.cncf.io/networks`: names of NetworkAttachmentDefinitions in short form or JSON.
    #[serde(default)]
    pub networks: Option<String>,
    /// What the image provides.
    #[serde(default)]
    pub image: Option<ImageSettings>,
    /// Variables to set.
    #[serde(default)]
    pub settings: Vec<Setting>,
    /// Variables that are deliberately not set here.
    #[serde(default)]
    pub leave: Vec<Omitted>,
}

/// Conditions for the nodes that a pack applies to. All must match.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Detect {
    /// Resources that the node must offer.
    #[serde(default)]
    pub resources: Vec<String>,
    /// Labels, and prefixes of their values.
    #[serde(default)]
    pub labels: BTreeMap<String, Prefixes>,
    /// Link layer of the RDMA ports.
    #[serde(default)]
    pub link_layer: Option<LinkLayer>,
}

/// One or several prefixes of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefixes(pub Vec<String>);

impl<'de> Deserialize<'de> for Prefixes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Prefixes, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum OneOrMore {
            One(String),
            More(Vec<String>),
        }
        Ok(match OneOrMore::deserialize(deserializer)? {
            OneOrMore::One(one) => Prefixes(vec![one]),
            OneOrMore::More(more) => Prefixes(more),
        })
    }
}

/// Link layer of RDMA ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum LinkLayer {
    InfiniBand,
    /// RoCE.
    Ethernet,
    /// No RDMA port is up.
    None,
}

/// What carries data between nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum Carrier {
    /// NCCL's own transport over InfiniBand.
    InfiniBand,
    /// NCCL's own transport over converged Ethernet.
    RoCE,
    /// A network plugin.
    Plugin,
    /// TCP.
    Socket,
}

impl Carrier {
    /// Whether NCCL's own RDMA transport carries the data.
    pub fn is_verbs(self) -> bool {
        matches!(self, Carrier::InfiniBand | Carrier::RoCE)
    }
}

/// A resource that gives a pod the fabric.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ResourceRule {
    /// Its name, or a prefix followed by `*`.
    pub name: String,
    /// Number that a pod requests.
    #[serde(default)]
    pub count: Option<Count>,
    /// A fixed amount instead of a count.
    #[serde(default)]
    pub quantity: Option<String>,
}

/// Number of a resource that a pod requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum Count {
    /// One, which gives access to all devices.
    One,
    /// One for each NIC near the pod's GPUs.
    PerNIC,
    /// The pod's share of the node: all for a whole node.
    All,
}

/// What an image provides.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ImageSettings {
    /// A script that sets the environment. The command has to source it.
    #[serde(default)]
    pub script: Option<String>,
    /// A settings file for NCCL.
    #[serde(default)]
    pub conf: Option<String>,
    /// Link to its documentation.
    pub link: String,
}

/// A value for this fabric.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Setting {
    pub name: String,
    pub value: String,
    pub reason: String,
    /// Source of the recommendation.
    pub link: String,
}

/// A variable that is deliberately not set.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Omitted {
    pub name: String,
    pub reason: String,
    /// Source of the recommendation.
    pub link: String,
}

/// The parts of a node that profile selection needs.
#[derive(Debug, Clone, Copy)]
pub struct Site<'a> {
    pub labels: &'a BTreeMap<String, String>,
    /// Resources that the node offers.
    pub allocatable: &'a Resources,
    /// Report of its agent.
    pub facts: Option<&'a GPUTopologyStatus>,
}

/// Why a profile is unusable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: got {got}; expected {expected}")]
pub struct ProfileError {
    /// Path of the field.
    pub field: String,
    pub got: String,
    pub expected: String,
}

impl Profile {
    /// Parses and checks a profile.
    ///
    /// # Errors
    /// The text is not a profile, no program reads a variable, or a value is invalid.
    pub fn parse(text: &str) -> Result<Profile, ProfileError> {
        let wrong = |error: serde_saphyr::Error| ProfileError {
            field: "profile".into(),
            // The caller adds the prefix `error`.
            got: error.to_string().trim_start_matches("error: ").to_string(),
            expected: "the fields of docs/placement-and-fabric.md#packs-and-profiles".into(),
        };
        let mut profile: Profile = serde_saphyr::from_str(text).map_err(wrong)?;
        profile.check()?;
        if let Some(name) = profile.extends.take() {
            let Some(base) = find_pack(&name) else {
                let known: Vec<&str> = packs().iter().map(|pack| pack.name.as_str()).collect();
                return Err(ProfileError {
                    field: "extends".into(),
                    got: format!("`{name}`"),
                    expected: known.join(", "),
                });
            };
            profile = profile.merge_over(base.clone());
        }
        Ok(profile)
    }

    /// Checks that some program reads every variable and accepts its value, and that nothing is
    /// listed twice.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn check(&self) -> Result<(), ProfileError> {
        let fault = |field: String, got: &str, expected: &str| ProfileError {
            field,
            got: format!("`{got}`"),
            expected: expected.to_string(),
        };
        if self.name.is_empty() || self.name.len() > 64 {
            return Err(fault("name".into(), &self.name, "1 to 64 characters"));
        }
        for (index, setting) in self.settings.iter().enumerate() {
            let field = |of: &str| format!("settings[{index}].{of}");
            check_variable(&setting.name).map_err(|expected| fault(field("name"), &setting.name, &expected))?;
            if let Some(key) = nccl::find(&setting.name) {
                key.form.check(&setting.value).map_err(|expected| fault(field("value"), &setting.value, &expected))?;
            }
            if setting.value.len() > nccl::MAX_VALUE_LEN || setting.value.contains(['\n', '\r', '\0']) {
                let expected = "one line of at most 1023 bytes: NCCL cuts the rest of a line off";
                return Err(fault(field("value"), &setting.value.chars().take(32).collect::<String>(), expected));
            }
        }
        for (index, left) in self.leave.iter().enumerate() {
            let field = format!("leave[{index}].name");
            check_variable(&left.name).map_err(|expected| fault(field, &left.name, &expected))?;
            if self.settings.iter().any(|setting| setting.name == left.name) {
                let field = format!("leave[{index}].name");
                return Err(fault(field, &left.name, "a variable that `settings` does not set"));
            }
        }
        let plugin = self.transport == Some(Carrier::Plugin);
        if plugin != self.plugin.is_some() {
            let got = self.plugin.clone().unwrap_or_default();
            return Err(fault("plugin".into(), &got, "a name with transport Plugin, and none with any other"));
        }
        let networks = self.networks.as_deref();
        let is_networks = |text: &str| {
            let text = text.trim();
            let is_json = text.starts_with('[') && serde_json::from_str::<serde_json::Value>(text).is_ok();
            let short = |letter: char| letter.is_ascii_alphanumeric() || "-./@, ".contains(letter);
            is_json || (!text.is_empty() && text.chars().all(short))
        };
        if let Some(got) = networks.filter(|text| !is_networks(text)) {
            let expected = "names such as team/rail-0, team/rail-1@net2, or a JSON list, as Multus takes them";
            return Err(fault("networks".into(), got, expected));
        }
        for (index, rule) in self.resources.iter().enumerate() {
            if rule.count.is_some() == rule.quantity.is_some() {
                return Err(fault(format!("resources[{index}]"), &rule.name, "either count or quantity"));
            }
        }
        Ok(())
    }

    /// Fills the gaps of this profile from the pack it extends.
    fn merge_over(self, base: Profile) -> Profile {
        let settings: Vec<Setting> = {
            let own =
                |name: &str| self.settings.iter().any(|s| s.name == name) || self.leave.iter().any(|l| l.name == name);
            base.settings.into_iter().filter(|setting| !own(&setting.name)).collect()
        };
        let leave: Vec<Omitted> = {
            let own =
                |name: &str| self.settings.iter().any(|s| s.name == name) || self.leave.iter().any(|l| l.name == name);
            base.leave.into_iter().filter(|left| !own(&left.name)).collect()
        };
        Profile {
            title: if self.title.is_empty() { base.title } else { self.title },
            detect: self.detect.or(base.detect),
            plugin: if self.transport.is_some() { self.plugin } else { base.plugin },
            transport: self.transport.or(base.transport),
            resources: if self.resources.is_empty() { base.resources } else { self.resources },
            shared_memory: self.shared_memory.or(base.shared_memory),
            pod_interface: self.pod_interface.or(base.pod_interface),
            networks: self.networks.or(base.networks),
            image: self.image.or(base.image),
            settings: self.settings.into_iter().chain(settings).collect(),
            leave: self.leave.into_iter().chain(leave).collect(),
            name: self.name,
            extends: None,
        }
    }

    /// Whether it applies to this node.
    pub fn fits(&self, site: &Site<'_>) -> bool {
        let Some(detect) = &self.detect else { return true };
        let label = |(name, prefixes): (&String, &Prefixes)| {
            site.labels
                .get(name)
                .is_some_and(|value| prefixes.0.iter().any(|prefix| value.starts_with(prefix.as_str())))
        };
        detect.resources.iter().all(|name| site.allocatable.get(name) > 0)
            && detect.labels.iter().all(label)
            && detect.link_layer.is_none_or(|layer| site.facts.is_some_and(|facts| link_layer(facts) == Some(layer)))
    }
}

/// Checks that some program reads the variable. An NCCL variable must be read by a current release.
fn check_variable(name: &str) -> Result<(), String> {
    if let Some(key) = nccl::find(name) {
        return match key.gone {
            Some(version) => Err(format!("a variable that NCCL still reads: {name} is gone since {version}")),
            None => Ok(()),
        };
    }
    if name.starts_with(nccl::PREFIX) && variables::reader_of(name).is_none() {
        return Err("a variable of NCCL or of one of its plugins".into());
    }
    if variables::per_process(name) || variables::is_visible_devices(name) {
        return Err("a variable that launcher and device plugin leave to others".into());
    }
    if variables::is_name(name) { Ok(()) } else { Err("letters, digits and `_`, not beginning with a digit".into()) }
}

/// RDMA ports that serve training.
pub fn training_ports(facts: &GPUTopologyStatus) -> impl Iterator<Item = &Nic> {
    let ports = report::training_nics(facts).into_iter().map(|nic| &facts.nics[nic]);
    ports.filter(|nic| nic.rdma_device.is_some())
}

/// Link layer of the training RDMA ports; `None` if there are ports but their link layer is
/// unknown.
pub fn link_layer(facts: &GPUTopologyStatus) -> Option<LinkLayer> {
    let mut ports = training_ports(facts).peekable();
    if ports.peek().is_none() {
        return Some(LinkLayer::None);
    }
    let layer = ports.find_map(|nic| nic.link_layer.as_deref())?;
    Some(if layer == INFINIBAND { LinkLayer::InfiniBand } else { LinkLayer::Ethernet })
}

/// The packs that ship with the program.
pub fn packs() -> &'static [Profile] {
    static READ: LazyLock<Vec<Profile>> = LazyLock::new(|| {
        let parse = |text: &&str| serde_saphyr::from_str(text).expect("invariant: a test reads every pack");
        PACKS.iter().map(parse).collect()
    });
    &READ
}

/// The pack of this name.
pub fn find_pack(name: &str) -> Option<&'static Profile> {
    packs().iter().find(|pack| pack.name == name)
}

/// The pack that applies to all of these nodes; `None` if they differ or none applies.
pub fn detect<'a>(sites: impl IntoIterator<Item = Site<'a>>) -> Option<&'static Profile> {
    let mut found = sites.into_iter().map(|site| packs().iter().find(|pack| pack.fits(&site)));
    let first = found.next()??;
    found.all(|pack| pack.is_some_and(|pack| pack.name == first.name)).then_some(first)
}
