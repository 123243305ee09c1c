//! A certificate authority of its own for every control plane, so that clients verify whom they talk to.

use anyhow::Result;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use std::path::Path;

/// Writes `ca.crt`, `server.crt`, `server.key` and `accounts.key` with `accounts.pub` (which sign and verify tokens of
/// service accounts).
pub(super) fn write(folder: &Path) -> Result<()> {
    let key = KeyPair::generate()?;
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.distinguished_name.push(DnType::CommonName, "switchyard-test-ca");
    std::fs::write(folder.join("ca.crt"), authority.self_signed(&key)?.pem())?;
    let issuer = Issuer::new(authority, key);
    let (certificate, key) = server(&issuer)?;
    std::fs::write(folder.join("server.crt"), certificate)?;
    std::fs::write(folder.join("server.key"), key)?;
    let accounts = KeyPair::generate()?;
    std::fs::write(folder.join("accounts.key"), accounts.serialize_pem())?;
    std::fs::write(folder.join("accounts.pub"), accounts.public_key_pem())?;
    Ok(())
}

fn server(issuer: &Issuer<'_, KeyPair>) -> Result<(String, String)> {
    let key = KeyPair::generate()?;
    let names = ["localhost", "127.0.0.1", "kubernetes.default.svc"].map(String::from);
    let certificate = CertificateParams::new(names)?.signed_by(&key, issuer)?;
    Ok((certificate.pem(), key.serialize_pem()))
}

/// A certificate that nobody verifies, for a kubelet: certificate and key in PEM.
pub(crate) fn self_signed() -> Result<(String, String)> {
    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new(["127.0.0.1".to_string()])?.self_signed(&key)?;
    Ok((certificate.pem(), key.serialize_pem()))
}
