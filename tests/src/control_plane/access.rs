//! Access to a control plane: users with static tokens, their kubeconfigs, and clients.

use super::ControlPlane;
use anyhow::{Result, anyhow};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Users with a static token: name and groups.
const USERS: [(&str, &str); 6] = [
    ("admin", "system:masters"),
    ("system:kube-controller-manager", ""),
    ("system:kube-scheduler", ""),
    ("system:kube-proxy", ""),
    ("switchyard-controller", "system:masters"),
    ("training-operator", "system:masters"),
];

/// Longest wait for one answer of a starting API server.
const READY_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns the user name of a node's kubelet.
pub(crate) fn kubelet_user(node: &str) -> String {
    format!("system:node:{node}")
}

/// Returns a kubeconfig for a user with a static token. The CA file must have signed the server's
/// certificate.
pub(crate) fn kubeconfig_text(user: &str, server: &str, authority: &Path) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: bench\nclusters:\n- name: bench\n  cluster:\n    server: {server}\n    \
         certificate-authority: {}\nusers:\n- name: user\n  user:\n    token: \"token-{user}\"\ncontexts:\n- name: bench\n  context:\n    \
         cluster: bench\n    user: user\n",
        authority.display()
    )
}

/// Runs a future to its end, also on a thread that belongs to a runtime.
pub(super) fn completed<T: Send>(work: impl Future<Output = Result<T>> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let run = || tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work);
        scope.spawn(run).join().map_err(|_| anyhow!("a call of the API server panicked"))?
    })
}

/// Fails unless the API server answers that it is ready.
pub(super) async fn answers(config: &Config) -> Result<()> {
    let request = http::Request::get("/readyz").body(Vec::new())?;
    tokio::time::timeout(READY_TIMEOUT, Client::try_from(config.clone())?.request_text(request)).await??;
    Ok(())
}

impl ControlPlane {
    pub(super) fn write_users(&self) -> Result<()> {
        let mut users: Vec<(String, &str)> = USERS.iter().map(|(user, groups)| (user.to_string(), *groups)).collect();
        let nodes = self.options.reach.iter().flat_map(|reach| &reach.nodes);
        users.extend(nodes.map(|node| (kubelet_user(node), "system:nodes")));
        let mut tokens = String::new();
        for (user, groups) in users {
            let token = format!("token-{user}");
            tokens.push_str(&format!("{token},{user},{user},\"{groups}\"\n"));
            self.write_kubeconfig(&user, &self.url())?;
        }
        fs::write(self.folder.join("tokens.csv"), tokens)?;
        Ok(())
    }

    fn write_kubeconfig(&self, user: &str, server: &str) -> Result<PathBuf> {
        let path = self.kubeconfig(user);
        fs::write(&path, kubeconfig_text(user, server, &self.folder.join("ca.crt")))?;
        Ok(path)
    }

    /// Writes an administrator kubeconfig for another address of this API server, such as a proxy
    /// in front of it.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn kubeconfig_for(&self, name: &str, server: &str) -> Result<PathBuf> {
        let path = self.folder.join(format!("{name}.kubeconfig"));
        let admin = self.write_kubeconfig("admin", server)?;
        fs::rename(admin, &path)?;
        self.write_kubeconfig("admin", &self.url())?;
        Ok(path)
    }

    /// Returns the path of a user's kubeconfig.
    pub fn kubeconfig(&self, user: &str) -> PathBuf {
        self.folder.join(format!("{}.kubeconfig", user.replace(':', "-")))
    }

    /// Returns the administrator's client configuration. It does not retry, because tests check
    /// individual responses.
    ///
    /// # Errors
    /// The kubeconfig cannot be read.
    pub async fn config(&self) -> Result<Config> {
        let file = Kubeconfig::read_from(self.kubeconfig("admin"))?;
        Ok(Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?)
    }

    /// Returns a client with administrator rights.
    ///
    /// # Errors
    /// See [`ControlPlane::config`].
    pub async fn client(&self) -> Result<Client> {
        Ok(Client::try_from(self.config().await?)?)
    }
}
