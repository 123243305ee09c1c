//! Who may talk to a control plane: users with static tokens, their kubeconfigs, clients.

use super::ControlPlane;
use anyhow::Result;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use std::fs;
use std::path::{Path, PathBuf};

/// Users with a static token: name and groups.
const USERS: [(&str, &str); 6] = [
    ("admin", "system:masters"),
    ("system:kube-controller-manager", ""),
    ("system:kube-scheduler", ""),
    ("system:kube-proxy", ""),
    ("switchyard-controller", "system:masters"),
    ("training-operator", "system:masters"),
];

/// The user of a node's kubelet.
pub(crate) fn kubelet_user(node: &str) -> String {
    format!("system:node:{node}")
}

/// A kubeconfig of a user with a static token, for a server whose certificate is signed by the authority in this file.
pub(crate) fn kubeconfig_text(user: &str, server: &str, authority: &Path) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: bench\nclusters:\n- name: bench\n  cluster:\n    server: {server}\n    \
         certificate-authority: {}\nusers:\n- name: user\n  user:\n    token: \"token-{user}\"\ncontexts:\n- name: bench\n  context:\n    \
         cluster: bench\n    user: user\n",
        authority.display()
    )
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

    /// A kubeconfig of the administrator for another address of this API server, such as a proxy before it.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn kubeconfig_for(&self, name: &str, server: &str) -> Result<PathBuf> {
        let path = self.folder.join(format!("{name}.kubeconfig"));
        let admin = self.write_kubeconfig("admin", server)?;
        fs::rename(admin, &path)?;
        self.write_kubeconfig("admin", &self.url())?;
        Ok(path)
    }

    /// The kubeconfig of a user.
    pub fn kubeconfig(&self, user: &str) -> PathBuf {
        self.folder.join(format!("{}.kubeconfig", user.replace(':', "-")))
    }

    /// Configuration of a client as administrator. No retries: a test wants to see what happens.
    ///
    /// # Errors
    /// The kubeconfig cannot be read.
    pub async fn config(&self) -> Result<Config> {
        let file = Kubeconfig::read_from(self.kubeconfig("admin"))?;
        Ok(Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?)
    }

    /// A client as administrator.
    ///
    /// # Errors
    /// See [`ControlPlane::config`].
    pub async fn client(&self) -> Result<Client> {
        Ok(Client::try_from(self.config().await?)?)
    }
}
