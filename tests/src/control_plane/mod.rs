//! A real Kubernetes control plane on this machine: etcd, the API server, and optionally the
//! controller manager and the scheduler.
//!
//! Everything runs on loopback, on free ports, with its own folder and its own certificate
//! authority. It stops when the value is dropped or the process ends. There is no kubelet: see
//! [`crate::Kubelet`].

mod access;
mod certificates;
mod process;
mod store;
mod temporary;

use access::{answers, completed};
pub(crate) use access::{kubeconfig_text, kubelet_user};
pub(crate) use certificates::self_signed;
pub use process::{Daemon, Usage};

use crate::ports::free_port;
use crate::{Ended, Program, TIMEOUT, xtask};
use anyhow::{Context, Result, bail};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Patch, PatchParams};
use kube::runtime::{conditions, wait::await_condition};
use kube::{Api, ResourceExt};
use std::fs;
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use temporary::Temporary;

/// Components to start, and their configuration.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Run the real controller manager (garbage collection, service accounts, node lifecycle, …).
    pub controller_manager: bool,
    /// Run the real scheduler.
    pub scheduler: bool,
    /// etcd syncs to disk before it replies, for tests that kill it.
    pub fsync: bool,
    /// Write `audit.log`: every write by an operator, and every call by a service account in
    /// `switchyard-system`.
    pub audit: bool,
    /// Enable MutatingAdmissionPolicies, which tests use to change pods as webhooks do.
    pub mutating: bool,
    /// Enable DeviceTaintRules in the API server and the scheduler.
    pub device_taints: bool,
    /// Folder for data and logs; a temporary one if `None`.
    pub folder: Option<PathBuf>,
    /// Network reach for real nodes; if `None`, everything is on loopback.
    pub reach: Option<Reach>,
}

/// Addresses for real nodes, which cannot use loopback.
#[derive(Debug, Clone)]
pub struct Reach {
    /// Address of this machine at which the nodes reach the API server.
    pub address: Ipv4Addr,
    /// Node names.
    pub nodes: Vec<String>,
}

/// Service address range; the first address is the API server's.
pub(crate) const SERVICES: &str = "10.96.0.0/16";
const FIRST_SERVICE: &str = "10.96.0.1";

static SHARED: OnceLock<ControlPlane> = OnceLock::new();

/// A running control plane.
#[derive(Debug)]
pub struct ControlPlane {
    folder: PathBuf,
    programs: Programs,
    options: Options,
    ports: Ports,
    // Fields are dropped in this order.
    scheduler: Option<Daemon>,
    controller_manager: Option<Daemon>,
    api_server: Option<Daemon>,
    etcd: Option<Daemon>,
    _temporary: Option<Temporary>,
}

#[derive(Debug, Clone)]
struct Programs {
    etcd: PathBuf,
    kubernetes: PathBuf,
}

#[derive(Debug, Clone, Copy)]
struct Ports {
    api_server: u16,
    etcd: u16,
    etcd_peers: u16,
}

impl ControlPlane {
    /// Starts a control plane and waits until it is ready.
    ///
    /// # Errors
    /// A program is missing, or does not become ready. The error contains the end of its log.
    pub fn start(options: &Options) -> Result<ControlPlane> {
        let programs = find_programs()?;
        let temporary = match &options.folder {
            Some(_) => None,
            None => Some(Temporary::new(&std::env::temp_dir())?),
        };
        let folder = match (&options.folder, &temporary) {
            (Some(folder), _) => folder.clone(),
            (None, Some(temporary)) => temporary.path().to_path_buf(),
            (None, None) => bail!("invariant: the folder exists"),
        };
        fs::create_dir_all(&folder)?;
        let mut plane = ControlPlane {
            folder,
            programs,
            options: options.clone(),
            ports: Ports { api_server: free_port()?, etcd: free_port()?, etcd_peers: free_port()? },
            scheduler: None,
            controller_manager: None,
            api_server: None,
            etcd: None,
            _temporary: temporary,
        };
        certificates::write(&plane.folder, &[&plane.address().to_string(), FIRST_SERVICE])?;
        plane.write_users()?;
        plane.start_etcd()?;
        plane.start_api_server()?;
        if options.controller_manager {
            plane.start_controller_manager()?;
        }
        if options.scheduler {
            plane.start_scheduler()?;
        }
        Ok(plane)
    }

    /// Returns whether this is the plane that all tests of this binary share.
    pub fn is_shared(&self) -> bool {
        SHARED.get().is_some_and(|shared| std::ptr::eq(shared, self))
    }

    /// Returns the control plane shared by this test binary, with the controller manager, the
    /// scheduler and our CRDs. The first call starts it.
    ///
    /// # Panics
    /// It does not start.
    pub fn shared() -> &'static ControlPlane {
        SHARED.get_or_init(|| {
            let options = Options { controller_manager: true, scheduler: true, ..Options::default() };
            let plane = ControlPlane::start(&options).unwrap_or_else(|error| panic!("{error:#}"));
            plane.install_crds_now().unwrap_or_else(|error| panic!("{error:#}"));
            plane
        })
    }

    /// Folder with data, logs and configuration.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// URL of the API server.
    pub fn url(&self) -> String {
        format!("https://{}:{}", self.address(), self.ports.api_server)
    }

    fn address(&self) -> Ipv4Addr {
        self.options.reach.as_ref().map_or(Ipv4Addr::LOCALHOST, |reach| reach.address)
    }

    /// Runs kubectl as administrator.
    pub fn kubectl(&self, arguments: &[&str]) -> Ended {
        self.kubectl_with(arguments, "")
    }

    /// Runs kubectl as administrator with this standard input.
    pub fn kubectl_with(&self, arguments: &[&str], input: &str) -> Ended {
        let config = self.kubeconfig("admin").display().to_string();
        Program::new(&self.programs.kubernetes.join("kubectl"), &self.folder, arguments)
            .env("KUBECONFIG", &config)
            .input(input)
            .run(TIMEOUT)
    }

    /// Creates a namespace with a name that is unique in this process.
    ///
    /// # Errors
    /// The namespace cannot be created.
    pub async fn namespace(&self, prefix: &str) -> Result<String> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let name = format!("{prefix}-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let object: k8s_openapi::api::core::v1::Namespace =
            serde_json::from_value(serde_json::json!({"metadata": {"name": name}}))?;
        let client = self.client().await?;
        Api::all(client.clone()).create(&Default::default(), &object).await?;
        // Pods cannot be created before the namespace has its default service account.
        let accounts = Api::<k8s_openapi::api::core::v1::ServiceAccount>::namespaced(client, &name);
        if self.options.controller_manager {
            let exists = await_condition(accounts, "default", |account: Option<&_>| account.is_some());
            tokio::time::timeout(TIMEOUT, exists)
                .await
                .context("no default service account: is the controller manager alive?")??;
        } else {
            let account = serde_json::from_value(serde_json::json!({"metadata": {"name": "default"}}))?;
            accounts.create(&Default::default(), &account).await?;
        }
        Ok(name)
    }

    /// Installs our CRDs and waits until they are established.
    ///
    /// # Errors
    /// The API server rejects a CRD.
    pub async fn install_crds(&self) -> Result<()> {
        let api = Api::<CustomResourceDefinition>::all(self.client().await?);
        for (_, crd) in switchyard_crds::generate::crds() {
            api.patch(&crd.name_any(), &PatchParams::apply("switchyard-tests").force(), &Patch::Apply(&crd)).await?;
            let name = crd.name_any();
            let established = await_condition(api.clone(), &name, conditions::is_crd_established());
            tokio::time::timeout(TIMEOUT, established).await.context("the CRD is not established")??;
        }
        Ok(())
    }

    /// Like [`ControlPlane::install_crds`], for synchronous code.
    ///
    /// # Errors
    /// See [`ControlPlane::install_crds`].
    pub fn install_crds_now(&self) -> Result<()> {
        completed(self.install_crds())
    }

    fn start_etcd(&mut self) -> Result<()> {
        let Ports { etcd, etcd_peers, .. } = self.ports;
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let mut arguments = vec![
            format!("--data-dir={}", self.folder.join("etcd").display()),
            format!("--listen-client-urls={}", url(etcd)),
            format!("--advertise-client-urls={}", url(etcd)),
            format!("--listen-peer-urls={}", url(etcd_peers)),
            format!("--initial-advertise-peer-urls={}", url(etcd_peers)),
            format!("--initial-cluster=default={}", url(etcd_peers)),
            "--log-level=warn".into(),
            // The default is 2 GiB, and etcd rejects every write once the quota is reached.
            "--quota-backend-bytes=8589934592".into(),
        ];
        if !self.options.fsync {
            arguments.push("--unsafe-no-fsync".into());
        }
        let program = self.programs.etcd.join("etcd");
        let daemon = Daemon::start(&program, &arguments, &garbage_collector(), &self.folder.join("etcd.log"))?;
        self.etcd.insert(daemon).until("ready", TIMEOUT, || Ok(TcpStream::connect(("127.0.0.1", etcd)).is_ok()))
    }

    /// Starts or restarts the API server with the same data and port.
    ///
    /// # Errors
    /// The API server does not become ready.
    pub fn start_api_server(&mut self) -> Result<()> {
        let file = |name: &str| self.folder.join(name).display().to_string();
        let mut arguments = vec![
            format!("--etcd-servers=http://127.0.0.1:{}", self.ports.etcd),
            format!("--bind-address={}", self.address()),
            format!("--secure-port={}", self.ports.api_server),
            format!("--tls-cert-file={}", file("server.crt")),
            format!("--tls-private-key-file={}", file("server.key")),
            format!("--token-auth-file={}", file("tokens.csv")),
            "--authorization-mode=Node,RBAC".into(),
            "--enable-admission-plugins=NodeRestriction".into(),
            "--service-account-issuer=https://kubernetes.default.svc".into(),
            format!("--service-account-key-file={}", file("accounts.pub")),
            format!("--service-account-signing-key-file={}", file("accounts.key")),
            format!("--service-cluster-ip-range={SERVICES}"),
            "--allow-privileged=true".into(),
            "--kubelet-preferred-address-types=InternalIP".into(),
            format!("--kubelet-client-certificate={}", file("kubelet-client.crt")),
            format!("--kubelet-client-key={}", file("kubelet-client.key")),
        ];
        arguments.push(match &self.options.reach {
            Some(reach) => format!("--advertise-address={}", reach.address),
            // The endpoint of the `kubernetes` Service cannot be a loopback address, and nothing
            // uses it.
            None => "--endpoint-reconciler-type=none".into(),
        });
        if self.options.mutating {
            arguments.push("--feature-gates=MutatingAdmissionPolicy=true".into());
            arguments.push("--runtime-config=admissionregistration.k8s.io/v1beta1=true".into());
        }
        if self.options.device_taints {
            arguments.push("--feature-gates=DRADeviceTaints=true".into());
            arguments.push("--runtime-config=resource.k8s.io/v1alpha3=true".into());
        }
        if self.options.audit {
            let policy = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n\
                          - {level: Metadata, verbs: [create, update, patch, delete, deletecollection], \
                          users: [switchyard-controller, training-operator]}\n\
                          - {level: Metadata, userGroups: ['system:serviceaccounts:switchyard-system']}\n- {level: None}\n";
            fs::write(self.folder.join("audit.yaml"), policy)?;
            arguments.push(format!("--audit-policy-file={}", file("audit.yaml")));
            arguments.push(format!("--audit-log-path={}", file("audit.log")));
        }
        let program = self.programs.kubernetes.join("kube-apiserver");
        let config = completed(self.config())?;
        let daemon =
            Daemon::start(&program, &arguments, &garbage_collector(), &self.folder.join("kube-apiserver.log"))?;
        // Without kubectl, which takes 0.1 CPU seconds a poll.
        self.api_server.insert(daemon).until("ready", TIMEOUT, || Ok(completed(answers(&config)).is_ok()))
    }

    fn start_controller_manager(&mut self) -> Result<()> {
        let file = |name: &str| self.folder.join(name).display().to_string();
        let mut arguments = vec![
            format!("--kubeconfig={}", self.kubeconfig("system:kube-controller-manager").display()),
            "--leader-elect=false".into(),
            "--use-service-account-credentials=true".into(),
            format!("--service-account-private-key-file={}", file("accounts.key")),
            format!("--root-ca-file={}", file("ca.crt")),
            "--secure-port=0".into(),
            // Raise the limits, because the garbage collector and the node lifecycle controller are
            // not under test and must not be the bottleneck.
            "--kube-api-qps=500".into(),
            "--kube-api-burst=1000".into(),
            "--concurrent-gc-syncs=20".into(),
            // Our own kubelet does not renew node leases.
            format!("--node-monitor-grace-period={}", if self.options.reach.is_some() { "20s" } else { "1h" }),
        ];
        if self.options.reach.is_none() {
            // The API server refuses endpoints with the loopback addresses of our own kubelet, and
            // each attempt costs an event: a third of all calls.
            arguments.push("--controllers=*,-endpoints-controller,-endpointslice-controller".into());
        }
        let program = self.programs.kubernetes.join("kube-controller-manager");
        let log = self.folder.join("kube-controller-manager.log");
        self.controller_manager = Some(Daemon::start(&program, &arguments, &[], &log)?);
        Ok(())
    }

    fn start_scheduler(&mut self) -> Result<()> {
        let config = format!(
            "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nleaderElection: {{leaderElect: false}}\n\
             clientConnection: {{kubeconfig: {}, qps: 1000, burst: 2000}}\n",
            self.kubeconfig("system:kube-scheduler").display()
        );
        let path = self.folder.join("scheduler.yaml");
        fs::write(&path, config)?;
        let mut arguments = vec![format!("--config={}", path.display()), "--secure-port=0".into()];
        if self.options.device_taints {
            arguments.push("--feature-gates=DRADeviceTaints=true".into());
        }
        let program = self.programs.kubernetes.join("kube-scheduler");
        self.scheduler = Some(Daemon::start(&program, &arguments, &[], &self.folder.join("kube-scheduler.log"))?);
        Ok(())
    }

    /// Kills the API server.
    pub fn kill_api_server(&mut self) {
        self.api_server = None;
    }

    /// Kills etcd and the API server, then starts both again.
    ///
    /// # Errors
    /// A component does not become ready.
    pub fn restart_all(&mut self) -> Result<()> {
        self.api_server = None;
        self.etcd = None;
        self.start_etcd()?;
        self.start_api_server()
    }

    /// Process of the API server.
    pub fn api_server(&self) -> Option<&Daemon> {
        self.api_server.as_ref()
    }

    /// CPU seconds used by each component so far, by name.
    pub fn cpu_seconds(&self) -> std::collections::BTreeMap<&'static str, f64> {
        let programs = [
            ("apiServer", &self.api_server),
            ("controllerManager", &self.controller_manager),
            ("etcd", &self.etcd),
            ("scheduler", &self.scheduler),
        ];
        programs.into_iter().filter_map(|(name, daemon)| Some((name, daemon.as_ref()?.usage().cpu_seconds))).collect()
    }

    /// Counts a user's writes so far by verb and resource, from the audit log. Leases are excluded.
    pub fn write_counts(&self, user: &str) -> std::collections::BTreeMap<String, u64> {
        let mut counts = std::collections::BTreeMap::new();
        for entry in self.audit_entries() {
            let field = |path: &str| entry.pointer(path).and_then(serde_json::Value::as_str).unwrap_or_default();
            if field("/user/username") == user && field("/objectRef/resource") != "leases" {
                let sub = field("/objectRef/subresource");
                let suffix = if sub.is_empty() { String::new() } else { format!("/{sub}") };
                *counts.entry(format!("{} {}{suffix}", field("/verb"), field("/objectRef/resource"))).or_default() += 1;
            }
        }
        counts
    }

    /// Returns all entries of the audit log so far.
    pub fn audit_entries(&self) -> Vec<serde_json::Value> {
        let text = fs::read_to_string(self.folder.join("audit.log")).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Path of kubectl.
    pub fn kubectl_program(&self) -> PathBuf {
        self.programs.kubernetes.join("kubectl")
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        // A test that returns an error does not panic. Full-size runs are hard to reproduce, so
        // they always keep their logs.
        if (std::thread::panicking() || crate::chaos::is_full())
            && let Some(temporary) = self._temporary.take()
        {
            let _ = fs::remove_dir_all(temporary.path().join("etcd"));
            eprintln!("control plane logs: {}", temporary.keep().display());
        }
    }
}

/// Environment of etcd and the API server. Their heaps are small and short-lived in tests, so
/// collecting garbage four times less often costs little memory and saves CPU time of every test.
/// Benchmarks, which are compiled without debug assertions, keep the defaults of production.
fn garbage_collector() -> Vec<(&'static str, String)> {
    if cfg!(debug_assertions) { vec![("GOGC", "400".into()), ("GOMEMLIMIT", "3GiB".into())] } else { Vec::new() }
}

/// Builds the programs if they are missing.
fn find_programs() -> Result<Programs> {
    static PROGRAMS: OnceLock<Result<Programs, String>> = OnceLock::new();
    let programs = PROGRAMS.get_or_init(|| {
        programs_of(&["etcd", "kubernetes"]).map_err(|error| format!("{error:#}")).map(|folders| {
            let [etcd, kubernetes] = [folders[0].clone(), folders[1].clone()];
            Programs { etcd, kubernetes }
        })
    });
    programs.clone().map_err(|error| anyhow::anyhow!(error))
}

/// Returns the folders of third-party programs, building missing ones.
///
/// # Errors
/// A build failed.
pub fn programs_of(names: &[&str]) -> Result<Vec<PathBuf>> {
    let output = Command::new(xtask()).arg("programs").args(names).output().context("cannot start xtask")?;
    if !output.status.success() {
        bail!(
            "cargo xtask programs {}: {}\n{}",
            names.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let text = String::from_utf8(output.stdout)?;
    let folder = |name: &&str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        line.map(PathBuf::from).with_context(|| format!("cargo xtask programs printed no path of {name}"))
    };
    names.iter().map(folder).collect()
}
