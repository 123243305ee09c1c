//! Reads the environment of a pod and checks it before any rank starts, so that there is one clear
//! error instead of one from every rank.

use crate::comm::{GroupConfig, Token};
use crate::process::variable;
use crate::train::fault::Fault;
use crate::train::{TrainError, config};
use rustix::fs::{Access, AtFlags, CWD, MemfdFlags, Mode};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use switchyard_worker_contract::env;

/// Settings shared by all ranks of a pod.
pub(super) struct Settings {
    /// Group settings of this pod's first rank.
    pub group: GroupConfig,
    /// Ranks per process.
    pub devices: u32,
    /// Set for a single-node job.
    pub single_node: Option<SingleNode>,
}

/// Rendezvous and token of a single-node job; only this supervisor can provide them.
pub(super) struct SingleNode {
    /// Rank 0's listener, passed to it as standard input.
    pub listener: Option<TcpListener>,
    pub rendezvous: String,
    /// A token in an unnamed file that ranks inherit; `None` if a key file was given.
    pub token: Option<OwnedFd>,
}

impl SingleNode {
    fn new(key_file: bool) -> Result<SingleNode, TrainError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let bound = listener.and_then(|listener| Ok((listener.local_addr()?.to_string(), listener)));
        let (rendezvous, listener) =
            bound.map_err(|error| TrainError::Usage(format!("cannot listen on {}: {error}", Ipv4Addr::LOCALHOST)))?;
        let token = (!key_file).then(make_token).transpose();
        let token = token.map_err(|error| TrainError::Usage(format!("cannot create a token: {error}")))?;
        Ok(SingleNode { listener: Some(listener), rendezvous, token })
    }

    /// Path at which a rank opens the inherited token.
    pub fn key_path(&self) -> Option<String> {
        self.token.as_ref().map(|token| format!("/proc/self/fd/{}", token.as_raw_fd()))
    }
}

/// Creates a random token in an unnamed file that children inherit.
fn make_token() -> std::io::Result<OwnedFd> {
    let mut token = [0; Token::LEN];
    getrandom::fill(&mut token).map_err(|error| std::io::Error::other(error.to_string()))?;
    let file = rustix::fs::memfd_create("switchyard-token", MemfdFlags::empty())?;
    rustix::fs::fchmod(&file, Mode::RUSR)?;
    if rustix::io::write(&file, &token)? != token.len() {
        return Err(std::io::ErrorKind::WriteZero.into());
    }
    Ok(file)
}

impl Settings {
    /// Reads and checks everything that does not need the data.
    ///
    /// # Errors
    /// The name of the variable or file, its value and what was expected.
    pub fn from_env() -> Result<Settings, TrainError> {
        let single_node = (variable(env::NUM_NODES).as_deref() == Some("1"))
            .then(|| SingleNode::new(variable(env::KEY_FILE).is_some()))
            .transpose()?;
        let own = |name: &str| match (name, &single_node) {
            (env::LOCAL_RANK, _) => Some("0".to_string()),
            (env::RENDEZVOUS, Some(single_node)) => Some(single_node.rendezvous.clone()),
            (env::KEY_FILE, Some(single_node)) => single_node.key_path(),
            _ => None,
        };
        let group = GroupConfig::from_lookup(&|name| own(name).or_else(|| variable(name)))
            .map_err(|error| TrainError::Usage(error.to_string()))?;
        let devices = config::from_env()?.devices_per_process.max(1);
        if !group.procs_per_node.is_multiple_of(devices) {
            let (name, ranks) = (env::PROCS_PER_NODE, group.procs_per_node);
            let text = format!("{name}: got {ranks}; expected a multiple of devicesPerProcess, which is {devices}");
            return Err(TrainError::Usage(text));
        }
        let settings = Settings { group, devices, single_node };
        variable(env::FAULT).map(|text| Fault::parse(&text)).transpose()?;
        settings.check_run_dir()?;
        Ok(settings)
    }

    /// The lowest rank of this pod, from an environment that may still be invalid.
    pub fn first_rank_of_env() -> u32 {
        let number = |name| variable(name).and_then(|text| text.parse::<u32>().ok()).unwrap_or_default();
        number(env::NODE_RANK).saturating_mul(number(env::PROCS_PER_NODE))
    }

    /// The lowest rank of this pod.
    pub fn first_rank(&self) -> u32 {
        self.group.rank()
    }

    pub fn processes(&self) -> u32 {
        self.group.procs_per_node / self.devices
    }

    /// Whether rank 0 is in this pod.
    pub fn has_rank_zero(&self) -> bool {
        self.group.node_rank == 0
    }

    /// Checks the directory now, because rank 0 writes the trained model only at the very end.
    fn check_run_dir(&self) -> Result<(), TrainError> {
        let expected = "expected a directory that can be written to";
        let path = variable(env::RUN_DIR)
            .ok_or_else(|| TrainError::Usage(format!("{}: not set; {expected}", env::RUN_DIR)))?;
        if !self.has_rank_zero() {
            return Ok(());
        }
        let invalid = |got: &str| TrainError::Usage(format!("{}: {path}: {got}; {expected}", env::RUN_DIR));
        if !Path::new(&path).is_dir() {
            return Err(invalid("no directory"));
        }
        rustix::fs::accessat(CWD, path.as_str(), Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS)
            .map_err(|errno| invalid(&errno.to_string()))
    }
}
