//! A certificate authority for each control plane, so that clients can verify servers.

use anyhow::Result;
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use std::path::Path;

/// Writes the CA and its certificates:
///
/// - `ca.crt`;
/// - `server.crt` and `server.key`, for these names in addition to the default ones;
/// - `kubelet-client.crt` and `kubelet-client.key`, the API server's client certificate for
///   kubelets;
/// - `accounts.key` and `accounts.pub`, which sign and verify service account tokens.
pub(super) fn write(folder: &Path, names: &[&str]) -> Result<()> {
    let key = KeyPair::generate()?;
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.distinguished_name.push(DnType::CommonName, "switchyard-test-ca");
    std::fs::write(folder.join("ca.crt"), authority.self_signed(&key)?.pem())?;
    let issuer = Issuer::new(authority, key);
    let names = [&["localhost", "127.0.0.1", "kubernetes.default.svc"], names].concat();
    signed(&issuer, &names, None, &folder.join("server"))?;
    signed(&issuer, &[], Some("system:masters"), &folder.join("kubelet-client"))?;
    let accounts = KeyPair::generate()?;
    std::fs::write(folder.join("accounts.key"), accounts.serialize_pem())?;
    std::fs::write(folder.join("accounts.pub"), accounts.public_key_pem())?;
    Ok(())
}

/// Writes a certificate and its key, for a server with these names or a client in this group.
fn signed(issuer: &Issuer<'_, KeyPair>, names: &[&str], group: Option<&str>, path: &Path) -> Result<()> {
    let key = KeyPair::generate()?;
    let mut parameters = CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>())?;
    parameters.distinguished_name.push(DnType::CommonName, "kube-apiserver");
    if let Some(group) = group {
        parameters.distinguished_name.push(DnType::OrganizationName, group);
        parameters.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
    }
    std::fs::write(path.with_extension("crt"), parameters.signed_by(&key, issuer)?.pem())?;
    std::fs::write(path.with_extension("key"), key.serialize_pem())?;
    Ok(())
}

/// Returns a self-signed certificate and key in PEM, for a kubelet; clients do not verify it.
pub(crate) fn self_signed() -> Result<(String, String)> {
    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new(["127.0.0.1".to_string()])?.self_signed(&key)?;
    Ok((certificate.pem(), key.serialize_pem()))
}
