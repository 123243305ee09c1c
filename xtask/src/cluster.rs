//! `cargo xtask cluster`: prepares the prerequisites of a cluster on this machine, then hands over
//! to the program that runs it.

mod arguments;

pub(crate) use arguments::Action;
use arguments::{SKIPPED, Up};

use crate::images::{self, programs_in};
use crate::programs::build_all;
use crate::setup;
use crate::workspace::{LOCAL, built_in, step};
use anyhow::{Result, bail};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::thread;

/// The program that runs a cluster.
const BENCH: &str = "switchyard-bench-cluster";

const CONTROL_PLANE: &[&str] = &["etcd", "kubernetes"];
const NODES: &[&str] = &["kubernetes-node", "containerd", "coredns"];

/// Builds the control plane if it is missing.
pub(crate) fn control_plane() -> Result<()> {
    build_all(CONTROL_PLANE).map(drop)
}

/// Installs and builds the programs of real nodes if they are missing.
pub(crate) fn real_nodes() -> Result<()> {
    setup::node_tools()?;
    build_all(NODES).map(drop)
}

/// Runs an action and returns its exit code.
pub(crate) fn cluster(action: &Action) -> ExitCode {
    let needs_nodes = matches!(action, Action::Check | Action::Up(Up { nodes: 1.., .. }));
    if needs_nodes && let Some(missing) = setup::missing_for_nodes() {
        eprintln!("real nodes cannot run here: {missing}");
        return ExitCode::from(SKIPPED);
    }
    let prepared = match action {
        Action::Up(up) => prepare(up),
        Action::Down | Action::Status | Action::Check => {
            step("building the cluster program", programs_in(LOCAL, &[BENCH]).arg("--quiet"))
        }
    };
    if let Err(error) = prepared {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    let program = built_in(LOCAL).join(BENCH);
    let mut command = Command::new(&program);
    // Pass on the arguments as typed; they are already validated.
    command.args(std::env::args_os().skip_while(|argument| argument != "cluster").skip(1));
    if let Action::Up(Up { nodes: 1.., images: None, .. }) = action {
        command.arg("--images").arg(images::folder());
    }
    let error = command.exec();
    eprintln!("error: cannot start {}: {error}", program.display());
    ExitCode::FAILURE
}

/// Builds the programs that `up` starts, Go programs in parallel with Rust programs.
fn prepare(up: &Up) -> Result<()> {
    let is_real = up.nodes > 0;
    if is_real {
        // Install first: apt can prompt the user, and nothing is compiled until then.
        setup::node_tools()?;
    }
    thread::scope(|scope| {
        let others =
            scope.spawn(|| build_all(&if is_real { [CONTROL_PLANE, NODES].concat() } else { CONTROL_PLANE.to_vec() }));
        let loads_images = is_real && up.images.is_none();
        let in_images = images::IMAGES.iter().map(|image| image.name).filter(|_| loads_images);
        let programs: Vec<&str> = [BENCH, "switchyard", "switchyard-worker"].into_iter().chain(in_images).collect();
        let own = step(&format!("building {} ({LOCAL})", programs.join(", ")), &mut programs_in(LOCAL, &programs));
        let own = own.and_then(|()| match loads_images {
            true => images::images(None, LOCAL),
            false => Ok(()),
        });
        let others = others.join().unwrap_or_else(|_| bail!("the build of the Go programs panicked"));
        others.map(drop).and(own)
    })
}
