//! A rank's identity, its rendezvous, and the job's shared secret.

use super::error::CommError;
use rustix::fs::{FileType, Mode, OFlags};
use std::{fmt, path::Path, str::FromStr, time::Duration};
use switchyard_worker_contract::env as names;

/// Secret of a job or of one attempt: 32 random bytes. It is never printed and never sent over a
/// socket.
#[derive(Clone)]
pub struct Token([u8; 32]);

impl Token {
    /// Length of a token in bytes.
    pub const LEN: usize = 32;

    pub fn new(bytes: [u8; 32]) -> Token {
        Token(bytes)
    }

    pub(super) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Reads a token file: a regular file of exactly 32 bytes that other users cannot read.
    ///
    /// Group read access is allowed if the file belongs to another user, as in a Kubernetes Secret
    /// volume: its files belong to root, and their group is the pod's. Symbolic links are followed,
    /// because a Secret volume consists of them.
    pub fn from_file(path: &Path) -> Result<Token, CommError> {
        let invalid = |got: String, expected: &'static str| CommError::KeyFile {
            path: path.display().to_string(),
            got,
            expected,
        };
        const READABLE: &str = "a readable regular file of 32 bytes with mode 0600";
        let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())
            .map_err(|errno| invalid(errno.to_string(), READABLE))?;
        // The mode comes from the open file, so the file cannot be swapped between the check and
        // the read.
        let stat = rustix::fs::fstat(&fd).map_err(|errno| invalid(errno.to_string(), READABLE))?;
        if !FileType::from_raw_mode(stat.st_mode).is_file() {
            return Err(invalid("something other than a regular file".to_owned(), READABLE));
        }
        let mode = Mode::from_raw_mode(stat.st_mode).bits() & 0o777;
        let user = rustix::process::geteuid();
        let own = stat.st_uid == user.as_raw();
        // The kubelet writes Secret volumes as root, for a group; a pod that runs as root therefore
        // owns the files.
        check_permissions(mode, own && !user.is_root()).map_err(|expected| {
            let owner = if own { "this user".to_owned() } else { format!("user {}", stat.st_uid) };
            invalid(format!("mode {mode:04o}, owned by {owner}"), expected)
        })?;
        let mut bytes = [0u8; Token::LEN + 1];
        let mut filled = 0;
        while filled < bytes.len() {
            match rustix::io::read(&fd, &mut bytes[filled..]) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(invalid(errno.to_string(), READABLE)),
            }
        }
        if filled != Token::LEN {
            let size = if filled > Token::LEN { "more than 32 bytes".to_owned() } else { format!("{filled} bytes") };
            return Err(invalid(size, "exactly 32 bytes"));
        }
        let mut token = [0u8; Token::LEN];
        token.copy_from_slice(&bytes[..Token::LEN]);
        Ok(Token(token))
    }
}

/// Checks that a file with these permissions keeps a token secret; the error is the expected mode.
/// `own`: the file belongs to this user, who is not root.
fn check_permissions(mode: u32, own: bool) -> Result<(), &'static str> {
    if mode & 0o007 != 0 {
        return Err("no access for others (mode 0600, 0400, or 0440 in a Secret volume)");
    }
    match mode & 0o070 {
        0 => Ok(()),
        0o040 if !own => Ok(()),
        0o040 => Err("no access for the group to a file of this user (mode 0600 or 0400)"),
        _ => Err("a group that can read at most (mode 0600, 0400, or 0440 in a Secret volume)"),
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Allowed transports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Force {
    /// Chosen by the ranks' locations.
    #[default]
    Auto,
    /// Shared memory only; an error if the ranks are on several hosts.
    Shm,
    /// TCP between all ranks, even on one host.
    Tcp,
}

impl Force {
    /// Name in the environment variable.
    pub fn word(self) -> &'static str {
        match self {
            Force::Auto => "auto",
            Force::Shm => "shm",
            Force::Tcp => "tcp",
        }
    }
}

/// Everything a rank needs to join its group.
#[derive(Debug, Clone)]
pub struct GroupConfig {
    pub job: String,
    /// Counted from 1; processes of other attempts are refused.
    pub attempt: u32,
    /// Counted from 0.
    pub node_rank: u32,
    pub num_nodes: u32,
    pub procs_per_node: u32,
    /// Rank of the process on its node, counted from 0.
    pub local_rank: u32,
    /// Parameter servers in processes of their own; the same on all of them and all ranks.
    pub servers: u32,
    /// The parameter server of this process, which is then no rank.
    pub server: Option<u32>,
    /// `ADDRESS:PORT` or `HOST:PORT` where rank 0 listens. Names are resolved again on every try.
    pub rendezvous: String,
    pub key: Token,
    /// Must be the same on all ranks.
    pub transport: Force,
    /// Ranks with the same identity share memory. Empty: detected.
    pub host_id: String,
    /// Silence after which a peer is considered failed.
    pub peer_timeout: Duration,
    /// Time limit for all ranks to join.
    pub connect_timeout: Duration,
}

impl GroupConfig {
    /// Default of [`GroupConfig::connect_timeout`].
    pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(300);
    /// Default of [`GroupConfig::peer_timeout`].
    pub const PEER_TIMEOUT: Duration = Duration::from_secs(10);

    /// Reads the configuration from the environment that the launcher sets. Errors name the
    /// variable.
    pub fn from_env() -> Result<GroupConfig, CommError> {
        GroupConfig::from_lookup(&from_environment)
    }

    /// Validates the user's settings before there is a group. The launcher calls this once, so that
    /// invalid settings are rejected before any rank starts.
    ///
    /// # Errors
    /// The name of the variable, its value and what was expected.
    pub fn check_settings() -> Result<(), CommError> {
        settings(&from_environment).map(drop)
    }

    /// [`GroupConfig::from_env`] for any source of variables.
    ///
    /// # Errors
    /// The name of the variable, its value and what was expected.
    pub fn from_lookup(lookup: &dyn Fn(&str) -> Option<String>) -> Result<GroupConfig, CommError> {
        let num_nodes: u32 = number(lookup, names::NUM_NODES, "a number from 1 up", None)?;
        let procs_per_node: u32 = number(lookup, names::PROCS_PER_NODE, "a number from 1 up", None)?;
        let key_path = required(lookup, names::KEY_FILE, "the path of a key file")?;
        let settings = settings(lookup)?;
        let expected = "the number of a parameter server, from 0";
        let server = lookup(names::SERVER).map(|_| number(lookup, names::SERVER, expected, Some(MAX_WORLD)));
        let server = server.transpose()?;
        let of_rank = |name, expected, below| match server {
            Some(_) => Ok(0),
            None => number(lookup, name, expected, Some(below)),
        };
        let config = GroupConfig {
            job: required(lookup, names::JOB, "the name of the job")?,
            attempt: number(lookup, names::ATTEMPT, "a number from 1 up", None)?,
            node_rank: of_rank(names::NODE_RANK, "a number below the number of nodes", num_nodes)?,
            num_nodes,
            procs_per_node,
            local_rank: of_rank(names::LOCAL_RANK, "a number below the processes per node", procs_per_node)?,
            servers: server.map_or(0, |server| server + 1),
            server,
            rendezvous: required(lookup, names::RENDEZVOUS, "ADDRESS:PORT")?,
            key: Token::from_file(Path::new(&key_path))?,
            transport: settings.transport,
            host_id: lookup(names::HOST_ID).unwrap_or_default(),
            peer_timeout: settings.peer_timeout,
            connect_timeout: settings.connect_timeout,
        };
        config.check()?;
        Ok(config)
    }

    /// Rank of this process among all ranks. Parameter servers are counted after the ranks.
    pub fn rank(&self) -> u32 {
        match self.server {
            Some(server) => self.world() + server,
            None => self.node_rank * self.procs_per_node + self.local_rank,
        }
    }

    pub fn world(&self) -> u32 {
        self.num_nodes.saturating_mul(self.procs_per_node)
    }

    /// Number of ranks and of parameter servers in processes of their own.
    pub(super) fn members(&self) -> u32 {
        self.world() + self.servers
    }

    pub(super) fn check(&self) -> Result<(), CommError> {
        let valid = self.num_nodes > 0
            && self.procs_per_node > 0
            && self.world().saturating_add(self.servers) <= MAX_WORLD
            && self.server.is_none_or(|server| server < self.servers)
            && self.node_rank < self.num_nodes
            && self.local_rank < self.procs_per_node;
        if !valid {
            return Err(CommError::Group {
                got: format!(
                    "node {} of {}, process {} of {}, {} parameter servers",
                    self.node_rank, self.num_nodes, self.local_rank, self.procs_per_node, self.servers
                ),
                expected: format!("ranks below their counts and 1 to {MAX_WORLD} processes in all"),
            });
        }
        if self.members() > 1 && self.rendezvous.rsplit_once(':').is_none_or(|(_, port)| u16::from_str(port).is_err()) {
            return Err(variable(names::RENDEZVOUS, &self.rendezvous, "ADDRESS:PORT"));
        }
        Ok(())
    }
}

/// Largest group; bounds the size of the roster.
pub(super) const MAX_WORLD: u32 = 4096;

fn variable(name: &'static str, got: &str, expected: &str) -> CommError {
    let got: String = got.chars().take(80).collect();
    CommError::Variable { name, got: format!("{got:?}"), expected: expected.to_owned() }
}

fn from_environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// User settings.
struct Settings {
    transport: Force,
    peer_timeout: Duration,
    connect_timeout: Duration,
}

fn settings(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Settings, CommError> {
    let transport = match lookup(names::TRANSPORT).as_deref() {
        None | Some("" | "auto") => Force::Auto,
        Some("shm") => Force::Shm,
        Some("tcp") => Force::Tcp,
        Some(other) => return Err(variable(names::TRANSPORT, other, "auto, shm or tcp")),
    };
    let seconds = |name, default| match lookup(name) {
        None => Ok(default),
        Some(text) => match text.parse::<f64>() {
            Ok(seconds) if (0.1..=86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
            _ => Err(variable(name, &text, "seconds from 0.1 to 86400")),
        },
    };
    Ok(Settings {
        transport,
        peer_timeout: seconds(names::PEER_TIMEOUT_SECONDS, GroupConfig::PEER_TIMEOUT)?,
        connect_timeout: seconds(names::CONNECT_TIMEOUT_SECONDS, GroupConfig::CONNECT_TIMEOUT)?,
    })
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
    fn a_parameter_server_is_counted_after_the_ranks() {
        let key = key_file(0o600, 32);
        let mut env = environment(key.path());
        [names::NODE_RANK, names::LOCAL_RANK].iter().for_each(|name| drop(env.remove(name)));
        env.insert(names::SERVER, "1".to_owned());
        let config = read(&env).unwrap();
        assert_eq!((config.rank(), config.world(), config.server), (7, 6, Some(1)));
        env.insert(names::SERVER, "-1".to_owned());
        assert!(read(&env).unwrap_err().to_string().starts_with(names::SERVER));
        assert!(GroupConfig { servers: 1, ..config }.check().is_err(), "there is no second server");
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
            (names::CONNECT_TIMEOUT_SECONDS, "0"),
            (names::JOB, ""),
        ] {
            let mut env = environment(key.path());
            env.insert(name, value.to_owned());
            let text = read(&env).unwrap_err().to_string();
            assert!(text.contains(name) && text.contains("expected"), "{text}");
            env.remove(name);
            if !names::USER_SETTABLE.contains(&name) {
                assert!(read(&env).unwrap_err().to_string().contains("not set"));
            }
        }
    }

    #[test]
    fn a_key_readable_by_others_or_of_wrong_size_is_refused() {
        for (mode, len, word) in
            [(0o660, 32, "mode 0660"), (0o604, 32, "mode 0604"), (0o600, 31, "31 bytes"), (0o600, 33, "more than 32")]
        {
            let key = key_file(mode, len);
            let text = Token::from_file(key.path()).unwrap_err().to_string();
            assert!(text.contains(word), "{text}");
        }
        for (path, word) in [("/nonexistent/key", "No such file"), ("/", "other than a regular file")] {
            let text = Token::from_file(Path::new(path)).unwrap_err().to_string();
            assert!(text.contains(word), "{text}");
        }
    }

    #[test]
    fn group_read_is_allowed_only_for_files_of_other_users() {
        for (mode, own, allowed) in [
            (0o600, true, true),
            (0o400, true, true),
            (0o400, false, true),
            (0o440, false, true),
            (0o640, false, true),
            (0o440, true, false),
            (0o460, false, false),
            (0o450, false, false),
            (0o444, false, false),
            (0o441, false, false),
        ] {
            assert_eq!(check_permissions(mode, own).is_ok(), allowed, "{mode:04o}, own: {own}");
        }
    }

    #[test]
    fn symlinks_of_a_secret_volume_are_followed() {
        let volume = tempfile::tempdir().unwrap();
        let revision = volume.path().join("..2026_01_01");
        std::fs::create_dir(&revision).unwrap();
        std::fs::copy(key_file(0o400, 32).path(), revision.join("key")).unwrap();
        std::os::unix::fs::symlink("..2026_01_01", volume.path().join("..data")).unwrap();
        std::os::unix::fs::symlink("..data/key", volume.path().join("key")).unwrap();
        assert_eq!(Token::from_file(&volume.path().join("key")).unwrap().bytes(), &[7; 32]);
    }
}
