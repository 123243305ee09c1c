//! Reads the environment of a pod and checks it before any rank starts: one clear refusal instead of one from every
//! rank.

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
    /// Settings of the first rank of this pod.
    pub group: GroupConfig,
    /// Ranks per process.
    pub devices: u32,
    /// Set for a job with one node: what only this supervisor can provide to its ranks.
    pub alone: Option<Alone>,
}

/// Rendezvous and token of a job with one node.
pub(super) struct Alone {
    /// Where rank 0 listens; rank 0 gets this socket as its standard input.
    pub listener: Option<TcpListener>,
    pub rendezvous: String,
    /// A token in unnamed memory, which ranks inherit; `None` if a key file was given.
    pub token: Option<OwnedFd>,
}

impl Alone {
    fn new(key_file: bool) -> Result<Alone, TrainError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let bound = listener.and_then(|listener| Ok((listener.local_addr()?.to_string(), listener)));
        let (rendezvous, listener) =
            bound.map_err(|error| TrainError::Usage(format!("cannot listen on {}: {error}", Ipv4Addr::LOCALHOST)))?;
        let token = (!key_file).then(make_token).transpose();
        let token = token.map_err(|error| TrainError::Usage(format!("cannot make a token: {error}")))?;
        Ok(Alone { listener: Some(listener), rendezvous, token })
    }

    /// Path under which a rank opens the inherited token.
    pub fn key_path(&self) -> Option<String> {
        self.token.as_ref().map(|token| format!("/proc/self/fd/{}", token.as_raw_fd()))
    }
}

/// An unnamed file that children inherit.
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
        let alone = (variable(env::NUM_NODES).as_deref() == Some("1"))
            .then(|| Alone::new(variable(env::KEY_FILE).is_some()))
            .transpose()?;
        let own = |name: &str| match (name, &alone) {
            (env::LOCAL_RANK, _) => Some("0".to_string()),
            (env::RENDEZVOUS, Some(alone)) => Some(alone.rendezvous.clone()),
            (env::KEY_FILE, Some(alone)) => alone.key_path(),
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
        let settings = Settings { group, devices, alone };
        variable(env::FAULT).map(|text| Fault::parse(&text)).transpose()?;
        settings.check_run_dir()?;
        Ok(settings)
    }

    /// The lowest rank of this pod, from an environment that may yet be refused.
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
    pub fn leads(&self) -> bool {
        self.group.node_rank == 0
    }

    /// Rank 0 writes the trained model at the very end, which is too late to learn that it cannot.
    fn check_run_dir(&self) -> Result<(), TrainError> {
        let expected = "expected a directory that can be written to";
        let path = variable(env::RUN_DIR)
            .ok_or_else(|| TrainError::Usage(format!("{}: not set; {expected}", env::RUN_DIR)))?;
        if !self.leads() {
            return Ok(());
        }
        let wrong = |got: &str| TrainError::Usage(format!("{}: {path}: {got}; {expected}", env::RUN_DIR));
        if !Path::new(&path).is_dir() {
            return Err(wrong("no directory"));
        }
        rustix::fs::accessat(CWD, path.as_str(), Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS)
            .map_err(|errno| wrong(&errno.to_string()))
    }
}
