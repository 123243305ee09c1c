//! A node: namespaces with separate `/var` and `/run` folders, containerd, the kubelet and
//! kube-proxy.

use super::instance::Instance;
use super::namespace::Namespace;
use super::network::{Network, Plan};
use super::{Programs, cgroups, images, settings};
use crate::control_plane::{kubeconfig_text, kubelet_user};
use crate::{ControlPlane, Daemon, TIMEOUT};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A running node.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) name: String,
    pub(super) index: u8,
    folder: PathBuf,
    // Fields are dropped in this order.
    proxy: Option<Daemon>,
    kubelet: Option<Daemon>,
    containerd: Option<Daemon>,
    pub(super) namespace: Namespace,
}

/// Kernel settings that a kubelet changes. They are global to the machine, so each node sees its
/// own copies as files.
const TUNABLES: [&str; 6] = [
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "kernel/panic",
    "kernel/panic_on_oops",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
];

/// Returns the script that mounts a node's `/var` and `/run`, and its network's view in `/sys`.
///
/// Mounts that containerd and the kubelet create below them exist only in the namespace and end
/// with it.
fn script(name: &str, folder: &Path) -> String {
    let folder = folder.display();
    format!(
        "hostname {name}\nip link set lo up\n\
         mkdir {folder}/cgroup\nmount --rbind /sys/fs/cgroup {folder}/cgroup\nmount -t sysfs sysfs /sys\n\
         mount --rbind {folder}/cgroup /sys/fs/cgroup\numount -l {folder}/cgroup\n\
         for file in {}; do\n  mkdir -p {folder}/tunables/$(dirname $file)\n  cat /proc/sys/$file > {folder}/tunables/$file\n  \
         mount --bind {folder}/tunables/$file /proc/sys/$file\ndone\n\
         mount --bind {folder}/run /run\nmount --bind {folder}/var /var\nmount --make-rshared /\n",
        TUNABLES.join(" ")
    )
}

impl Node {
    /// Starts the namespaces, the network link, and containerd with the sandbox image.
    ///
    /// # Errors
    /// The kernel refuses, or containerd does not respond.
    pub(super) fn start(
        instance: &Instance,
        network: &Network,
        programs: &Programs,
        index: u8,
        nodes: u8,
    ) -> Result<Node> {
        let name = name(index);
        let folder = instance.folder().join(&name);
        let plan = Plan::of(instance);
        for path in [
            "var/lib/containerd",
            "var/lib/kubelet",
            "var/lib/kube-proxy",
            "var/log",
            "var/tmp",
            "run/cni",
            "run/cdi",
            "run/lock",
        ] {
            fs::create_dir_all(folder.join(path))?;
        }
        symlink("/run", folder.join("var/run"))?;
        let write = |path: &str, text: String| fs::write(folder.join(path), text);
        write("var/lib/containerd/config.toml", settings::containerd(images::TOOLS))?;
        write("run/cni/pods.conflist", settings::pod_network(plan, index))?;
        write("var/lib/kubelet/config.yaml", settings::kubelet(&group(instance, &name)))?;
        write("var/lib/kube-proxy/config.yaml", settings::kube_proxy(plan, &name))?;
        // In v2, a group with child groups cannot contain processes, so the node's own group is
        // next to the group of its pods.
        let own = format!("{}/system", group(instance, &name));
        cgroups::make(&own)?;
        let kinds = ["--mount", "--net", "--uts"];
        let namespace = Namespace::start(&kinds, cgroups::entries(&own)?, &script(&name, &folder), &folder, "init")?;
        network.attach(instance, &namespace, index, nodes)?;
        let mut node = Node { name, index, folder, proxy: None, kubelet: None, containerd: None, namespace };
        node.start_containerd(programs)?;
        Ok(node)
    }

    /// Returns the path on this machine of a node's path below `/var` or `/run`.
    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.folder.join(path.trim_start_matches('/'))
    }

    /// Starts containerd and waits until it responds.
    ///
    /// # Errors
    /// It does not respond.
    pub(super) fn start_containerd(&mut self, programs: &Programs) -> Result<()> {
        // containerd searches PATH for its shim and for runc.
        let search = std::env::var("PATH").unwrap_or_default();
        let search = format!("{}:{search}:/usr/sbin:/sbin", programs.containerd.display());
        let arguments = ["--config=/var/lib/containerd/config.toml".to_string()];
        let program = programs.containerd.join("containerd");
        let daemon = self.namespace.daemon(&program, &arguments, &[("PATH", search)])?;
        let socket = self.path("/run/containerd/containerd.sock");
        self.containerd.insert(daemon).until("ready", TIMEOUT, || Ok(UnixStream::connect(&socket).is_ok()))
    }

    /// Starts the kubelet and kube-proxy.
    ///
    /// # Errors
    /// A program cannot be started.
    pub(super) fn join(&mut self, plane: &ControlPlane, plan: Plan, programs: &Programs) -> Result<()> {
        let authority = Path::new("/var/lib/kubelet/ca.crt");
        fs::copy(plane.folder().join("ca.crt"), self.path("/var/lib/kubelet/ca.crt"))?;
        let of = |user: &str| kubeconfig_text(user, &plane.url(), authority);
        fs::write(self.path("/var/lib/kubelet/kubeconfig"), of(&kubelet_user(&self.name)))?;
        fs::write(self.path("/var/lib/kube-proxy/kubeconfig"), of("system:kube-proxy"))?;
        self.start_kubelet(plan, programs)?;
        let arguments = ["--config=/var/lib/kube-proxy/config.yaml".to_string()];
        let daemon = self.namespace.daemon(&programs.kubernetes.join("kube-proxy"), &arguments, &[])?;
        self.proxy = Some(daemon);
        Ok(())
    }

    /// Starts the kubelet.
    ///
    /// # Errors
    /// The kubelet cannot be started.
    pub(super) fn start_kubelet(&mut self, plan: Plan, programs: &Programs) -> Result<()> {
        let arguments = [
            "--config=/var/lib/kubelet/config.yaml".to_string(),
            "--kubeconfig=/var/lib/kubelet/kubeconfig".into(),
            format!("--hostname-override={}", self.name),
            format!("--node-ip={}", plan.node(self.index)),
        ];
        self.kubelet = Some(self.namespace.daemon(&programs.kubernetes.join("kubelet"), &arguments, &[])?);
        Ok(())
    }

    /// Kills the kubelet. The pods keep running.
    pub(super) fn kill_kubelet(&mut self) {
        self.kubelet = None;
    }

    /// Kills containerd. The containers keep running.
    pub(super) fn kill_containerd(&mut self) {
        self.containerd = None;
    }

    /// Imports an image from a Docker or OCI archive.
    ///
    /// # Errors
    /// containerd rejects the archive.
    pub(super) fn import(&self, programs: &Programs, archive: &Path) -> Result<()> {
        self.images(programs, &["import", &archive.display().to_string()])
    }

    /// Adds a second name to an image.
    ///
    /// # Errors
    /// The image does not exist.
    pub(super) fn tag(&self, programs: &Programs, image: &str, name: &str) -> Result<()> {
        self.images(programs, &["tag", "--force", image, name])
    }

    /// Runs a `ctr images` command in the kubelet's namespace.
    fn images(&self, programs: &Programs, arguments: &[&str]) -> Result<()> {
        let mut command = Command::new(programs.containerd.join("ctr"));
        command.arg("--address").arg(self.path("/run/containerd/containerd.sock"));
        command.args(["--namespace", "k8s.io", "images"]).args(arguments);
        let output = command.output().context("cannot start ctr")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}: ctr images {}: {stderr}", self.name, arguments.join(" "));
        Ok(())
    }

    /// Checks that all of the node's programs are running.
    ///
    /// # Errors
    /// A program has ended; the error contains the end of its log.
    pub(super) fn ensure_running(&mut self) -> Result<()> {
        self.namespace.ensure_running()?;
        let daemons = [&mut self.containerd, &mut self.kubelet, &mut self.proxy];
        daemons.into_iter().flatten().try_for_each(Daemon::ensure_running).with_context(|| self.name.clone())
    }

    /// Returns the end of the kubelet's log.
    pub(super) fn tail(&self) -> String {
        self.kubelet.as_ref().map(Daemon::tail).unwrap_or_default()
    }

    /// Paths of the node's logs.
    pub(super) fn logs(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten().map(|entry| entry.path());
        entries.filter(|path| path.extension().is_some_and(|end| end == "log")).collect()
    }
}

/// Returns the name of a node.
pub(super) fn name(index: u8) -> String {
    format!("node-{index}")
}

/// Returns the name of a node's cgroups.
pub(super) fn group(instance: &Instance, name: &str) -> String {
    format!("{}/{name}", instance.group())
}
