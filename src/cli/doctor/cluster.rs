//! `switchyard doctor cluster`: checks Switchyard's installation in a cluster for its
//! administrator, and suggests a fix for each finding.
//!
//! ```text
//! the API server ─> Seen (gather) ─> checks (pure) ─> findings ─> screen, exit code
//! ```

mod checks;
mod observations;
mod rights;
#[cfg(test)]
mod tests;

use crate::args::{Cli, DoctorClusterArgs};
use crate::connect;
use crate::failure::Failure;
use crate::output::{emit, width};
use crate::text::Screen;
use serde::Serialize;
use serde_json::json;
use switchyard_service::Connection;
use switchyard_worker_contract::exit::Exit;

/// The exit code when there are findings, as in linters.
const FOUND: Exit = Exit::Unexpected;

/// A problem with a suggested fix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Finding {
    check: &'static str,
    what: String,
    fix: String,
}

impl Finding {
    fn new(check: &'static str, what: impl Into<String>, fix: impl Into<String>) -> Finding {
        Finding { check, what: what.into(), fix: fix.into() }
    }
}

/// Checks a cluster.
pub(super) fn cluster(cli: &Cli, args: &DoctorClusterArgs) -> Result<Exit, Failure> {
    let connection = Connection { kubeconfig: args.kubeconfig.clone(), context: args.context.clone() };
    let observations = connect::wait_for(async {
        let cluster = connect::open(&connection).await?;
        Ok(connect::answer(&cluster.server, observations::gather(&cluster.client, &cluster.clock)).await)
    })?;
    let findings = checks::all(&observations);
    emit(cli.output, "ClusterDiagnosis", &json!({"findings": findings}), || screen(&findings, width()));
    Ok(if findings.is_empty() { Exit::Done } else { FOUND })
}

fn screen(findings: &[Finding], width: usize) -> String {
    if findings.is_empty() {
        return "ok\n".into();
    }
    let mut screen = Screen::new(width);
    for Finding { check, what, fix } in findings {
        screen.paragraph(&format!("{check}:"), what);
        screen.paragraph("  fix", fix);
    }
    screen.into_text()
}
