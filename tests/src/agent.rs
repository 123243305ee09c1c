//! The real node agent as a process, a host for it to describe, and a cable to the API server that can be cut.

use crate::control_plane::free_port;
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

/// The file of a fact that tests change.
const KERNEL: &str = "proc/sys/kernel/osrelease";
/// The driver's library; there is none at first.
const NVML: &str = "nvml.so";
/// Namespace of the agents.
const SYSTEM: &str = "switchyard-system";
/// Their account.
const ACCOUNT: &str = "switchyard-node-agent";

/// A control plane with the chart and an audit log, for agents.
///
/// # Errors
/// It does not start, or does not take the chart.
pub fn agent_plane() -> Result<ControlPlane> {
    let plane = ControlPlane::start(&Options { controller_manager: true, audit: true, ..Options::default() })?;
    plane.install_crds_now()?;
    plane.apply_chart(&[])?;
    Ok(plane)
}

/// Where the program is, built if need be.
///
/// # Panics
/// It does not build.
pub fn agent_program() -> &'static Path {
    programs::agent()
}

/// A host: this machine through links, with files of its own where a test changes something.
#[derive(Debug)]
pub struct Host {
    folder: TempDir,
}

impl Host {
    /// Like this machine, with another kernel.
    ///
    /// # Errors
    /// Its files cannot be made.
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

    /// Links to what is in a folder of this machine; nothing if there is no such folder.
    fn link(&self, from: &str, to: &str, but: &[&str]) -> Result<()> {
        fs::create_dir_all(self.path(to))?;
        for entry in fs::read_dir(from).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let is_process = name.to_string_lossy().bytes().all(|byte| byte.is_ascii_digit());
            if !is_process && !but.iter().any(|but| name == *but) {
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
        fs::create_dir_all(path.parent().context("a file lies in a folder")?)?;
        // At once: an agent never reads half of it.
        let new = path.with_extension("new");
        fs::write(&new, text)?;
        Ok(fs::rename(new, path)?)
    }

    /// Changes a fact: the release of the kernel.
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

    /// Installs a driver for two GPUs, at 0000:1b:00.0 and 0000:43:00.0: the mock of the node agent's own tests.
    ///
    /// # Errors
    /// It does not compile.
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
    /// It is not there.
    pub fn remove_driver(&self) -> Result<()> {
        Ok(fs::remove_file(self.path(NVML))?)
    }

    /// From now on whoever reads the host hangs.
    ///
    /// # Errors
    /// The file that hangs cannot be made.
    pub fn hang(&self) -> Result<()> {
        let pipe = self.path("pipe");
        // Opening a pipe waits for its other end.
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, Mode::from_raw_mode(0o600), 0)?;
        fs::hard_link(&pipe, self.path("new"))?;
        Ok(fs::rename(self.path("new"), self.path(KERNEL))?)
    }

    /// Lets those go who hang, and nobody hang any more.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn release(&self, kernel: &str) -> Result<()> {
        self.set_kernel(kernel)?;
        // Not blocking: nobody may be there.
        let pipe = rustix::fs::open(self.path("pipe"), OFlags::RDWR | OFlags::NONBLOCK, Mode::empty())?;
        rustix::io::write(&pipe, format!("{kernel}\n").as_bytes())?;
        Ok(fs::remove_file(self.path("pipe"))?)
    }
}

/// How an agent is started.
#[derive(Debug, Clone, Default)]
pub struct AgentOptions {
    /// More arguments.
    pub arguments: Vec<String>,
    /// Address of the API server other than its own, such as that of a [`Cable`].
    pub server: Option<String>,
    /// Name of the log; that of the node otherwise.
    pub log: Option<String>,
    /// Seconds between two looks; one otherwise.
    pub period: Option<u16>,
}

/// An agent.
#[derive(Debug)]
pub struct Agent {
    /// The process.
    pub daemon: Daemon,
    address: SocketAddr,
}

impl Agent {
    /// Starts one for a node, with a token as its pod on that node would have it.
    ///
    /// # Errors
    /// There is no token, or the program does not start.
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

    /// One of its pages: status line, headers and body.
    pub fn page(&self, path: &str) -> String {
        page(self.address, path).unwrap_or_default()
    }

    /// A value of its metrics; zero for one that is not exported yet.
    pub fn metric(&self, line: &str) -> f64 {
        let text = self.page("/metrics");
        let value = text.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(' '));
        value.and_then(|value| value.parse().ok()).unwrap_or(0.0)
    }
}

/// A token of the agents' account: bound to a pod on this node, which is made if need be, or to nothing.
///
/// # Errors
/// The API server gives none.
pub fn agent_token(plane: &ControlPlane, node: Option<&str>) -> Result<String> {
    match node {
        Some(name) => pod_token(plane, ACCOUNT, &format!("agent-{name}"), node),
        None => token(plane, ACCOUNT, &[]),
    }
}

/// A token of an account in the namespace of the agents, bound to a pod there, which is made if need be: on this node, or on none yet.
///
/// # Errors
/// The API server does not take the pod, or gives no token.
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

/// A kubeconfig with a token.
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

/// A connection to an API server that can be cut: whoever is connected is cut off, and whoever comes is refused.
#[derive(Debug)]
pub struct Cable {
    from: SocketAddr,
    to: SocketAddr,
    /// Accepts and carries; empty while it is cut.
    tasks: JoinSet<()>,
}

impl Cable {
    /// A whole one.
    ///
    /// # Errors
    /// There is no port.
    pub async fn new(plane: &ControlPlane) -> Result<Cable> {
        let to = plane.url().trim_start_matches("https://").parse()?;
        let mut cable = Cable { from: SocketAddr::from(([127, 0, 0, 1], free_port()?)), to, tasks: JoinSet::new() };
        cable.mend().await?;
        Ok(cable)
    }

    /// Its near end.
    pub fn url(&self) -> String {
        format!("https://{}", self.from)
    }

    /// Cuts it.
    pub async fn cut(&mut self) {
        self.tasks.shutdown().await;
    }

    /// Makes it whole again.
    ///
    /// # Errors
    /// The port is taken.
    pub async fn mend(&mut self) -> Result<()> {
        let listener = TcpListener::bind(self.from).await?;
        let to = self.to;
        self.tasks.spawn(async move {
            let mut carried = JoinSet::new();
            while let Ok((mut near, _)) = listener.accept().await {
                carried.spawn(async move {
                    if let Ok(mut far) = TcpStream::connect(to).await {
                        let _ = copy_bidirectional(&mut near, &mut far).await;
                    }
                });
            }
        });
        Ok(())
    }
}
