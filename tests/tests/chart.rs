//! The Helm chart: what it renders for sets of values, which values it takes, and its life on a real API server.
//!
//! The sets are in `chart/values`; what each renders is in `tests/golden/chart`. After a change: look at `git diff tests/golden`
//! after `INSTA_UPDATE=always cargo test -p switchyard-tests --test plane chart::`.

mod alerts;
mod doctor;
mod life;
mod metrics;
mod policies;
mod readers;
mod render;
mod rules;
mod sequences;
mod server;
mod values;

use std::path::PathBuf;
use switchyard_tests::root;

/// The arguments of `helm template` for a cluster with the Prometheus operator.
const MONITORING: [&str; 2] = ["--api-versions", "monitoring.coreos.com/v1"];

/// The files of a folder beside this one: name without its end, path, text.
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
