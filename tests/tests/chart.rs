//! The Helm chart: rendering per values set, accepted values, and its lifecycle on a real API
//! server.
//!
//! The sets are in `chart/values`, and their renderings in `tests/golden/chart`. After a change,
//! run `INSTA_UPDATE=always cargo test -p switchyard-tests --test plane chart::` and review `git
//! diff tests/golden`.

mod alerts;
mod doctor;
mod life;
mod metrics;
mod policies;
mod readers;
mod releases;
mod render;
mod rules;
mod sequences;
mod server;
mod values;

use std::path::PathBuf;
use std::sync::OnceLock;
use switchyard_tests::{ControlPlane, agent_plane, root};

/// The arguments of `helm template` for a cluster with the Prometheus operator.
const MONITORING: [&str; 2] = ["--api-versions", "monitoring.coreos.com/v1"];

/// Files of a folder next to this one: stem, path, text.
fn files(folder: &str) -> Vec<(String, PathBuf, String)> {
    let folder = root().join("tests/tests/chart").join(folder);
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .map(|path| {
            let text = std::fs::read_to_string(&path).unwrap();
            (path.file_stem().unwrap().to_string_lossy().into_owned(), path, text)
        })
        .collect();
    files.sort();
    files
}

/// A control plane with the chart and secure metrics, for tests that leave the chart as it is.
fn installed() -> &'static ControlPlane {
    static PLANE: OnceLock<ControlPlane> = OnceLock::new();
    let start = || agent_plane(&["--set", "metrics.secure.enabled=true"]);
    PLANE.get_or_init(|| start().unwrap_or_else(|error| panic!("{error:#}")))
}
