//! Runs the real node agent as a process, on a fake host, over a connection to the API server that
//! tests can cut.

use crate::ports::free_port;
use crate::{ControlPlane, Daemon, Options, page, programs, root};
use anyhow::{Context, Result, ensure};
use rustix::fs::{FileType, Mode, OFlags};
use serde_json::json;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// File that holds the kernel release, a fact that tests change.
const KERNEL: &str = "proc/sys/kernel/osrelease";
/// Path of the NVML library on the host; it does not exist at first.
const NVML: &str = "nvml.so";
/// The agents' namespace.
const SYSTEM: &str = "switchyard-system";
/// The agents' service account.
const ACCOUNT: &str = "switchyard-node-agent";

/// Starts a control plane for agents, with the chart rendered with these helm arguments, and an
/// audit log.
///
/// # Errors
/// The control plane does not start, or rejects the chart.
pub fn agent_plane(chart: &[&str]) -> Result<ControlPlane> {
    let plane = ControlPlane::start(&Options { controller_manager: true, audit: true, ..Options::default() })?;
    plane.install_crds_now()?;
    plane.apply_chart(chart)?;
    Ok(plane)
}

/// Returns the path of the agent, building it if necessary.
///
/// # Panics
/// The build failed.
pub fn agent_program() -> &'static Path {
    programs::agent()
}

/// A fake host: symlinks to this machine, with separate files where a test changes something.
#[derive(Debug)]
pub struct Host {
    folder: TempDir,
}

impl Host {
    /// Creates a host like this machine, but with a different kernel release.
    ///
    /// # Errors
    /// Its files cannot be created.
    pub fn new() -> Result<Host> {
        let host = Host { folder: tempfile::Builder::new().prefix("switchyard-host-").tempdir()? };
        host.link("/sys", "sys", &["bus"])?;
        host.link("/sys/bus", "sys/bus", &["pci"])?;
        host.link("/sys/bus/pci/devices", "sys/bus/pci/devices", &[])?;
        host.link("/proc", "proc", &["sys"])?;
        host.file("proc/sys/kernel/random/boot_id", "00000000-0000-4000-8000-000000000000")?;
        host.file("proc/sys/kernel/hostname", "host")?;
        host.file("proc/sys/kernel/arch", "x86_64")?;
        host.set_kernel("1.0.0")?;
        Ok(host)
    }

    /// Links to the contents of a folder on this machine. Does nothing if the folder does not
    /// exist.
    fn link(&self, from: &str, to: &str, except: &[&str]) -> Result<()> {
        fs::create_dir_all(self.path(to))?;
        for entry in fs::read_dir(from).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let is_process = name.to_string_lossy().bytes().all(|byte| byte.is_ascii_digit());
            if !is_process && !except.iter().any(|except| name == *except) {
                symlink(entry.path(), self.path(to).join(name))?;
            }
        }
        Ok(())
    }

    /// A path on the host.
    pub fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    /// Writes a file.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn file(&self, path: &str, text: &str) -> Result<()> {
        let path = self.path(path);
        fs::create_dir_all(path.parent().context("the file has no parent folder")?)?;
        // Rename into place, so that an agent never reads a partial file.
        let new = path.with_extension("new");
        fs::write(&new, text)?;
        Ok(fs::rename(new, path)?)
    }

    /// Changes one fact: the kernel release.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn set_kernel(&self, release: &str) -> Result<()> {
        self.file(KERNEL, release)
    }

    /// Puts a GPU on the PCI bus.
    ///
    /// # Errors
    /// Its files cannot be written.
    pub fn add_gpu(&self, bus_id: &str) -> Result<()> {
        let device = format!("sys/bus/pci/devices/{bus_id}");
        self.file(&format!("{device}/vendor"), "0x10de")?;
        self.file(&format!("{device}/class"), "0x030200")
    }

    /// Installs a driver with two GPUs, 0000:1b:00.0 and 0000:43:00.0: the mock NVML library from
    /// the node agent's own tests.
    ///
    /// # Errors
    /// The library does not compile.
    pub fn install_driver(&self) -> Result<()> {
        let source = root().join("node-agent/tests/nvml_reports/library.rs");
        let mut compiler = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
        compiler.args(["--edition", "2024", "-C", "panic=abort", "-o"]).arg(self.path("new")).arg(source);
        let output = compiler.output().context("cannot start the compiler")?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(fs::rename(self.path("new"), self.path(NVML))?)
    }

    /// Removes the driver.
    ///
    /// # Errors
    /// The driver is not installed.
    pub fn remove_driver(&self) -> Result<()> {
        Ok(fs::remove_file(self.path(NVML))?)
    }

    /// From now on, every read of the kernel release hangs.
    ///
    /// # Errors
    /// The named pipe cannot be created.
    pub fn hang(&self) -> Result<()> {
        let pipe = self.path("pipe");
        // Opening a named pipe blocks until the other end is opened.
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, Mode::from_raw_mode(0o600), 0)?;
        fs::hard_link(&pipe, self.path("new"))?;
        Ok(fs::rename(self.path("new"), self.path(KERNEL))?)
    }

    /// Unblocks hung readers and restores the kernel release as a normal file.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn release(&self, kernel: &str) -> Result<()> {
        self.set_kernel(kernel)?;
        // Non-blocking, because there may be no reader.
        let pipe = rustix::fs::open(self.path("pipe"), OFlags::RDWR | OFlags::NONBLOCK, Mode::empty())?;
        rustix::io::write(&pipe, format!("{kernel}\n").as_bytes())?;
        Ok(fs::remove_file(self.path("pipe"))?)
    }
}

/// Start options of an agent.
#[derive(Debug, Clone, Default)]
pub struct AgentOptions {
    /// Additional arguments.
    pub arguments: Vec<String>,
    /// API server URL to use instead of the real one, for example a [`Cable`]'s.
    pub server: Option<String>,
    /// Log name; the node name if `None`.
    pub log: Option<String>,
    /// Seconds between two scans; 1 if `None`.
    pub period: Option<u16>,
}

/// A running agent.
#[derive(Debug)]
pub struct Agent {
    /// The process.
    pub daemon: Daemon,
    address: SocketAddr,
}

impl Agent {
    /// Starts an agent for a node, with a token like one mounted into its pod on that node.
    ///
    /// # Errors
    /// No token was issued, or the program does not start.
    pub fn start(plane: &ControlPlane, node: &str, host: &Host, options: &AgentOptions) -> Result<Agent> {
        let server = options.server.clone().unwrap_or_else(|| plane.url());
        let name = options.log.as_deref().unwrap_or(node);
        let kubeconfig = kubeconfig(plane, name, &server, &agent_token(plane, Some(node))?)?;
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()?));
        let path = |path: &str| host.path(path).display().to_string();
        let mut arguments: Vec<String> = [
            ("--node-name", node.to_string()),
            ("--kubeconfig", kubeconfig.display().to_string()),
            ("--sysfs-root", path("sys")),
            ("--proc-root", path("proc")),
            ("--nvml-lib", path(NVML)),
            ("--pod-resources", path("kubelet.sock")),
            ("--listen", address.to_string()),
            ("--period-seconds", options.period.unwrap_or(1).to_string()),
        ]
        .into_iter()
        .flat_map(|(flag, value)| [flag.to_string(), value])
        .collect();
        arguments.extend(options.arguments.iter().cloned());
        let daemon = Daemon::start(agent_program(), &arguments, &[], &plane.folder().join(format!("{name}.log")))?;
        Ok(Agent { daemon, address })
    }

    /// Fetches a page from the agent: status line, headers and body. Empty if unreachable.
    pub fn page(&self, path: &str) -> String {
        page(self.address, path).unwrap_or_default()
    }

    /// Returns a metric's value, or zero if it is not exported yet.
    pub fn metric(&self, line: &str) -> f64 {
        let text = self.page("/metrics");
        let value = text.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(' '));
        value.and_then(|value| value.parse().ok()).unwrap_or(0.0)
    }
}

/// Issues a token for the agents' account. With a node, the token is bound to a pod on that node,
/// which is created if necessary; without one, it is unbound.
///
/// # Errors
/// The API server rejects the request.
pub fn agent_token(plane: &ControlPlane, node: Option<&str>) -> Result<String> {
    match node {
        Some(name) => pod_token(plane, ACCOUNT, &format!("agent-{name}"), node),
        None => token(plane, ACCOUNT, &[]),
    }
}

/// Issues a token for an account in the agents' namespace, bound to a pod there. The pod is created
/// if necessary, on this node or unscheduled.
///
/// # Errors
/// The API server rejects the pod, or issues no token.
pub fn pod_token(plane: &ControlPlane, account: &str, pod: &str, node: Option<&str>) -> Result<String> {
    let object = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod, "namespace": SYSTEM}, "spec": {
        "serviceAccountName": account, "nodeName": node, "tolerations": [{"operator": "Exists"}],
        "containers": [{"name": "agent", "image": "agent"}],
    }});
    let made = plane.kubectl_with(&["apply", "-f", "-"], &object.to_string());
    ensure!(made.code == Some(0), "{}", made.stderr);
    token(plane, account, &["--bound-object-kind", "Pod", "--bound-object-name", pod])
}

fn token(plane: &ControlPlane, account: &str, bound: &[&str]) -> Result<String> {
    let made = plane.kubectl(&[&["create", "token", account, "-n", SYSTEM], bound].concat());
    ensure!(made.code == Some(0), "{}", made.stderr);
    Ok(made.stdout.trim().to_string())
}

/// Writes a kubeconfig with a token.
fn kubeconfig(plane: &ControlPlane, name: &str, server: &str, token: &str) -> Result<PathBuf> {
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "bench",
        "clusters": [{"name": "bench", "cluster": {"server": server, "certificate-authority": plane.folder().join("ca.crt")}}],
        "users": [{"name": "agent", "user": {"token": token}}],
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "agent"}}],
    });
    let path = plane.folder().join(format!("agent-{name}.kubeconfig"));
    fs::write(&path, config.to_string())?;
    Ok(path)
}

/// A proxy to an API server that can be cut: existing connections drop and new ones are refused.
#[derive(Debug)]
pub struct Cable {
    from: SocketAddr,
    to: SocketAddr,
    /// Accept loop and its connections; empty while the cable is cut.
    tasks: JoinSet<()>,
}

impl Cable {
    /// Creates a connected cable.
    ///
    /// # Errors
    /// No port is free.
    pub async fn new(plane: &ControlPlane) -> Result<Cable> {
        let to = plane.url().trim_start_matches("https://").parse()?;
        let mut cable = Cable { from: SocketAddr::from(([127, 0, 0, 1], free_port()?)), to, tasks: JoinSet::new() };
        cable.mend().await?;
        Ok(cable)
    }

    /// URL of the near end.
    pub fn url(&self) -> String {
        format!("https://{}", self.from)
    }

    /// Drops all connections and refuses new ones.
    pub async fn cut(&mut self) {
        self.tasks.shutdown().await;
    }

    /// Accepts connections again.
    ///
    /// # Errors
    /// The port is taken.
    pub async fn mend(&mut self) -> Result<()> {
        let listener = TcpListener::bind(self.from).await?;
        let to = self.to;
        self.tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut near, _)) = listener.accept().await {
                connections.spawn(async move {
                    if let Ok(mut far) = TcpStream::connect(to).await {
                        let _ = copy_bidirectional(&mut near, &mut far).await;
                    }
                });
            }
        });
        Ok(())
    }
}
