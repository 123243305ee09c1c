//! Processes of a pod in worker mode.
//!
//! There are no containers. Volumes are folders, and mount paths at the start of an environment
//! value or argument are rewritten to them. Pod names (`POD.SERVICE.NAMESPACE.svc`) in values are
//! replaced by the pod's address, in place of cluster DNS. `$(NAME)` in a value expands to a
//! variable set earlier. Everything else is as in a container: command, arguments, environment,
//! termination message, signals, and one process group.

use super::logs::Log;
use super::pods::{Exit, Task};
use crate::TIMEOUT;
use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::{ConfigMap, Container, Secret, Volume};
use kube::{Api, ResourceExt};
use rustix::process::{Pid, Signal, kill_process_group};
use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::process::{Child, Command};

/// A pod's running processes.
pub(super) struct Worker {
    child: Child,
    group: Pid,
    message: PathBuf,
    log: PathBuf,
    forget: Box<dyn Fn() + Send + Sync>,
}

impl Worker {
    /// Starts the pod's first container.
    pub async fn start(task: &Task) -> Result<Worker> {
        let pod = &task.pod;
        let spec = pod.spec.as_ref().context("the pod has no spec")?;
        let container = spec.containers.first().context("the pod has no container")?;
        let uid = pod.uid().unwrap_or_default();
        let folder = task.shared.folder.join(&uid);
        fs::create_dir_all(&folder)?;
        let mut mounts = Vec::new();
        for volume in spec.volumes.iter().flatten() {
            let path = folder.join("volumes").join(&volume.name);
            fill(task, volume, &path).await.with_context(|| format!("volume {}", volume.name))?;
            let mounted = container.volume_mounts.iter().flatten().filter(|mount| mount.name == volume.name);
            mounts.extend(mounted.map(|mount| (mount.mount_path.clone(), path.clone())));
        }
        let message = folder.join("termination-log");
        fs::write(&message, "")?;
        let path = container.termination_message_path.clone().unwrap_or_else(|| "/dev/termination-log".into());
        mounts.push((path, message.clone()));
        // The longest path wins, as with real mounts.
        mounts.sort_by_key(|(path, _)| std::cmp::Reverse(path.len()));
        let log = folder.join("log");
        let output = fs::File::create(&log)?;
        let mut command = command(task, container, &mounts)?;
        let mut before: Vec<(String, String)> = Vec::new();
        for entry in container.env.iter().flatten() {
            let value = value_of(task, entry)?;
            let value = before.iter().fold(value, |text, (name, known)| text.replace(&format!("$({name})"), known));
            let value = mapped(&mounts, &resolved(task, &value).await?);
            command.env(&entry.name, &value);
            before.push((entry.name.clone(), value));
        }
        let directory = container.working_dir.as_ref().map(PathBuf::from).filter(|path| path.is_dir());
        command.current_dir(directory.unwrap_or_else(|| folder.clone()));
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).process_group(0).kill_on_drop(true);
        let child = command.spawn().with_context(|| format!("{:?}", container.command))?;
        let group = child.id().and_then(|id| Pid::from_raw(id as i32)).context("the process has no id")?;
        let mut state = task.shared.state();
        state.groups.insert(uid.clone(), group);
        state.logs.insert((pod.namespace().unwrap_or_default(), pod.name_any()), Log::File(log.clone()));
        drop(state);
        let shared = task.shared.clone();
        let forget = Box::new(move || {
            shared.state().groups.remove(&uid);
        });
        Ok(Worker { child, group, message, log, forget })
    }

    /// Waits until the container ends.
    pub async fn wait(&mut self) -> Exit {
        let status = self.child.wait().await;
        // Child processes end with the container.
        self.kill();
        (self.forget)();
        let (code, signal) = status.map(|status| (status.code(), status.signal())).unwrap_or((None, None));
        let code = code.unwrap_or(128 + signal.unwrap_or(0));
        let mut message = fs::read_to_string(&self.message).unwrap_or_default();
        if message.is_empty() && code != 0 {
            // `terminationMessagePolicy: FallbackToLogsOnError`.
            let log = fs::read(&self.log).unwrap_or_default();
            message = String::from_utf8_lossy(&log[log.len().saturating_sub(2048)..]).into_owned();
        }
        let reason = if code == 0 { "Completed" } else { "Error" };
        Exit { code, reason: reason.into(), message: message.chars().take(4096).collect() }
    }

    /// Sends SIGTERM, then SIGKILL after the grace period.
    pub async fn stop(&mut self, grace: Duration) -> Exit {
        let _ = kill_process_group(self.group, Signal::TERM);
        if let Ok(end) = tokio::time::timeout(grace, self.wait()).await {
            return end;
        }
        self.kill();
        self.wait().await
    }

    /// Sends SIGKILL to the process group.
    pub fn kill(&self) {
        let _ = kill_process_group(self.group, Signal::KILL);
    }
}

fn command(task: &Task, container: &Container, mounts: &[(String, PathBuf)]) -> Result<Command> {
    let words: Vec<&String> = container.command.iter().flatten().chain(container.args.iter().flatten()).collect();
    let Some((program, arguments)) = words.split_first() else { bail!("an image's default command is not supported") };
    let bundled = task.shared.options.programs.as_ref().map(|folder| folder.join(program.as_str()));
    let program = bundled.filter(|path| path.is_file()).unwrap_or_else(|| PathBuf::from(program.as_str()));
    let mut command = Command::new(program);
    command.args(arguments.iter().map(|argument| mapped(mounts, argument)));
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    Ok(command)
}

fn value_of(task: &Task, entry: &k8s_openapi::api::core::v1::EnvVar) -> Result<String> {
    if let Some(value) = &entry.value {
        return Ok(value.clone());
    }
    let field =
        entry.value_from.as_ref().and_then(|from| from.field_ref.as_ref()).map(|field| field.field_path.as_str());
    Ok(match field {
        None => String::new(),
        Some("metadata.name") => task.pod.name_any(),
        Some("metadata.namespace") => task.pod.namespace().unwrap_or_default(),
        Some("metadata.uid") => task.pod.uid().unwrap_or_default(),
        Some("spec.nodeName") => task.node.clone(),
        Some("status.podIP") => task.address.to_string(),
        Some(other) => bail!("env {}: fieldRef {other} is not supported", entry.name),
    })
}

fn mapped(mounts: &[(String, PathBuf)], value: &str) -> String {
    for (path, folder) in mounts {
        if let Some(rest) = value.strip_prefix(path.as_str())
            && (rest.is_empty() || rest.starts_with('/'))
        {
            return format!("{}{rest}", folder.display());
        }
    }
    value.to_string()
}

/// Replaces pod names by their addresses.
async fn resolved(task: &Task, value: &str) -> Result<String> {
    let namespace = task.pod.namespace().unwrap_or_default();
    let suffix = format!(".{namespace}.svc");
    let (mut done, mut rest) = (String::new(), value);
    while let Some(position) = rest.find(&suffix) {
        let is_name_char = |c: char| c.is_ascii_alphanumeric() || ['-', '.'].contains(&c);
        let start = rest[..position].trim_end_matches(is_name_char).len();
        let name = rest[start..position].split('.').next().unwrap_or_default().to_string();
        let address = address_of(task, &namespace, &name).await?;
        done.push_str(&rest[..start]);
        done.push_str(&address.to_string());
        rest = &rest[position + suffix.len()..];
    }
    Ok(done + rest)
}

/// Returns a pod's address, waiting if it has none yet.
async fn address_of(task: &Task, namespace: &str, name: &str) -> Result<Ipv4Addr> {
    let deadline = Instant::now() + TIMEOUT;
    while Instant::now() < deadline {
        let key = (namespace.to_string(), name.to_string());
        if let Some((_, address)) = task.shared.state().names.get(&key) {
            return Ok(*address);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    bail!("no address of pod {name} after {} s", TIMEOUT.as_secs())
}

async fn fill(task: &Task, volume: &Volume, path: &Path) -> Result<()> {
    fs::create_dir_all(path)?;
    let namespace = task.pod.namespace().unwrap_or_default();
    let write = |name: &str, content: &[u8], mode: i32| -> Result<()> {
        let file = path.join(name);
        fs::write(&file, content)?;
        // Only root can set the volume's group owner; other users keep their own files private.
        let mask = if rustix::process::geteuid().is_root() { 0o777 } else { 0o700 };
        fs::set_permissions(&file, fs::Permissions::from_mode(mode.unsigned_abs() & mask))?;
        Ok(())
    };
    if let Some(source) = &volume.config_map {
        let map = Api::<ConfigMap>::namespaced(task.shared.client.clone(), &namespace).get(&source.name).await?;
        for (name, text) in map.data.iter().flatten() {
            write(name, text.as_bytes(), source.default_mode.unwrap_or(0o644))?;
        }
    } else if let Some(source) = &volume.secret {
        let name = source.secret_name.as_deref().unwrap_or_default();
        let secret = Api::<Secret>::namespaced(task.shared.client.clone(), &namespace).get(name).await?;
        for (name, bytes) in secret.data.iter().flatten() {
            write(name, &bytes.0, source.default_mode.unwrap_or(0o644))?;
        }
    } else if volume.empty_dir.is_none() {
        bail!("only ConfigMap, Secret and emptyDir are supported");
    }
    Ok(())
}
