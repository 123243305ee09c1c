//! Ports of test processes.

use anyhow::{Result, bail};
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// Returns a port with no listener. Ports are below the ephemeral range (32768 and above, `ip(7)`),
/// where an outgoing connection could take a port that was free a moment earlier, and avoid the
/// Kubernetes defaults. No two processes get the same port: each holds an abstract socket with the
/// name of its port until it ends.
pub(crate) fn free_port() -> Result<u16> {
    const FIRST: u32 = 12_000;
    const COUNT: u32 = 30_000 - FIRST;
    /// Distance between the first ports of two processes.
    const PER_PROCESS: u32 = 211;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    static CLAIMS: Mutex<Vec<UnixListener>> = Mutex::new(Vec::new());
    let start = std::process::id().wrapping_mul(PER_PROCESS) % COUNT;
    for _ in 0..COUNT {
        let at = (start + NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT;
        let port = u16::try_from(FIRST + at)?;
        let name = SocketAddr::from_abstract_name(format!("switchyard-test-port-{port}"))?;
        let Ok(claim) = UnixListener::bind_addr(&name) else { continue };
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            CLAIMS.lock().unwrap_or_else(PoisonError::into_inner).push(claim);
            return Ok(port);
        }
    }
    bail!("no port of {FIRST} to {} is free", FIRST + COUNT - 1)
}
