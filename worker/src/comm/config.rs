//! Who this rank is, where it meets the others, and the secret they share.

use super::error::CommError;
use rustix::fs::{Mode, OFlags};
use std::{fmt, path::Path, str::FromStr, time::Duration};
use switchyard_worker_contract::env as names;

/// The secret of a job: 32 random bytes. It is never printed and never crosses a socket.
#[derive(Clone)]
pub struct Token([u8; 32]);

impl Token {
    /// Length of a token in bytes.
    pub const LEN: usize = 32;

    /// A token from its bytes.
    pub fn new(bytes: [u8; 32]) -> Token {
        Token(bytes)
    }

    pub(super) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Reads a token file: a regular file of exactly 32 bytes that group and others cannot read.
    pub fn from_file(path: &Path) -> Result<Token, CommError> {
        let fault = |got: String, expected: &'static str| CommError::KeyFile {
            path: path.display().to_string(),
            got,
            expected,
        };
        const READABLE: &str = "a readable file of 32 bytes with mode 0600";
        let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| fault(errno.to_string(), READABLE))?;
        // The mode is asked of the open file, so that it cannot be exchanged in between.
        let stat = rustix::fs::fstat(&fd).map_err(|errno| fault(errno.to_string(), READABLE))?;
        let mode = Mode::from_raw_mode(stat.st_mode).bits() & 0o777;
        if mode & 0o077 != 0 {
            return Err(fault(format!("mode {mode:04o}"), "no access for group and others (mode 0600 or 0400)"));
        }
        let mut bytes = [0u8; Token::LEN + 1];
        let mut filled = 0;
        while filled < bytes.len() {
            match rustix::io::read(&fd, &mut bytes[filled..]) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(fault(errno.to_string(), READABLE)),
            }
        }
        if filled != Token::LEN {
            let size = if filled > Token::LEN { "more than 32 bytes".to_owned() } else { format!("{filled} bytes") };
            return Err(fault(size, "exactly 32 bytes"));
        }
        let mut token = [0u8; Token::LEN];
        token.copy_from_slice(&bytes[..Token::LEN]);
        Ok(Token(token))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Which transport may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Force {
    /// Chosen by where the ranks are.
    #[default]
    Auto,
    /// Shared memory only; an error when the ranks are on several hosts.
    Shm,
    /// A TCP ring over all ranks, wherever they are.
    Tcp,
}

impl Force {
    /// The word in the environment.
    pub fn word(self) -> &'static str {
        match self {
            Force::Auto => "auto",
            Force::Shm => "shm",
            Force::Tcp => "tcp",
        }
    }
}

/// Everything a rank must know to join its group.
#[derive(Debug, Clone)]
pub struct GroupConfig {
    /// Name of the job.
    pub job: String,
    /// Attempt, from 1; a process of another attempt is refused.
    pub attempt: u32,
    /// Rank of the node, from 0.
    pub node_rank: u32,
    /// Nodes of the job.
    pub num_nodes: u32,
    /// Processes on each node.
    pub procs_per_node: u32,
    /// Rank of the process on its node, from 0.
    pub local_rank: u32,
    /// `ADDRESS:PORT` or `HOST:PORT` where rank 0 listens. Names are resolved again with every try.
    pub rendezvous: String,
    /// The secret of the job.
    pub key: Token,
    /// Which transport may be used; must be the same on all ranks.
    pub transport: Force,
    /// Ranks with the same identity share memory. Empty: found out from the system.
    pub host_id: String,
    /// Silence after which a peer counts as failed.
    pub peer_timeout: Duration,
    /// Time within which the group must be complete.
    pub connect_timeout: Duration,
}

impl GroupConfig {
    /// Default of [`GroupConfig::connect_timeout`].
    pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
    /// Default of [`GroupConfig::peer_timeout`].
    pub const PEER_TIMEOUT: Duration = Duration::from_secs(10);

    /// Reads the configuration from the environment the launcher sets. Errors name the variable.
    pub fn from_env() -> Result<GroupConfig, CommError> {
        GroupConfig::from_lookup(&|name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned()))
    }

    /// Checks what a user may set, before there is a group: the launcher asks this once, and no rank starts when it is wrong.
    ///
    /// # Errors
    /// The name of the variable, what was got and what was expected.
    pub fn check_settings() -> Result<(), CommError> {
        settings(&|name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned())).map(drop)
    }

    fn from_lookup(lookup: &dyn Fn(&str) -> Option<String>) -> Result<GroupConfig, CommError> {
        let num_nodes: u32 = number(lookup, names::NUM_NODES, "a number from 1 up", None)?;
        let procs_per_node: u32 = number(lookup, names::PROCS_PER_NODE, "a number from 1 up", None)?;
        let key_path = required(lookup, names::KEY_FILE, "the path of a key file")?;
        let (transport, timeout) = settings(lookup)?;
        let config = GroupConfig {
            job: required(lookup, names::JOB, "the name of the job")?,
            attempt: number(lookup, names::ATTEMPT, "a number from 1 up", None)?,
            node_rank: number(lookup, names::NODE_RANK, "a number below the number of nodes", Some(num_nodes))?,
            num_nodes,
            procs_per_node,
            local_rank: number(
                lookup,
                names::LOCAL_RANK,
                "a number below the processes per node",
                Some(procs_per_node),
            )?,
            rendezvous: required(lookup, names::RENDEZVOUS, "ADDRESS:PORT")?,
            key: Token::from_file(Path::new(&key_path))?,
            transport,
            host_id: lookup(names::HOST_ID).unwrap_or_default(),
            peer_timeout: timeout,
            connect_timeout: GroupConfig::CONNECT_TIMEOUT,
        };
        config.check()?;
        Ok(config)
    }

    /// Global rank of this process.
    pub fn rank(&self) -> u32 {
        self.node_rank * self.procs_per_node + self.local_rank
    }

    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.num_nodes.saturating_mul(self.procs_per_node)
    }

    pub(super) fn check(&self) -> Result<(), CommError> {
        let valid = self.num_nodes > 0
            && self.procs_per_node > 0
            && self.world() <= MAX_WORLD
            && self.node_rank < self.num_nodes
            && self.local_rank < self.procs_per_node;
        if !valid {
            return Err(CommError::Group {
                got: format!(
                    "node {} of {}, process {} of {}",
                    self.node_rank, self.num_nodes, self.local_rank, self.procs_per_node
                ),
                expected: format!("ranks below their counts and 1 to {MAX_WORLD} processes in all"),
            });
        }
        if self.world() > 1 && self.rendezvous.rsplit_once(':').is_none_or(|(_, port)| u16::from_str(port).is_err()) {
            return Err(variable(names::RENDEZVOUS, &self.rendezvous, "ADDRESS:PORT"));
        }
        Ok(())
    }
}

/// Largest group. Bounds the size of the roster.
pub(super) const MAX_WORLD: u32 = 4096;

fn variable(name: &'static str, got: &str, expected: &str) -> CommError {
    let got: String = got.chars().take(80).collect();
    CommError::Variable { name, got: format!("{got:?}"), expected: expected.to_owned() }
}

/// Transport and peer timeout, which a user may set.
fn settings(lookup: &dyn Fn(&str) -> Option<String>) -> Result<(Force, Duration), CommError> {
    let transport = match lookup(names::TRANSPORT).as_deref() {
        None | Some("" | "auto") => Force::Auto,
        Some("shm") => Force::Shm,
        Some("tcp") => Force::Tcp,
        Some(other) => return Err(variable(names::TRANSPORT, other, "auto, shm or tcp")),
    };
    let timeout = match lookup(names::PEER_TIMEOUT_SECONDS) {
        None => GroupConfig::PEER_TIMEOUT,
        Some(text) => match text.parse::<f64>() {
            Ok(seconds) if (0.1..=86_400.0).contains(&seconds) => Duration::from_secs_f64(seconds),
            _ => return Err(variable(names::PEER_TIMEOUT_SECONDS, &text, "seconds from 0.1 to 86400")),
        },
    };
    Ok((transport, timeout))
}

fn required(
    lookup: &dyn Fn(&str) -> Option<String>,
    name: &'static str,
    expected: &'static str,
) -> Result<String, CommError> {
    match lookup(name) {
        Some(value) if !value.is_empty() => Ok(value),
        Some(_) => Err(variable(name, "", expected)),
        None => Err(CommError::Variable { name, got: "nothing (not set)".to_owned(), expected: expected.to_owned() }),
    }
}

fn number(
    lookup: &dyn Fn(&str) -> Option<String>,
    name: &'static str,
    expected: &'static str,
    below: Option<u32>,
) -> Result<u32, CommError> {
    let text = required(lookup, name, expected)?;
    match (text.parse::<u32>(), below) {
        (Ok(value), Some(limit)) if value < limit => Ok(value),
        (Ok(value), None) if value > 0 => Ok(value),
        (_, Some(limit)) => Err(variable(name, &text, &format!("{expected} ({limit})"))),
        (_, None) => Err(variable(name, &text, expected)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::HashMap, io::Write, os::unix::fs::PermissionsExt};

    fn key_file(mode: u32, len: usize) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&vec![7; len]).unwrap();
        file.as_file().set_permissions(std::fs::Permissions::from_mode(mode)).unwrap();
        file
    }

    fn environment(key: &Path) -> HashMap<&'static str, String> {
        HashMap::from([
            (names::JOB, "job".to_owned()),
            (names::ATTEMPT, "2".to_owned()),
            (names::NODE_RANK, "1".to_owned()),
            (names::NUM_NODES, "2".to_owned()),
            (names::PROCS_PER_NODE, "3".to_owned()),
            (names::LOCAL_RANK, "2".to_owned()),
            (names::RENDEZVOUS, "127.0.0.1:29400".to_owned()),
            (names::KEY_FILE, key.display().to_string()),
        ])
    }

    fn read(env: &HashMap<&'static str, String>) -> Result<GroupConfig, CommError> {
        GroupConfig::from_lookup(&|name| env.get(name).cloned())
    }

    #[test]
    fn a_complete_environment_is_read() {
        let key = key_file(0o600, 32);
        let config = read(&environment(key.path())).unwrap();
        assert_eq!((config.rank(), config.world(), config.attempt), (5, 6, 2));
        assert_eq!(config.transport, Force::Auto);
        assert!(!format!("{config:?}").contains("7, 7"), "the token must not be printed");
    }

    #[test]
    fn every_fault_names_its_variable() {
        let key = key_file(0o600, 32);
        for (name, value) in [
            (names::ATTEMPT, "0"),
            (names::ATTEMPT, "one"),
            (names::NODE_RANK, "2"),
            (names::LOCAL_RANK, "3"),
            (names::NUM_NODES, "-1"),
            (names::RENDEZVOUS, "127.0.0.1"),
            (names::TRANSPORT, "rdma"),
            (names::PEER_TIMEOUT_SECONDS, "soon"),
            (names::JOB, ""),
        ] {
            let mut env = environment(key.path());
            env.insert(name, value.to_owned());
            let text = read(&env).unwrap_err().to_string();
            assert!(text.contains(name) && text.contains("expected"), "{text}");
            env.remove(name);
            if name != names::TRANSPORT && name != names::PEER_TIMEOUT_SECONDS {
                assert!(read(&env).unwrap_err().to_string().contains("not set"));
            }
        }
    }

    #[test]
    fn a_key_that_others_can_read_or_of_wrong_size_is_refused() {
        for (mode, len, word) in
            [(0o640, 32, "mode 0640"), (0o604, 32, "mode 0604"), (0o600, 31, "31 bytes"), (0o600, 33, "more than 32")]
        {
            let key = key_file(mode, len);
            let text = Token::from_file(key.path()).unwrap_err().to_string();
            assert!(text.contains(word), "{text}");
        }
        assert!(Token::from_file(Path::new("/nonexistent/key")).is_err());
    }
}
